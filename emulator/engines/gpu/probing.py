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
from edge_client.training.learner import weighted_batches
from edge_client.training.noise import step_noise
from emulator.engines.gpu.memory import run_in_parts
from emulator.engines.gpu.objective import Objective, use_exact_kernels, use_noise
from emulator.engines.gpu.schedule import MAX_CPU_CLIENTS, MAX_CUDA_BATCHES

DrawnBatch = tuple[Array, Array, Mapping[str, Array]]  # samples' indices, their weights, and the step's random numbers
MAX_CUDA_ROWS = 4096  # samples times models of one pass: many for a GPU, few enough for the caches of a CPU


class ProbeMixin:
    """The part of a learner (edge_client/training/learner.py) that probes need; engines that train add `train`."""

    def __init__(self, objective: Objective, *, stacks_batches: bool, stacks_models: bool) -> None:
        """What is not stacked is done one by one: recurrent layers stack only while they train (torch 2.13)."""
        self.objective, self._stacks_batches, self._stacks_models = objective, stacks_batches, stacks_models
        on_cuda = objective.device.type == "cuda"
        self._most_rows = sys.maxsize  # until a GPU has no memory for more
        self._at_once = (MAX_CUDA_BATCHES if on_cuda else MAX_CPU_CLIENTS) if stacks_batches else 1

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

    def _logits(self, w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        """[M, batch, *target] of models [M, ...] on the same samples."""
        predictions = self.objective.predictions
        if self._stacks_models:
            return vmap(predictions, in_dims=(0, 0, None))(w, b, x)
        return torch.stack([predictions(*model, x) for model in zip(w, b, strict=True)])

    def _summed(self, vector: Tensor, x: Tensor, y: Tensor, q: Tensor) -> Tensor:
        """[n_params] float64 sum of the gradients of batches [batches, batch, ...], each from the same model."""
        objective = self.objective
        w, b = vector[: objective.n_params], vector[objective.n_params :]
        if self._stacks_batches:
            return objective.gradients(w, b.expand(len(x), -1), x, y, q)[0].double().sum(0)
        return objective.gradient(w, b, x[0], y[0], q[0])[0].double()


def _equal_sizes(parts: Sequence[DrawnBatch]) -> list[Sequence[DrawnBatch]]:
    """The batches in groups of one size; only the last batch can be smaller."""
    whole = len(parts) - (len(parts[-1][0]) != len(parts[0][0]))
    return [parts[:whole], parts[whole:]]
