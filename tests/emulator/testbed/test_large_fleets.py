"""Ten thousand devices of which a hundred train in a round: what a round needs does not depend on those before it."""

from __future__ import annotations

import tracemalloc

from coordinator.models.registry import build_model
from coordinator.rounds.round import EvaluationPlan
from coordinator.strategies.baselines.fedavg import FedAvg
from edge_client.data.dataset import Dataset, DeviceData
from emulator.data import registry
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.run.execute import run_simulation
from emulator.run.settings import RunSettings
from emulator.run.summary import Record
from emulator.simulation.emulated_devices import EmulatedDevices
from emulator.simulation.spill import SpilledModels
from export.compiler.program import vector_of

DEVICES, COHORT, TRAIN, TEST = 10_000, 0.01, 16, 8


def fleet() -> dict[str, DeviceData]:
    """Views of the digits, which all devices share."""
    digits = registry.load_data_set("digits").joined()
    x, y = digits.ready(digits.train.x), digits.train.y
    whole = [Dataset(x[i : i + TRAIN + TEST], y[i : i + TRAIN + TEST]) for i in range(len(x) - TRAIN - TEST)]
    halves = [
        DeviceData(train=Dataset(d.x[:TRAIN], d.y[:TRAIN]), test=Dataset(d.x[TRAIN:], d.y[TRAIN:])) for d in whole
    ]
    return {f"d{i:05d}": halves[13 * i % len(halves)] for i in range(DEVICES)}


def test_a_later_round_needs_no_more_memory_than_an_early_one() -> None:
    """Numpy tells tracemalloc of its arrays. The last round tests everybody, and is not measured."""
    model = build_model("digits-mlp", seed=0)
    learner = cpu_recipe(model).open()
    start = vector_of(model.module, learner.program.schema)
    devices = EmulatedDevices(learner=learner, local=fleet(), own=SpilledModels(50 * start.nbytes))
    peaks: list[int] = []
    tested: list[int] = []

    def ended(record: Record) -> None:
        tested.append(len(record["per_device"]))
        if tracemalloc.is_tracing():
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.reset_peak()
        if len(tested) == 5:
            tracemalloc.stop()

    tracemalloc.start()
    strategy = FedAvg(local_steps=2, batch_size=8, fraction_train=COHORT)
    asked = EvaluationPlan(fraction=COHORT)
    try:
        settings = RunSettings(rounds=6, seed=0, batch=8, evaluation=asked)
        result = run_simulation(strategy, start, devices, settings, progress=ended)
    finally:
        tracemalloc.stop()
    # Of 300 devices that train for the first time and 300 that test, three rounds later a place in the books and in
    # the engine's cache of tensors that look at their samples is held: about 0.5 and 0.7 kB. A model is 19 kB.
    assert peaks[4] <= peaks[1] + 300 * 2_000
    assert len(devices.own) > 6 * 50  # of which 50 are in memory
    assert tested == [100] * 5 + [DEVICES]
    assert len(result.records) == len(result.real_seconds) == 6
    assert result.records[2]["round"] == 3
