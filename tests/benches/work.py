"""The same work for all contestants: one model, clients with synthetic images, 10 proximal SGD steps of 32 samples.

`save` writes it for a peer: x [n, 320, 1, 28, 28] float32 and y [n, 320] int64 in the order in which our batches read
them, `start/NAME` the model's tensors, and the settings. Then a peer that reads its data in order does the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.models.registry import Model
from edge_client.data.dataset import Dataset, batches
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, Fit, Flat
from edge_client.training.fit_probe import make_job
from edge_client.training.learner import Learner, TrainingJob
from emulator.engines.base import Recipe
from emulator.engines.cpu.cpu_engine import cpu_recipe
from export.compiler.program import vector_of

STEPS, BATCH = 10, 32
SAMPLES = STEPS * BATCH
LR, MOMENTUM, MU = 0.01, 0.9, 0.1
SHAPE = (1, 28, 28)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model, the vector that every client starts from [schema.size], and each client's samples and task."""

    model: Model
    program: Program
    start: Flat
    data: Sequence[Dataset]
    tasks: Sequence[Fit]

    def jobs(self, learner: Learner) -> list[TrainingJob]:
        """What a learner trains."""
        return [
            make_job(self.program, task, data, fixed_batch=learner.fixed_batch)
            for task, data in zip(self.tasks, self.data, strict=True)
        ]

    def orders(self) -> list[NDArray[np.int64]]:
        """The numbers of each client's samples [320] in the order of its batches."""
        return [np.concatenate(list(batches(SAMPLES, BATCH, task.seed, STEPS, fixed=False))) for task in self.tasks]

    def ordered(self) -> list[tuple[Array, Array]]:
        """Each client's samples in that order."""
        return [(data.x[order], data.y[order]) for data, order in zip(self.data, self.orders(), strict=True)]


def images(n: int, *, classes: int, seed: int) -> Dataset:
    """[n, 1, 28, 28] in -1..1: a pattern for each class and noise, so that there is something to learn."""
    rng = np.random.default_rng([seed, n])
    patterns = np.random.default_rng(classes).standard_normal((classes, *SHAPE))
    y = rng.integers(classes, size=n)
    x = np.tanh(0.5 * patterns[y] + 0.5 * rng.standard_normal((n, *SHAPE)))
    return Dataset(x.astype(np.float32), y)


def prepared(model: Model, clients: int) -> tuple[Work, Recipe]:
    """The work of a model, and the recipe of the emulator's engine for it."""
    recipe = cpu_recipe(model)
    program = recipe.program
    start = vector_of(model.module, program.schema)
    data = [images(SAMPLES, classes=model.classes, seed=i) for i in range(clients)]
    tasks = [
        Fit(start=start, anchor=start, mu=MU, steps=STEPS, lr=LR, momentum=MOMENTUM, batch=BATCH, seed=i)
        for i in range(clients)
    ]
    return Work(model=model, program=program, start=start, data=data, tasks=tasks), recipe


def train(learner: Learner, work: Work) -> NDArray[np.float64]:
    """All updates once; -> their mean [n_params]. What a round costs a worker: jobs, steps and the sum."""
    total = np.zeros(work.program.schema.n_params)
    for trained in learner.train(work.jobs(learner)):
        total += trained.vector[: len(total)]
    return total / len(work.tasks) - work.start[: len(total)]


def save(work: Work, path: Path) -> Path:
    """The work as one .npz file."""
    pairs = work.ordered()
    tensors = work.program.schema.split(work.start)
    arrays = {f"start/{name}": np.asarray(value) for name, value in tensors.items()}
    np.savez(
        path,
        allow_pickle=False,
        x=np.stack([x for x, _ in pairs]),
        y=np.stack([y for _, y in pairs]),
        settings=np.array([LR, MOMENTUM, MU, STEPS, BATCH]),
        **arrays,
    )
    return path


def apart(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """|a - b| / |b|, Euclidean."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
