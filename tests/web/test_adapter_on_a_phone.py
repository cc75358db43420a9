"""A phone's browser trains an adapter: it fetches the frozen base once, and has what Python's client has."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.local_broker import free_port
from coordinator.models.registry import build_model
from coordinator.storage.store import Store
from edge_client.protocol.program import FROZEN
from edge_client.protocol.task import Array, Fit, Flat
from edge_client.training import fit_probe
from edge_client.training.learner import EngineLearner
from emulator.testbed import testbed_files as stage
from emulator.testbed.processes import ChildProcesses, DeferredSignals
from export.compiler.program import CompilerOutput, vector_of
from tests.support.browser import PHONE, Open
from tests.support.phone_page import PATIENCE_MS, digits, listens, load_table, local, served, text
from tests.support.phone_traffic import overheard
from tests.support.process_fleet import FleetScene, centers_in, until
from tests.support.programs import compiled, opened
from tests.support.virtual_federation import put_program

pytestmark = [pytest.mark.broker, pytest.mark.browser]

ME, SAMPLES = "phone-1", 120
TRAIN = SAMPLES - SAMPLES // 5  # the page keeps every fifth to test
ROUNDS, STEPS, RATE = 2, 20, 0.5
MODEL = "tests.support.adapted_digits:ENTRY"
RUN: dict[str, Any] = {
    "method": "fedavg",
    "num-rounds": ROUNDS,
    "local-steps": STEPS,
    "batch-size": TRAIN,  # every step sees all samples, in whatever order
    "learning-rate": RATE,
    "momentum": 0.0,
}


class PhoneRequests:
    """The blobs that the phone asks for, each with the round of the task that it had by then."""

    def __init__(self) -> None:
        self.wishes: list[tuple[int, str]] = []
        self.rounds: set[int] = set()
        self._round = 0

    def hear(self, said: Mapping[str, Any]) -> None:
        if said["k"] == "task":
            self._round = said["round"]
            self.rounds.add(self._round)
        if said["k"] == "get":
            self.wishes.append((self._round, said["sha256"]))


def prepared(scene: FleetScene, made: CompilerOutput, port: int, name: str = MODEL) -> Path:
    """The coordinator's configuration; it finds its program compiled."""
    config = scene.work / "coordinator.toml"
    facts: dict[str, Any] = {"broker": f"mosquitto:{port}", "web-port": free_port(), "devices": 1, "seed": 3}
    model = {"name": name, "engines": ["onnx"]}
    more: dict[str, Any] = {"formats": [], "reference": "", "exit_when_done": False, "model": model}
    stage.write_coordinator(config, scene.folder, runs=scene.runs, **facts, **more)
    scene.folder.mkdir(parents=True)
    with closing(Store(scene.folder / "store")) as store:
        put_program(store, made.program, made.files.values(), start_of(made, name))
    return config


def start_of(made: CompilerOutput, name: str = MODEL) -> Flat:
    return vector_of(build_model(name, seed=0).module, made.program.schema)


def trained_in_python(made: CompilerOutput, folder: Path) -> dict[str, Array]:
    """The rounds of the run on the phone's samples with the engine of Python's client."""
    x, y = digits()
    kept = [i for i in range(SAMPLES) if i % 5 != 4]
    data = local(x[kept], y[kept], TRAIN).train
    learner, w = EngineLearner(opened(made, "onnx", folder), made.program), start_of(made)
    for _ in range(ROUNDS):
        task = Fit(start=w, anchor=None, lr=RATE, momentum=0.0, mu=0.0, steps=STEPS, batch=TRAIN, seed=0)
        w = fit_probe.run_fit(learner, task, data).vector
    return made.program.schema.split(w)


def test_it_fetches_the_base_once_and_trains_the_adapter_as_pythons_client_does(visit: Open, tmp_path: Path) -> None:
    port, made, heard = free_port(), compiled(MODEL, engines=("onnx",)), PhoneRequests()
    base = made.program.containers["onnx"][FROZEN].sha256
    with DeferredSignals() as signals, ChildProcesses(tmp_path / "logs", signals) as children:
        scene = FleetScene(tmp_path / "run", f"mqtt://127.0.0.1:{port}", children, (RUN,))
        config = prepared(scene, made, port)
        children.python("coordinator", "-m", "coordinator.cli", "serve", str(config))
        until(lambda: listens(port), children, "the coordinator's broker")
        with served(config) as url, overheard(port, stage.DEMO_FEDERATION, ME, heard.hear):
            page = visit(f"{url}#id={ME}", size=PHONE, touch=True).page
            page.wait_for_selector("#entry:not([hidden])", timeout=PATIENCE_MS)
            load_table(page, tmp_path, SAMPLES)
            text(page, "count", f"^{SAMPLES} in 10 classes")
            page.get_by_role("button", name="Take part").click()
            scene.wait_for("done")
            page.goto("about:blank")  # before the broker ends
    assert {sha256 for round_, sha256 in heard.wishes if round_ == 1} >= {base}
    assert heard.rounds == {1, 2}
    assert [round_ for round_, sha256 in heard.wishes if sha256 == base] == [1]
    (center,), wanted = centers_in(scene.folder, "fedavg"), trained_in_python(made, tmp_path)
    for name, weights in wanted.items():
        np.testing.assert_allclose(center[name], weights, atol=1e-5)
    assert np.abs(center["3.lora_B.weight"]).max() > 1e-2
