"""Losses, logits and gradients of whole models on all samples of a device, as a `Probe` needs them from a learner.

Models are stacked: a batch of samples goes through all of them at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from edge_client.data.dataset import Dataset
from edge_client.engines.targets import port_targets
from edge_client.protocol.program import Program
from edge_client.protocol.task import F64, Array, Flat
from edge_client.training.learner import Evaluation, weighted_batches
from edge_client.training.noise import step_noise
from emulator.engines.gpu.memory import run_in_parts
from emulator.engines.gpu.objective import Objective, use_exact_kernels, use_noise
from emulator.engines.gpu.resident_data import DeviceDataCache
from emulator.engines.gpu.schedule import MAX_CPU_CLIENTS, MAX_CUDA_BATCHES

DrawnBatch = tuple[Array, Array, Mapping[str, Array]]  # samples' indices, their weights, and the step's random numbers
MAX_PAIRED_ROWS = 16_384  # samples of one pass in which each model has its own: windows of images are large
MAX_CUDA_ROWS = 4096  # samples times models of one pass: many for a GPU, few enough for the caches of a CPU


class ProbeMixin:
    """The part of a learner (edge_client/training/learner.py) that probes need; engines that train add `train`."""

    def __init__(self, objective: Objective, *, stacks_batches: bool, stacks_models: bool) -> None:
        """What is not stacked is done one by one: recurrent layers stack only while they train (torch 2.13)."""
        self.objective, self._stacks_batches, self._stacks_models = objective, stacks_batches, stacks_models
        on_cuda = objective.device.type == "cuda"
        self._most_pairs = self._most_rows = sys.maxsize  # until a GPU has no memory for more
        self._at_once = (MAX_CUDA_BATCHES if on_cuda else MAX_CPU_CLIENTS) if stacks_batches else 1
        self.resident = DeviceDataCache(objective)

    @property
    def program(self) -> Program:
        return self.objective.program

    @property
    def fixed_batch(self) -> int | None:
        return None

    def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[F64, Array]:
        """-> [M, n] float64 and [M, n, classes]. Samples are independent in inference: `batch` is a lower bound."""
        objective, program = self.objective, self.program
        rows = max(batch, MAX_CUDA_ROWS // len(models)) if objective.device.type == "cuda" else batch
        stacked = objective.tensor(np.stack(models))
        w, b = stacked[:, : objective.n_params], stacked[:, objective.n_params :]

        def some(first: int, last: int) -> tuple[Tensor, Tensor]:
            x = objective.tensor(data.x[first:last])
            y = objective.tensor(port_targets(program, data.y[first:last]))
            with use_exact_kernels(objective.device):
                out = self._logits(w, b, x)
                return vmap(objective.losses, in_dims=(0, None))(out, y).double().cpu(), out.cpu()

        found = run_in_parts(len(data), min(rows, self._most_rows), some, what="samples", halved=self._fewer_rows)
        losses, logits = zip(*found, strict=True)
        return torch.cat(losses, 1).numpy(), torch.cat(logits, 1).numpy()

    def evaluate_each(self, asked: Sequence[Evaluation], *, batch: int) -> list[tuple[F64, Array]]:
        """`evaluate` of each, with many models and data sets in one pass: each model on samples of its own."""
        if not self._stacks_models:
            return [self.evaluate(models, data, batch=batch) for models, data in asked]
        found = [_Evaluated(models, data, self.program) for models, data in asked]
        pairs = sorted(
            ((i, m) for i, (models, _) in enumerate(asked) for m in range(len(models))),
            key=lambda pair: len(asked[pair[0]][1]),
        )
        most = max(1, MAX_PAIRED_ROWS // max((len(data) for _, data in asked), default=1))

        def some(first: int, last: int) -> None:
            part = pairs[first:last]
            out, losses = self._pairs([(asked[i][0][m], asked[i][1]) for i, m in part])
            for (i, m), logits, loss in zip(part, out, losses, strict=True):
                found[i].take(m, loss, logits)

        for _ in run_in_parts(len(pairs), min(most, self._most_pairs), some, what="models", halved=self._fewer_pairs):
            pass
        return [(each.losses, each.logits) for each in found]

    def _pairs(self, pairs: Sequence[tuple[Flat, Dataset]]) -> tuple[Array, F64]:
        """[pairs, rows, *target] logits and [pairs, rows] losses; shorter data sets repeat their samples."""
        objective, rows = self.objective, max(len(data) for _, data in pairs)
        stacked = objective.once_each([model for model, _ in pairs])
        w, b = stacked[:, : objective.n_params], stacked[:, objective.n_params :]
        x, y = self.resident.gather([(data, np.arange(rows) % len(data)) for _, data in pairs])
        x, y = (part.reshape(len(pairs), rows, *part.shape[1:]) for part in (x, y))
        with use_exact_kernels(objective.device):
            out = objective.stacked_predictions(w, b, x, shared=False)
            return out.cpu().numpy(), vmap(objective.losses)(out, y).double().cpu().numpy()

    def gradient(self, model: Flat, data: Dataset, *, batch: int, seed: int) -> Flat:
        """[n_params] mean gradient over all samples; every batch starts from the model's buffers."""
        objective, program = self.objective, self.program
        parts = list(weighted_batches(program, len(data), batch, fixed=None))
        drawn = [step_noise(program, seed, k, len(index)) for k, (index, _) in enumerate(parts)]
        vector = objective.tensor(model)
        total = torch.zeros(objective.n_params, dtype=torch.float64, device=objective.device)
        objective.training()
        for group in _equal_sizes([(*part, noise) for part, noise in zip(parts, drawn, strict=True)]):
            some = partial(self._of_batches, vector, data, group)
            for found in run_in_parts(len(group), self._at_once, some, what="batches", halved=self._fewer):
                total += found
        mean: Flat = total.cpu().numpy().astype(program.dtype)
        return mean

    def _of_batches(self, vector: Tensor, data: Dataset, group: Sequence[DrawnBatch], first: int, last: int) -> Tensor:
        """[n_params] float64 sum over these batches of the group."""
        objective = self.objective
        index, q = (np.stack(part) for part in list(zip(*group[first:last], strict=True))[:2])
        y = port_targets(self.program, data.y[index.ravel()])
        y = y.reshape(*index.shape, *y.shape[1:])
        noise = None
        if objective.source.noise:
            noise = objective.tensor(np.concatenate([numbers["noise"] for _, _, numbers in group[first:last]]))
        with use_exact_kernels(objective.device), use_noise(noise):
            return self._summed(vector, *(objective.tensor(each) for each in (data.x[index], y, q / len(data))))

    def _fewer(self, batches: int) -> None:
        self._at_once = batches

    def _fewer_rows(self, samples: int) -> None:
        self._most_rows = samples

    def _fewer_pairs(self, models: int) -> None:
        self._most_pairs = models

    def _logits(self, w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        """[M, batch, *target] of models [M, ...] on the same samples."""
        if self._stacks_models:
            return self.objective.stacked_predictions(w, b, x, shared=True)
        return torch.stack([self.objective.predictions(*model, x) for model in zip(w, b, strict=True)])

    def _summed(self, vector: Tensor, x: Tensor, y: Tensor, q: Tensor) -> Tensor:
        """[n_params] float64 sum of the gradients of batches [batches, batch, ...], each from the same model."""
        objective = self.objective
        w, b = vector[: objective.n_params], vector[objective.n_params :]
        if self._stacks_batches:
            return objective.gradients(w.expand(len(x), -1), b.expand(len(x), -1), x, y, q)[0].double().sum(0)
        return objective.gradient(w, b, x[0], y[0], q[0])[0].double()


class _Evaluated:
    """The losses [M, n] and logits [M, n, *target] of one evaluation, as they come."""

    def __init__(self, models: Sequence[Flat], data: Dataset, program: Program) -> None:
        self.losses: F64 = np.empty((len(models), len(data)))
        self.logits: Array = np.empty((len(models), len(data), *program.target), program.dtype)

    def take(self, m: int, losses: Array, logits: Array) -> None:
        self.losses[m], self.logits[m] = losses[: self.losses.shape[1]], logits[: self.losses.shape[1]]


def _equal_sizes(parts: Sequence[DrawnBatch]) -> list[Sequence[DrawnBatch]]:
    """The batches in groups of one size; only the last batch can be smaller."""
    whole = len(parts) - (len(parts[-1][0]) != len(parts[0][0]))
    return [parts[:whole], parts[whole:]]
