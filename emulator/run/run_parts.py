"""What no setting of a run names: its devices' samples, its model's tensors and its loss, as numbers to compare."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data.dataset import DeviceData
from edge_client.errors import ConfigError
from edge_client.protocol.task import ClientId, Schema
from emulator.config import FLEET_FILE
from emulator.simulation.checkpoint import read_checkpoint
from emulator.simulation.drawn_devices import DrawnDevices

KEY = "parts"  # where FLEET_FILE has them
RunParts = Mapping[str, Any]  # "samples", "numbers" of a model, "tensors", and `Marks`; what is not known is missing
Marks = Mapping[str, Any]  # "loss": a `LossMark`; "frozen": a checksum of the values that a model does not train
MARKED = ("loss", "frozen")
LossMark = tuple[str, list[float]]  # the name of the user's own, and what it gives for some outputs
USUAL_LOSS: LossMark = ("", [])
SAME_LOSS = 1e-3  # relative: the same function on another machine


def run_parts(devices: Mapping[ClientId, DeviceData], schema: Schema, marks: Marks) -> RunParts:
    """The parts of a run on these samples with a model of these tensors; `marks` are what else is known of it."""
    told = json.dumps([[t.name, t.role, list(t.shape)] for t in schema.tensors])
    parts = {"samples": samples_checksums(devices), "numbers": schema.size, "tensors": zlib.crc32(told.encode())}
    return {**parts, **marks}


def samples_checksums(devices: Mapping[ClientId, DeviceData]) -> list[int]:
    """-> that of earlier versions, for devices, counts of samples, labels and first samples; then that of all samples.

    `same_samples` compares them.
    """
    if isinstance(devices, DrawnDevices):
        return [zlib.crc32(devices.fleet.samples.tobytes())] * 2
    first = whole = 0
    for who in sorted(devices):
        local = devices[who]
        for part in (local.train, local.test):
            told = () if part is None else (part.y, part.x[:1])
            first = zlib.crc32(f"{who}/{[(a.shape, a.dtype.str) for a in told]}".encode(), first)
            for array in told:
                first = zlib.crc32(np.ascontiguousarray(array).data, first)
            whole = whole if part is None else zlib.crc32(np.ascontiguousarray(part.x).data, whole)
    return [first, whole]


def same_samples(mine: list[int], theirs: object) -> bool:
    """Whether a run that keeps the checksums `theirs` had these samples; an earlier version's has the first alone."""
    return theirs == (mine[0] if isinstance(theirs, int) else mine)


def other_parts(folder: Path, mine: RunParts) -> str:
    """Which run with other parts is in the folder, in words; empty where none is known."""
    theirs = kept_parts(folder)
    other = {key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key]}
    if "samples" in other and not same_samples(mine["samples"], theirs["samples"]):
        return "a run of devices with other samples"
    if "numbers" in other:
        return f"a run of a model with {theirs['numbers']} numbers, not {mine['numbers']}"
    if "tensors" in other:
        return "a run of a model with other tensors"
    if "frozen" in other:
        return "a run of a model with other frozen values"
    return _other_loss(mine["loss"], theirs["loss"]) if "loss" in other else ""


def _other_loss(mine: LossMark, theirs: LossMark) -> str:
    (my_name, my_values), (their_name, their_values) = mine, theirs
    if my_name != their_name:
        return f"a run with {_loss_in_words(their_name)}, not {_loss_in_words(my_name)}"
    same = len(my_values) == len(their_values) and np.allclose(my_values, their_values, rtol=SAME_LOSS, equal_nan=True)
    return "" if same else f"a run with {_loss_in_words(their_name)} that gives other numbers"


def _loss_in_words(name: str) -> str:
    return f"the loss {name}" if name else "the usual loss"


def kept_parts(folder: Path) -> RunParts:
    """What the folder tells: that of a run that was interrupted, or of an older version, has a checkpoint alone."""
    try:
        told: dict[str, Any] = json.loads((folder / FLEET_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        told = {}
    if KEY in told:
        return dict(told[KEY])
    try:
        before = read_checkpoint(folder)
    except ConfigError:
        return {}
    if before is None:
        return {}
    samples = {"samples": before[1].network["samples"]} if "samples" in before[1].network else {}
    return {**samples, **before[1].marks, "numbers": before[1].state.centers.shape[1]}
