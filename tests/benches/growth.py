"""Bench: how cost grows with devices, centers and parameters. CPU seconds of our emulator, all sizes in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import nn

from coordinator.models.registry import Model, build_model
from coordinator.strategies.registry import make_method
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import Flat
from edge_client.training.learner import Learner
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.run.execute import run_simulation as simulate
from emulator.run.settings import RunSettings
from emulator.simulation.emulated_devices import EmulatedDevices
from export.compiler.program import vector_of
from tests.benches.fit import exponent
from tests.benches.render import number
from tests.benches.results import BenchFigure
from tests.benches.turns import interleaved, timed
from tests.benches.work import BATCH, images, prepared, train

DEVICES = (100, 316, 1_000, 3_162, 10_000)
SAMPLED, TRAIN, TEST = 100, 32, 8
MOST_REPEATS = 5  # ten thousand devices take seconds
CENTERS = (2, 4, 8, 16, 32)
HIDDEN = (13, 40, 126, 398, 1_258, 3_977, 12_579)  # a MLP 784-h-10 has 795 h + 10 parameters
SAMPLES = 320


def run(repeats: int) -> tuple[list[BenchFigure], dict[str, str]]:
    """A row for each of the three."""
    return [
        fitted("growth-devices", devices(), repeats, "of a round with its evaluation of every device"),
        fitted("growth-centers", centers(), repeats, f"of a probe of {SAMPLES} samples, WeCFL CNN"),
        fitted("growth-parameters", parameters(), repeats, "of one update, MLP 784-h-10"),
    ], {}


def fitted(row: str, sizes: Mapping[int, Callable[[], object]], repeats: int, what: str) -> BenchFigure:
    """Every size in turn."""
    took = interleaved({str(size): timed(work) for size, work in sizes.items()}, min(repeats, MOST_REPEATS))
    return figure_of(row, [(float(size), took[str(size)].cpu_s) for size in sizes], what)


def figure_of(row: str, points: Sequence[tuple[float, float]], what: str) -> BenchFigure:
    """The score is the exponent of the larger half of the sizes: what each run costs once flattens the smaller ones."""
    said = ", ".join(number(1e3 * seconds) for _, seconds in points)
    note = f"the larger half of the sizes; over all {exponent(points):.2f}; CPU ms {what}: {said}"
    return BenchFigure(row=row, score=exponent(points[len(points) // 2 :]), points=tuple(points), note=note)


def devices() -> dict[int, Callable[[], object]]:
    """FedAvg rounds of the digits' MLP in virtual time, 100 devices sampled, every device evaluated."""
    model = build_model("digits-mlp", seed=0)
    learner = cpu_recipe(model).open()
    start = vector_of(model.module, learner.program.schema)
    return {n: _fleet(learner, start, n) for n in DEVICES}


def _fleet(learner: Learner, start: Flat, n: int) -> Callable[[], object]:
    rng = np.random.default_rng(n)
    x = rng.random((n, TRAIN + TEST, 1, 8, 8), dtype=np.float32)
    y = rng.integers(10, size=(n, TRAIN + TEST))
    local = {
        f"device-{i:05d}": DeviceData(
            train=Dataset(x[i, :TRAIN], y[i, :TRAIN]), test=Dataset(x[i, TRAIN:], y[i, TRAIN:])
        )
        for i in range(n)
    }
    method = make_method("fedavg", **{"local-steps": 5, "batch-size": BATCH, "fraction-train": SAMPLED / n})

    def play() -> object:
        ready = EmulatedDevices(learner=learner, local=local)
        return simulate(method, start, ready, RunSettings(rounds=1, seed=0, batch=BATCH))

    return play


def centers() -> dict[int, Callable[[], object]]:
    """Probes of K models near each other."""
    work, recipe = prepared(build_model("wecfl-cnn", seed=0), 1)
    learner, data = recipe.open(), images(SAMPLES, classes=10, seed=1)
    models = [work.start * np.float32(1 + 0.001 * k) for k in range(max(CENTERS))]

    def of(k: int) -> Callable[[], object]:
        return lambda: learner.evaluate(models[:k], data, batch=BATCH)

    return {k: of(k) for k in CENTERS}


def parameters() -> dict[int, Callable[[], object]]:
    """Updates of ever wider networks."""

    def of(hidden: int) -> Callable[[], object]:
        net = nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        model = Model(name=f"mlp-{hidden}", module=net, input=(1, 28, 28), classes=10)
        work, recipe = prepared(model, 1)
        learner = recipe.open()
        return lambda: train(learner, work)

    return {795 * hidden + 10: of(hidden) for hidden in HIDDEN}
