"""A phone's browser trains a sum of models, one member after the other, and has what Python's client has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.local_broker import free_port
from coordinator.rounds.round import round_rng
from coordinator.strategies.base import drive
from coordinator.strategies.registry import make_method
from edge_client.training.learner import EngineLearner
from emulator.simulation.emulated_devices import EmulatedDevices, round_through_f32_delta
from emulator.testbed.processes import ChildProcesses, DeferredSignals
from export.compiler.program import CompilerOutput
from tests.support.browser import PHONE, Open
from tests.support.phone_page import PATIENCE_MS, digits, listens, load_table, local, served, text
from tests.support.process_fleet import FleetScene, centers_in, until
from tests.support.programs import compiled, opened
from tests.web.test_adapter_on_a_phone import ME, RATE, ROUNDS, SAMPLES, STEPS, TRAIN, prepared, start_of

pytestmark = [pytest.mark.broker, pytest.mark.browser]

MODEL = "digits-mlp+digits-mlp"
SETTINGS: dict[str, Any] = {
    "clusters": 1,
    "start": "redraw",
    "local-steps": STEPS,
    "batch-size": TRAIN,  # every step sees all samples, in whatever order
    "learning-rate": RATE,
    "momentum": 0.0,
}


def trained_in_python(made: CompilerOutput, folder: Path) -> Mapping[str, Any]:
    """The rounds of the run on the phone's samples, by the method and the engine of Python's client."""
    x, y = digits()
    kept = [i for i in range(SAMPLES) if i % 5 != 4]
    learner = EngineLearner(opened(made, "onnx", folder), made.program)
    devices = EmulatedDevices(learner=learner, local={ME: local(x[kept], y[kept], TRAIN)}, wire=round_through_f32_delta)
    method, schema = make_method("cam", **SETTINGS), made.program.schema
    state = method.begin(start_of(made, MODEL), schema, devices.fleet, round_rng(3, 0))
    for number in range(1, ROUNDS + 1):
        exchanges = method.round(state, schema, devices.fleet, round_rng(3, number))
        state = drive(exchanges, lambda asked: {c: devices.answer(c, task) for c, task in asked.items()})
    return schema.split(state.centers[0])


def test_a_phone_trains_each_member_of_a_sum_as_pythons_client_does(visit: Open, tmp_path: Path) -> None:
    port, made = free_port(), compiled(MODEL, engines=("onnx",))
    run = {"method": "cam", "num-rounds": ROUNDS, **SETTINGS}
    with DeferredSignals() as signals, ChildProcesses(tmp_path / "logs", signals) as children:
        scene = FleetScene(tmp_path / "run", f"mqtt://127.0.0.1:{port}", children, (run,))
        config = prepared(scene, made, port, MODEL)
        children.python("coordinator", "-m", "coordinator.cli", "serve", str(config))
        until(lambda: listens(port), children, "the coordinator's broker")
        with served(config) as url:
            page = visit(f"{url}#id={ME}", size=PHONE, touch=True).page
            page.wait_for_selector("#entry:not([hidden])", timeout=PATIENCE_MS)
            load_table(page, tmp_path, SAMPLES)
            text(page, "count", f"^{SAMPLES} in 10 classes")
            page.get_by_role("button", name="Take part").click()
            scene.wait_for("done")
            page.goto("about:blank")  # before the broker ends
    (center,), wanted = centers_in(scene.folder, "cam"), trained_in_python(made, tmp_path)
    start = made.program.schema.split(start_of(made, MODEL))
    for name, weights in wanted.items():
        np.testing.assert_allclose(center[name], weights, atol=1e-3)  # centers travel as differences in int8
    for member in (0, 1):
        assert np.abs(center[f"members.{member}.3.weight"] - start[f"members.{member}.3.weight"]).max() > 1e-2
