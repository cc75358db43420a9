"""Bench: the share of the step floor (kernels.py) that our step reaches; step and kernels take turns."""

from __future__ import annotations

import statistics

import torch

from coordinator.models.registry import build_model
from tests.benches.kernels import Kernel, kernels, seconds
from tests.benches.results import BenchFigure
from tests.benches.turns import timed
from tests.benches.work import BATCH, STEPS, prepared, train

CLIENTS = {"mnist-mlp": 20, "wecfl-cnn": 3, "femnist-cnn": 1}
SHORT = {"mnist-mlp": "mlp", "wecfl-cnn": "wecfl", "femnist-cnn": "femnist"}


def run(repeats: int) -> tuple[list[BenchFigure], dict[str, str]]:
    """A row for each model: milliseconds of a step of ours and of the floor."""
    return [one_model(name, repeats) for name in CLIENTS], {}


def one_model(name: str, repeats: int) -> BenchFigure:
    """Our step and every kernel take turns; medians of CPU seconds."""
    work, recipe = prepared(build_model(name, seed=0), CLIENTS[name])
    learner = recipe.open()
    mine = timed(lambda: train(learner, work))
    parts = kernels(work.model.module, torch.from_numpy(work.data[0].x[:BATCH]))
    mine()
    steps, times = [], [list[float]() for _ in parts]
    for _ in range(repeats):
        steps.append(mine().cpu_s / (len(work.tasks) * STEPS))
        for kernel, seen in zip(parts, times, strict=True):
            seen.append(seconds(kernel))
    floor_of = [statistics.median(seen) for seen in times]
    step, floor = statistics.median(steps), sum(floor_of)
    return BenchFigure(
        row=f"floor-{SHORT[name]}",
        ours=1e3 * step,
        theirs=1e3 * floor,
        score=100 * floor / step,
        note=said(parts, floor_of),
    )


def said(parts: list[Kernel], times: list[float]) -> str:
    """Each kernel's rate, and that of the pass."""
    rates = [f"{k.work / s / 1e9:.0f}" for k, s in zip(parts[:-1], times[:-1], strict=True)]
    memory = parts[-1].work / times[-1] / 1e9
    return (
        f"products and convolutions {1e3 * sum(times[:-1]):.2f} ms at {', '.join(rates)} GF/s in their order, "
        f"the pass {1e3 * times[-1]:.2f} ms at {memory:.0f} GB/s"
    )
