"""Train emulated devices one after the other on one CPU thread with the torch module, the fastest way on a CPU.

Weights, gradients and momentum are one flat buffer each. A step is recorded once and run without autograd. Images are
channels-last, a ReLU moves behind the max-pool after it, and batch norm is folded in inference. The numbers
are those of the devices' own runtimes up to rounding (tests/emulator/engines/), random operators included.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coordinator.models.registry import Model
from edge_client.data.dataset import Dataset
from edge_client.errors import UsageError
from edge_client.malloc import keep_freed_memory
from edge_client.protocol.program import Program
from edge_client.protocol.task import F64, Array, Fit, Flat
from edge_client.training.learner import TrainedModel, TrainingJob, weighted_batches
from edge_client.training.noise import step_noise
from edge_client.training.optimiser import rule_of
from emulator.engines.cpu.flat import FlatModel, as_tensor
from emulator.engines.cpu.fused_sgd import sgd_step
from emulator.engines.cpu.inference import Inference
from emulator.engines.cpu.own_losses import check_own_loss
from emulator.engines.cpu.samples import SampleCache
from emulator.engines.cpu.steps import Step, autograd_step, record_step, sample_losses
from emulator.engines.pickling import pickle_by_value
from export.compiler.program import make_source, program_without_containers
from export.compiler.program_functions import TraceSource, example_inputs
from export.diagnostics import first_sentence
from export.one_value_norm import batch_norm_of_one_value
from export.own_thread import own_random

log = logging.getLogger(__name__)
IMAGE_DIMENSIONS = 3  # dimensions of one
TRIED = 2  # images


@dataclass(frozen=True, kw_only=True)
class CpuRecipe:
    """See `Recipe`."""

    source: TraceSource
    program: Program

    def open(self) -> CpuLearner:
        """See `Recipe`. Afterwards torch uses one thread in this process, and freed memory stays with the process."""
        torch.set_num_threads(1)
        keep_freed_memory()
        return CpuLearner(self.source, self.program)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle_by_value(self)


def cpu_recipe(model: Model, *, dtype: str = "float32") -> CpuRecipe:
    """Nothing is compiled. Raises ProgramRefused for a model that is no training program, as the compiler does."""
    source = make_source(
        model.module,
        name=model.name,
        input=model.input,
        target=model.output,
        loss=model.loss,
        own_loss=model.own_loss,
        own_targets=model.own_targets,
        dtype=dtype,
        frozen=model.frozen,
        parts=model.parts,
    )
    check_own_loss(source)
    return CpuRecipe(source=source, program=program_without_containers(source))


class CpuLearner:
    """See `Learner`. One update at a time."""

    fixed_batch: int | None = None

    def __init__(self, source: TraceSource, program: Program) -> None:
        self.program = program
        turned = prefers_channels_last(source)
        self._source, self._model = source, FlatModel(source.module, source.schema, channels_last=turned)
        self._velocity = torch.zeros_like(self._model.gradient)
        self._samples = SampleCache(source.dtype, turned=turned)
        self._inference = Inference(source, channels_last=turned)
        self._steps: dict[tuple[int, torch.dtype], Step] = {}

    def train(self, jobs: Sequence[TrainingJob]) -> Iterator[TrainedModel]:
        for job in jobs:
            with _told_index(self.program):
                trained = self._trained(job)
            yield trained

    @torch.no_grad()
    def _trained(self, job: TrainingJob) -> TrainedModel:
        model, task = self._model, job.task
        model.load(job.start)
        self._velocity.zero_()
        force, rule, losses = self._force(task), rule_of(task), []
        w = model.weights[: self.program.schema.n_params]
        batches = self._samples.tensors_of(job.data).batches(job.batches, job.weights)
        for k, (x, y, q) in enumerate(batches):
            if force is None:
                model.gradient.zero_()
            else:
                model.gradient.copy_(force)
            losses.append(torch.dot(self._step(x, y, q, seed=task.seed, number=k), q))
            if rule is None:
                sgd_step(w, model.gradient, self._velocity, lr=task.lr, momentum=task.momentum, decay=task.mu)
                continue
            if task.mu:
                model.gradient.add_(w, alpha=task.mu)
            rule(w.numpy(), model.gradient.numpy())  # numpy's views of the same memory
        return TrainedModel(vector=model.to_schema_order(model.weights), losses=torch.stack(losses).double().numpy())

    def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[F64, Array]:  # noqa: ARG002 - ours suits the cache
        """In batches that fit the cache: in inference no sample depends on the others."""
        held = self._samples.tensors_of(data)
        with _told_index(self.program):
            logits = self._inference.logits(models, held)
        with torch.inference_mode():
            losses = torch.stack([sample_losses(self._source, out, held.y) for out in logits])
        return losses.double().numpy(), logits.numpy()

    @torch.no_grad()
    def gradient(self, model: Flat, data: Dataset, *, batch: int, seed: int) -> Flat:
        """The mean gradient over batches of `batch` samples (the last may be shorter), as batch norm sees them."""
        held, mine = self._samples.tensors_of(data), self._model
        mine.load(model)
        mine.gradient.zero_()
        indices = [index for index, _ in weighted_batches(self.program, len(data), batch, fixed=None)]
        share = np.array([len(index) / len(data) for index in indices])
        for k, (x, y, q) in enumerate(held.batches(indices, np.ones(len(data)))):
            if k and self.program.schema.size > self.program.schema.n_params:
                mine.load(model)
            self._step(x, y, q * float(share[k]), seed=seed, number=k)
        return mine.to_schema_order(mine.gradient)

    def _step(self, x: Tensor, y: Tensor, q: Tensor, *, seed: int, number: int) -> Tensor:
        """Add a batch's gradient; -> losses [batch]."""
        drawn = step_noise(self.program, seed, number, len(x))
        numbers = as_tensor(drawn["noise"]) if drawn else None
        key = len(x), y.dtype
        if key not in self._steps:
            self._steps[key] = self._made(x, y, numbers)
        return self._steps[key](x, y, q, numbers)

    def _made(self, x: Tensor, y: Tensor, numbers: Tensor | None) -> Step:
        try:
            return record_step(self._source, self._model, x, y, numbers)
        except Exception as wrong:  # noqa: BLE001 - torch raises many kinds for what it cannot record; autograd can do it
            log.warning(
                "model %s is not recorded, and trains more slowly: %s", self.program.model, first_sentence(wrong)
            )
            return autograd_step(self._source, self._model)

    def _force(self, task: Fit) -> Tensor | None:
        """[n_params] linear - mu anchor: with weight decay mu, what a step adds to the gradient. None: no such term."""
        force = None if task.linear is None else self._model.to_flat_order(task.linear)
        if task.mu == 0 or task.anchor is None:
            return force
        pull = self._model.to_flat_order(task.anchor).mul_(-task.mu)
        return pull if force is None else pull.add_(force)


@contextmanager
def _told_index(program: Program) -> Iterator[None]:
    """Raise UsageError for a number of the samples that the model looks up and has not, as a token."""
    try:
        yield
    except IndexError as wrong:
        hint = "whole numbers that it looks up, as tokens, lie from 0 to one below the size of its embedding"
        raise UsageError(f"model {program.model} cannot read these samples: {wrong}", hint=hint) from wrong


def prefers_channels_last(source: TraceSource) -> bool:
    """Images that meet a convolution, in a module and a loss that take them so: some, as `view`, need torch's order."""
    meet = any(isinstance(layer, nn.Conv2d) for layer in source.module.modules())
    return len(source.input) == IMAGE_DIMENSIONS and meet and _takes_channels_last(source)


def _takes_channels_last(source: TraceSource) -> bool:
    model = FlatModel(source.module, source.schema, channels_last=True)
    *_, x, y = example_inputs(source, "evaluate", TRIED)
    try:
        with own_random(), torch.enable_grad(), batch_norm_of_one_value():
            for training in (False, True):
                out = model.module.train(training)(x.to(memory_format=torch.channels_last))
                losses = sample_losses(source, out, y)
            torch.autograd.backward(losses.sum())  # in training alone: a module may have no gradients in inference
    except Exception:  # noqa: BLE001 - of whatever kind; what else is wrong is told where it is used
        return False
    return True
