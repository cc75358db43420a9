"""Computation for `fit` and `probe`: local updates, evaluation of candidate models, gradients of one model.

`EngineLearner` is the device's: it feeds an engine batch by batch. The emulator has faster ones (emulator/engines/),
which give the same numbers. Models are flat vectors [schema.size]. fit_probe.py decides what a task may ask.
The only randomness is the seeds of the jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edge_client.data.dataset import Dataset
from edge_client.engines.base import Engine, run_step
from edge_client.engines.targets import port_targets
from edge_client.errors import Malformed
from edge_client.protocol.program import Program
from edge_client.protocol.task import F64, I64, Array, Fit, Flat, Schema, Tensors
from edge_client.training.noise import step_noise
from edge_client.training.optimiser import rule_of


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One local update: the task's SGD from `start` [schema.size] over these batches of `data`.

    `batches` are sample indices, one array per step; `weights` [n] are the samples' q times the size of their batch.
    """

    task: Fit
    start: Flat
    data: Dataset
    batches: Sequence[I64]
    weights: F64


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The trained model [schema.size] in the program's dtype, and the loss before each step [steps]."""

    vector: Flat
    losses: Array


class Learner(Protocol):
    """Computation with one program. A learner changes no argument and keeps no array that it returns."""

    @property
    def program(self) -> Program: ...

    @property
    def fixed_batch(self) -> int | None:
        """The only batch size it takes; None: any from 1."""
        ...

    def train(self, jobs: Sequence[TrainingJob]) -> Iterator[TrainedModel]:
        """The jobs' updates in their order."""
        ...

    def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[F64, Array]:
        """-> per-sample losses [M, n] float64 and logits [M, n, *target], batch norm in inference mode."""
        ...

    def gradient(self, model: Flat, data: Dataset, *, batch: int, seed: int) -> Flat:
        """[n_params] mean gradient over all samples, batch norm in training mode from the model's buffers."""
        ...


Evaluation = tuple[Sequence[Flat], Dataset]  # models, and the samples that all of them are evaluated on


class EngineLearner:
    """See `Learner`; over one runtime's engine. `between` is called before each batch; what it raises ends the work."""

    def __init__(self, engine: Engine, program: Program, between: Callable[[], None] = lambda: None) -> None:
        self.engine, self.program, self._between = engine, program, between

    @property
    def fixed_batch(self) -> int | None:
        return self.engine.fixed_batch

    def train(self, jobs: Sequence[TrainingJob]) -> Iterator[TrainedModel]:
        program = self.program
        for job in jobs:
            update = self.engine.update(_kept(program, job.task, job.start), rule_of(job.task))
            losses = []
            for k, index in enumerate(job.batches):
                self._between()
                drawn = step_noise(program, job.task.seed, k, len(index))
                losses.append(update.step(_batch(program, job.data, index, job.weights[index] / len(index)) | drawn))
            yield TrainedModel(vector=_flat(program.schema, update.read()), losses=np.array(losses))

    def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[F64, Array]:
        """A fixed batch gets the last samples padded; the padded rows are dropped, which is exact in this mode."""
        program, width = self.program, self.fixed_batch or batch
        losses = np.empty((len(models), len(data)), dtype=np.float64)
        logits: list[list[Array]] = [[] for _ in models]
        feeds = [_model(program, model) for model in models]
        for start in range(0, len(data), width):
            index = np.arange(start, min(start + width, len(data)))
            padded = np.resize(index, width) if self.fixed_batch else index
            samples = _samples(program, data, padded)
            for m, model in enumerate(feeds):
                self._between()
                result = self.engine.evaluate(model | samples)
                losses[m, index] = result["loss"][: len(index)]
                logits[m].append(result["logits"][: len(index)])
        return losses, np.stack([np.concatenate(parts) for parts in logits])

    def gradient(self, model: Flat, data: Dataset, *, batch: int, seed: int) -> Flat:
        """The velocity after a step from zero velocity, summed over batches, each from the buffers that were sent."""
        program = self.program
        still = Fit(start=model, steps=1, lr=0.0, batch=batch, seed=seed)
        kept = _kept(program, still, model)
        names = [f"velocity/{t.name}" for t in program.schema.tensors if t.role == "p"]
        parts = list(weighted_batches(program, len(data), batch, fixed=self.fixed_batch))
        used = sum(float(q.sum()) for _, q in parts)
        total = np.zeros(program.schema.n_params)
        for k, (index, q) in enumerate(parts):
            self._between()
            drawn = step_noise(program, seed, k, len(index))
            result = run_step(self.engine, kept | _batch(program, data, index, q / used) | drawn)
            total += np.concatenate([np.ravel(result[name]) for name in names])
        return total.astype(program.dtype)


def weighted_batches(program: Program, n: int, batch: int, *, fixed: int | None) -> Iterator[tuple[I64, F64]]:
    """Indices and weights of all samples once, in batches.

    Rows that pad a fixed batch weigh nothing; under batch norm they would still count, so there the rest is dropped.
    """
    width = fixed or batch
    for start in range(0, n, width):
        index = np.arange(start, min(start + width, n))
        if fixed is None or len(index) == width:
            yield index, np.ones(len(index))
        elif program.schema.n_params == program.schema.size:
            yield np.resize(index, width), (np.arange(width) < len(index)).astype(np.float64)
        elif n < width:
            raise Malformed("no_data", f"{n} samples, a batch needs {width}")


def _kept(program: Program, task: Fit, start: Flat) -> dict[str, Array]:
    """The state of an update between its steps. Velocity starts at zero; an absent anchor has no effect (mu = 0).

    For an optimiser of the task's the step itself moves nothing, and its velocity is the gradient.
    """
    zero = np.zeros(program.schema.size)
    feeds = _model(program, start)
    for prefix, vector in (("velocity", None), ("anchor", task.anchor), ("linear", task.linear)):
        feeds |= _named(program, prefix, zero if vector is None else vector, role="p")
    lr = task.lr if task.optimiser is None else 0.0
    for name, value in (("lr", lr), ("momentum", task.momentum), ("mu", task.mu)):
        feeds[name] = np.asarray(value, dtype=program.dtype)
    return feeds


def _model(program: Program, model: Flat) -> dict[str, Array]:
    return _named(program, "w", model, role="p") | _named(program, "buffers", model, role="b")


def _named(program: Program, prefix: str, flat: Flat, *, role: str) -> dict[str, Array]:
    if flat.shape != (program.schema.size,):
        raise Malformed("bad_schema", f"a model of shape {flat.shape}, the program has {program.schema.size} values")
    arrays = program.schema.split(flat)
    return {
        f"{prefix}/{t.name}": np.ascontiguousarray(arrays[t.name], dtype=program.dtype)
        for t in program.schema.tensors
        if t.role == role
    }


def _flat(schema: Schema, feeds: Tensors) -> Flat:
    prefix = {"p": "w", "b": "buffers"}
    return schema.join({t.name: feeds[f"{prefix[t.role]}/{t.name}"] for t in schema.tensors})


def _batch(program: Program, data: Dataset, index: I64, q: F64) -> dict[str, Array]:
    """The inputs of one step: `x` [b, ...], `y` [b, ...] and the weights `q` [b] of the samples."""
    return _samples(program, data, index) | {"q": q.astype(program.dtype)}


def _samples(program: Program, data: Dataset, index: I64) -> dict[str, Array]:
    """`x` [b, ...] and `y` [b, ...]."""
    return {"x": data.x[index].astype(program.dtype), "y": port_targets(program, data.y[index])}


def log_softmax(logits: Array, axis: int = -1) -> F64:
    """Logits -> logarithms of probabilities; the classes lie along `axis`."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=axis, keepdims=True)
    return np.asarray(scores - np.log(np.exp(scores).sum(axis=axis, keepdims=True)))
