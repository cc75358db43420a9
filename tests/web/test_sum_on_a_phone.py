"""A phone's browser trains a sum of models, one member after the other, and has what Python's client has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.round import round_rng
from coordinator.strategies.base import drive
from coordinator.strategies.registry import make_method
from edge_client.training.learner import EngineLearner
from emulator.simulation.emulated_devices import EmulatedDevices, round_through_f32_delta
from export.compiler.program import CompilerOutput
from tests.support.browser import Open
from tests.support.one_phone import KEPT, ME, ROUNDS, SAMPLES, SETTINGS, TRAIN, one_phone, start_of
from tests.support.phone_page import digits, load_table, local, text
from tests.support.process_fleet import centers_in
from tests.support.programs import compiled, opened

pytestmark = [pytest.mark.broker, pytest.mark.browser]

MODEL = "digits-mlp+digits-mlp"
CAM = {"clusters": 1, "start": "redraw", **SETTINGS}


def trained_in_python(made: CompilerOutput, folder: Path) -> Mapping[str, Any]:
    """The rounds of the run on the phone's samples, by the method and the engine of Python's client."""
    x, y = digits()
    learner = EngineLearner(opened(made, "onnx", folder), made.program)
    devices = EmulatedDevices(learner=learner, local={ME: local(x[KEPT], y[KEPT], TRAIN)}, wire=round_through_f32_delta)
    method, schema = make_method("cam", **CAM), made.program.schema
    state = method.begin(start_of(made, MODEL), schema, devices.fleet, round_rng(3, 0))
    for number in range(1, ROUNDS + 1):
        exchanges = method.round(state, schema, devices.fleet, round_rng(3, number))
        state = drive(exchanges, lambda asked: {c: devices.answer(c, task) for c, task in asked.items()})
    return schema.split(state.centers[0])


def test_a_phone_trains_each_member_of_a_sum_as_pythons_client_does(visit: Open, tmp_path: Path) -> None:
    made = compiled(MODEL, engines=("onnx",))
    run = {"method": "cam", "num-rounds": ROUNDS, **CAM}
    with one_phone(visit, tmp_path, made, MODEL, run) as (opened_page, take_part):
        load_table(opened_page.page, tmp_path, SAMPLES)
        text(opened_page.page, "count", f"^{SAMPLES} in 10 classes")
        take_part()
    (center,), wanted = centers_in(tmp_path / "run", "cam"), trained_in_python(made, tmp_path)
    start = made.program.schema.split(start_of(made, MODEL))
    for name, weights in wanted.items():
        np.testing.assert_allclose(center[name], weights, atol=1e-3)  # centers travel as differences in int8
    for member in (0, 1):
        assert np.abs(center[f"members.{member}.3.weight"] - start[f"members.{member}.3.weight"]).max() > 1e-2
