"""Emulated devices one after the other on one thread of the CPU, the fastest way there: the torch module itself.

Weights, gradients and momentum are one flat buffer each; a step is recorded once and played without autograd; images
are channels-last, a ReLU waits for the max-pool behind it, batch norm is folded away where it only infers. The numbers
are those of the devices' own runtimes up to rounding (tests/emulator/engines/), random operators included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coordinator.models.registry import Model
from edge_client.data.dataset import Dataset
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, Fit, Flat
from edge_client.training.learner import F64, Job, Trained, weighted_batches
from edge_client.training.noise import noise
from emulator.engines.cpu.flat import FlatModel, tensor_of
from emulator.engines.cpu.fused_sgd import descend
from emulator.engines.cpu.inference import Inference
from emulator.engines.cpu.malloc import keep_freed_memory
from emulator.engines.cpu.samples import Samples
from emulator.engines.cpu.steps import Step, losses_of, recorded_step, through_autograd
from emulator.engines.pickling import by_value
from export.compiler.program import manifest_of, source_of
from export.compiler.program_functions import Source
from export.diagnostics import sentence

log = logging.getLogger(__name__)
IMAGE = 3  # dimensions of one


@dataclass(frozen=True, kw_only=True)
class Lean:
    """See `Recipe`."""

    source: Source
    program: Program

    def open(self) -> LeanLearner:
        """See `Recipe`. From here on torch uses one thread in this process, and freed memory stays with it."""
        torch.set_num_threads(1)
        keep_freed_memory()
        return LeanLearner(self.source, self.program)

    def __reduce__(self) -> tuple[Any, ...]:
        return by_value(self)


def lean(model: Model, *, dtype: str = "float32") -> Lean:
    """Nothing is compiled. Raises ProgramRefused for a model that is no training program, as the compiler does."""
    source = source_of(
        model.module, name=model.name, input=model.input, target=model.output, loss=model.loss, dtype=dtype
    )
    return Lean(source=source, program=manifest_of(source))


class LeanLearner:
    """See `Learner`. One update at a time."""

    fixed_batch: int | None = None

    def __init__(self, source: Source, program: Program) -> None:
        self.program = program
        turned = channels_last(source)
        self._source, self._model = source, FlatModel(source.module, source.schema, channels_last=turned)
        self._velocity = torch.zeros_like(self._model.gradient)
        self._samples = Samples(source.dtype, turned=turned)
        self._inference = Inference(source, channels_last=turned)
        self._steps: dict[tuple[int, torch.dtype], Step] = {}

    def train(self, jobs: Sequence[Job], between: Callable[[], None] = lambda: None) -> Iterator[Trained]:
        """One after the other, each without a pause."""
        for job in jobs:
            yield self._trained(job, between)

    @torch.no_grad()
    def _trained(self, job: Job, between: Callable[[], None]) -> Trained:
        model, task = self._model, job.task
        model.load(job.start)
        self._velocity.zero_()
        force = self._force(task)
        losses = []
        batches = self._samples.of(job.data).batches(job.batches, job.weights)
        for k, (x, y, q) in enumerate(batches):
            between()
            if force is None:
                model.gradient.zero_()
            else:
                model.gradient.copy_(force)
            losses.append(torch.dot(self._step(x, y, q, seed=task.seed, number=k), q))
            descend(
                model.weights[: self.program.schema.n_params],
                model.gradient,
                self._velocity,
                lr=task.lr,
                momentum=task.momentum,
                decay=task.mu,
            )
        return Trained(vector=model.ordered(model.weights), losses=torch.stack(losses).double().numpy())

    def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[F64, Array]:  # noqa: ARG002 - ours suits the cache
        """In batches of our own size: no sample depends on the others here."""
        held = self._samples.of(data)
        logits = self._inference.logits(models, held)
        with torch.inference_mode():
            losses = torch.stack([losses_of(self.program.loss, out, held.y) for out in logits])
        return losses.double().numpy(), logits.numpy()

    @torch.no_grad()
    def gradient(self, model: Flat, data: Dataset, *, batch: int, seed: int) -> Flat:
        """Summed over batches of the size that was asked for, as batch norm sees them."""
        held, mine = self._samples.of(data), self._model
        mine.load(model)
        mine.gradient.zero_()
        indices = [index for index, _ in weighted_batches(self.program, len(data), batch, fixed=None)]
        share = np.array([len(index) / len(data) for index in indices])
        for k, (x, y, q) in enumerate(held.batches(indices, np.ones(len(data)))):
            if k and self.program.schema.size > self.program.schema.n_params:
                mine.load(model)
            self._step(x, y, q * float(share[k]), seed=seed, number=k)
        return mine.ordered(mine.gradient)

    def _step(self, x: Tensor, y: Tensor, q: Tensor, *, seed: int, number: int) -> Tensor:
        """Add a batch's gradient; -> losses [batch]."""
        drawn = noise(self.program, seed, number, len(x))
        numbers = tensor_of(drawn["noise"]) if drawn else None
        key = len(x), y.dtype
        if key not in self._steps:
            self._steps[key] = self._made(x, y, numbers)
        return self._steps[key](x, y, q, numbers)

    def _made(self, x: Tensor, y: Tensor, numbers: Tensor | None) -> Step:
        try:
            return recorded_step(self._source, self._model, x, y, numbers)
        except Exception as wrong:  # noqa: BLE001 - torch raises many kinds for what it cannot record; autograd can do it
            log.warning("model %s is not recorded, and trains more slowly: %s", self.program.model, sentence(wrong))
            return through_autograd(self._source, self._model)

    def _force(self, task: Fit) -> Tensor | None:
        """[n_params] linear - mu anchor: with weight decay mu, what a step adds to the gradient. None: nothing."""
        force = None if task.linear is None else self._model.arranged(task.linear)
        if task.mu == 0 or task.anchor is None:
            return force
        pull = self._model.arranged(task.anchor).mul_(-task.mu)
        return pull if force is None else pull.add_(force)


def channels_last(source: Source) -> bool:
    """Images that meet a convolution."""
    return len(source.input) == IMAGE and any(isinstance(layer, nn.Conv2d) for layer in source.module.modules())
