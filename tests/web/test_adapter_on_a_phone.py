"""A phone's browser trains an adapter: it fetches the frozen base once, and has what Python's client has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.protocol.program import FROZEN
from edge_client.protocol.task import Array, Fit
from edge_client.training import fit_probe
from edge_client.training.learner import EngineLearner
from emulator.testbed import testbed_files as stage
from export.compiler.program import CompilerOutput
from tests.support.browser import Open
from tests.support.one_phone import KEPT, ME, RATE, ROUNDS, SAMPLES, SETTINGS, STEPS, TRAIN, one_phone, start_of
from tests.support.phone_page import digits, load_table, local, text
from tests.support.phone_traffic import overheard
from tests.support.ports import free_port
from tests.support.process_fleet import centers_in
from tests.support.programs import compiled, opened

pytestmark = [pytest.mark.broker, pytest.mark.browser]

MODEL = "tests.support.adapted_digits:ENTRY"
RUN = {"method": "fedavg", "num-rounds": ROUNDS, **SETTINGS}


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


def trained_in_python(made: CompilerOutput, folder: Path) -> dict[str, Array]:
    """The rounds of the run on the phone's samples with the engine of Python's client."""
    x, y = digits()
    data = local(x[KEPT], y[KEPT], TRAIN).train
    learner, w = EngineLearner(opened(made, "onnx", folder), made.program), start_of(made, MODEL)
    for _ in range(ROUNDS):
        task = Fit(start=w, anchor=None, lr=RATE, momentum=0.0, mu=0.0, steps=STEPS, batch=TRAIN, seed=0)
        w = fit_probe.run_fit(learner, task, data).vector
    return made.program.schema.split(w)


def test_it_fetches_the_base_once_and_trains_the_adapter_as_pythons_client_does(visit: Open, tmp_path: Path) -> None:
    port, made, heard = free_port(), compiled(MODEL, engines=("onnx",)), PhoneRequests()
    base = made.program.containers["onnx"][FROZEN].sha256
    with (
        one_phone(visit, tmp_path, made, MODEL, RUN, port=port) as (opened_page, take_part),
        overheard(port, stage.DEMO_FEDERATION, ME, heard.hear),
    ):
        load_table(opened_page.page, tmp_path, SAMPLES)
        text(opened_page.page, "count", f"^{SAMPLES} in 10 classes")
        take_part()
    assert {sha256 for round_, sha256 in heard.wishes if round_ == 1} >= {base}
    assert heard.rounds == {1, 2}
    assert [round_ for round_, sha256 in heard.wishes if sha256 == base] == [1]
    (center,), wanted = centers_in(tmp_path / "run", "fedavg"), trained_in_python(made, tmp_path)
    for name, weights in wanted.items():
        np.testing.assert_allclose(center[name], weights, atol=1e-5)
    assert np.abs(center["3.lora_B.weight"]).max() > 1e-2
