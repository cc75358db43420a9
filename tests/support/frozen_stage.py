"""A device on a stage whose program has frozen tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_client.protocol import codecs
from edge_client.protocol.program import FROZEN, Container
from edge_client.protocol.task import Schema, TensorSpec
from tests.support.scripted_coordinator import DeviceStage, program

BASE = Schema((TensorSpec(name="base", role="p", shape=(40, 50)),))
FILE = codecs.encode_vector(np.arange(BASE.size) / 7, BASE, codec="f16", kind=FROZEN)


def frozen_stage(folder: Path) -> DeviceStage:
    plain = program()
    listed = DeviceStage(folder).blob(FILE, FROZEN)
    files = {**plain.containers["onnx"], FROZEN: Container(sha256=listed.sha256, size=listed.size)}
    stage = DeviceStage(folder, program=replace(plain, containers={"onnx": files}, frozen=BASE))
    stage.blob(FILE, FROZEN)
    return stage


def fetches_of_the_base(stage: DeviceStage) -> int:
    """How often the device began to fetch it."""
    base = stage.program.containers["onnx"][FROZEN].sha256
    return [message["sha256"] for message in stage.said("get")].count(base)
