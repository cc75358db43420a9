"""`python -m tests.figures.stacked_models`: K models of one device, trained in turn or in one stacked pass on a CPU.

What FedEM and FedAvg+ could gain from stacking (docs/what-was-tried.md). Per model: CPU milliseconds of ten steps of
batch 32 for each of K models, with the engine `lean` (in turn) and the engine `stacked` on the CPU (one vmap over the
K models), in turn for several repetitions, the least of each. `bound` is what `lean` gains per sample from one model
with K times the batch: a stacked pass shares the calls but not the weights, so it can gain no more than that.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np

from coordinator.models.registry import build_model
from edge_client.data.dataset import Dataset
from edge_client.protocol.task import Fit
from edge_client.training.learner import Learner, TrainingJob
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.engines.gpu.stacked import StackedRecipe
from export.compiler.program import vector_of

MODELS = ("wecfl-cnn", "mnist-mlp", "digits-mlp", "cifar-lenet")
STEPS, BATCH = 10, 32


def jobs_of(learner: Learner, name: str, *, models: int, batch: int) -> list[TrainingJob]:
    """The updates of `models` models on one device's samples, from different starts."""
    program, rng = learner.program, np.random.default_rng(0)
    n = STEPS * batch
    data = Dataset(rng.normal(size=(n, *program.input)).astype(np.float32), rng.integers(0, program.classes, n))
    cuts = [np.arange(at, at + batch) for at in range(0, n, batch)]
    starts = [vector_of(build_model(name, seed=k).module, program.schema) for k in range(models)]
    tasks = [Fit(start=s, steps=STEPS, lr=0.001, momentum=0.9, batch=batch, seed=k) for k, s in enumerate(starts)]
    return [
        TrainingJob(task=task, start=start, data=data, batches=cuts, weights=np.ones(n))
        for task, start in zip(tasks, starts, strict=True)
    ]


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU milliseconds of this process."""
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def measure(name: str, *, models: int, times: int) -> dict[str, float | str]:
    """The least of `times` interleaved repetitions, per model."""
    model = build_model(name, seed=0)
    lean, stacked = cpu_recipe(model).open(), StackedRecipe(model=model, device="cpu", chunk=models).open()
    many = jobs_of(lean, name, models=models, batch=BATCH)
    wide = jobs_of(lean, name, models=1, batch=models * BATCH)
    ways: dict[str, Callable[[], object]] = {
        "lean": lambda: list(lean.train(many)),
        "stacked": lambda: list(stacked.train(many)),
        "wide": lambda: list(lean.train(wide)),
    }
    for work in ways.values():
        work()
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(times):
        for way, work in ways.items():
            found[way].append(cpu_ms(work) / models)
    best = {way: min(values) for way, values in found.items()}
    return {
        "model": name,
        **{way: round(ms, 2) for way, ms in best.items()},
        "stacked_gains": round(best["lean"] / best["stacked"], 2),
        "bound": round(best["lean"] / best["wide"], 2),
    }


def main() -> None:
    """One JSON object a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--count", type=int, default=10, help="models of one device")
    parser.add_argument("--times", type=int, default=5)
    asked = parser.parse_args()
    for name in asked.models:
        sys.stdout.write(json.dumps(measure(name, models=asked.count, times=asked.times)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
