"""Losses, logits and gradients of whole models on all samples of a device, as a `Probe` needs them from a learner.

Models are stacked: a batch of samples goes through all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from edge_client.data.dataset import Dataset
from edge_client.protocol.program import Program
from edge_client.protocol.task import F64, Array, Flat
from edge_client.training.learner import weighted_batches
from edge_client.training.noise import step_noise
from emulator.engines.gpu.objective import Objective, use_exact_kernels, use_noise
from emulator.engines.gpu.schedule import MAX_CPU_CLIENTS, MAX_CUDA_BATCHES, one_hot_targets

MAX_CUDA_ROWS = 4096  # samples times models of one pass: many for a GPU, few enough for the caches of a CPU


class ProbeMixin:
    """The part of a learner (edge_client/training/learner.py) that probes need; engines that train add `train`."""

    def __init__(self, objective: Objective, *, stacks_batches: bool, stacks_models: bool) -> None:
        """What is not stacked is done one by one: recurrent layers stack only while they train (torch 2.13)."""
        self.objective, self._stacks_batches, self._stacks_models = objective, stacks_batches, stacks_models
        on_cuda = objective.device.type == "cuda"
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
        losses, logits = [], []
        for at in range(0, len(data), rows):
            x = objective.tensor(data.x[at : at + rows])
            y = objective.tensor(one_hot_targets(data.y[at : at + rows], program.classes))
            with use_exact_kernels(objective.device):
                out = self._logits(w, b, x)
                losses.append(vmap(objective.losses, in_dims=(0, None))(out, y).double().cpu())
            logits.append(out.cpu())
        return torch.cat(losses, 1).numpy(), torch.cat(logits, 1).numpy()

    def gradient(self, model: Flat, data: Dataset, *, batch: int, seed: int) -> Flat:
        """[n_params] mean gradient over all samples; every batch starts from the model's buffers."""
        objective, program = self.objective, self.program
        parts = list(weighted_batches(program, len(data), batch, fixed=None))
        drawn = [step_noise(program, seed, k, len(index)) for k, (index, _) in enumerate(parts)]
        vector = objective.tensor(model)
        total = torch.zeros(objective.n_params, dtype=torch.float64, device=objective.device)
        objective.training()
        for first, last in _equal(parts, self._at_once):
            some = range(first, last)
            index = np.stack([parts[k][0] for k in some])
            q = np.stack([parts[k][1] for k in some]) / len(data)
            x, y = data.x[index], one_hot_targets(data.y[index.ravel()], program.classes)
            numbers = np.concatenate([drawn[k]["noise"] for k in some]) if objective.source.noise else None
            with use_exact_kernels(objective.device), use_noise(None if numbers is None else objective.tensor(numbers)):
                y = y.reshape(*index.shape, *y.shape[1:])
                total += self._summed(vector, objective.tensor(x), objective.tensor(y), objective.tensor(q))
        mean: Flat = total.cpu().numpy().astype(program.dtype)
        return mean

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


def _equal(parts: Sequence[tuple[Array, Array]], most: int) -> list[tuple[int, int]]:
    """Ranges of batches of one size, at most `most` in each; only the last batch can be smaller."""
    whole = len(parts) - (len(parts[-1][0]) != len(parts[0][0]))
    ranges = [(at, min(at + most, whole)) for at in range(0, whole, most)]
    return [*ranges, *([(whole, len(parts))] if whole < len(parts) else [])]
