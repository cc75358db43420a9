"""Emulated devices on sums: what grows with their number is less than a vector of words for each."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from coordinator.strategies.registry import make_method
from edge_client.protocol.task import Array
from edge_client.training.learner import EngineLearner
from emulator.run.execute import run_simulation
from emulator.run.settings import RunSettings
from emulator.simulation import spill
from emulator.simulation.emulated_devices import EmulatedDevices, no_rounding
from tests.support import softmax_program
from tests.support.virtual_federation import WideEngine, program

BALLAST = 25_000  # parameters that no sample reads, so that a model is much larger than all else of a device
FIRST, FEW, MANY = 12, 80, 140  # with 80 devices there are as many first groups as there ever are
BATCH = 256  # above the samples of any device: what is held for a batch does not grow with the devices


def peak(method: str, devices: int, secure: str) -> int:
    """The most bytes that a run of one round and its evaluation held."""
    wide = program(ballast=BALLAST)
    start: Array = np.zeros(wide.schema.size)
    start[: len(softmax_program.start_of())] = softmax_program.start_of()
    local = softmax_program.grouped_fleet(devices, 2, n=4)
    fleet = EmulatedDevices(learner=EngineLearner(WideEngine(), wide), local=local, wire=no_rounding)
    strategy = make_method(method, secure=secure, **{"local-steps": 1, "batch-size": BATCH, "secure-clip": 10.0})
    tracemalloc.start()
    try:
        run_simulation(strategy, start, fleet, RunSettings(rounds=1, seed=0, batch=BATCH))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("method", "secure"),
    [("fedavg", "updates"), ("ifca", "updates+membership"), ("pfedme", "updates"), ("fedem", "updates")],
)
def test_a_round_on_sums_holds_no_vector_for_each_device(
    monkeypatch: pytest.MonkeyPatch, method: str, secure: str
) -> None:
    """The models of three devices have room in memory; a word has 4 bytes, a parameter of this model 8."""
    monkeypatch.setattr(spill, "MAX_MEMORY_BYTES", 3 * 8 * BALLAST)
    peak(method, FIRST, secure)  # what is imported and cached once
    few, many = (peak(method, devices, secure) for devices in (FEW, MANY))
    assert many - few < (MANY - FEW) * 4 * BALLAST / 4
