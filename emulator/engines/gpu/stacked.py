"""The engine `stacked`: many devices train at once, with the clients as a batch dimension. Made for GPUs.

Weights, velocities and pulls are [clients, n_params], buffers [clients, size - n_params]; one step of all active
clients is one call of torch.func.vmap. The numbers of a client do not depend on the others (schedule.py). On a CPU
a loop over clients is faster (cpu_engine.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordinator.models.registry import Model
from edge_client.protocol.task import Flat
from edge_client.training.learner import Learner, TrainedModel, TrainingJob
from edge_client.training.noise import step_noise
from edge_client.training.optimiser import StepScalars
from emulator.engines.gpu.memory import run_in_parts
from emulator.engines.gpu.objective import Objective, RuleState, sgd_step_, torch_device, use_exact_kernels, use_noise
from emulator.engines.gpu.probing import ProbeMixin
from emulator.engines.gpu.resident_data import DeviceDataCache
from emulator.engines.gpu.schedule import (
    MAX_CPU_CLIENTS,
    MAX_CUDA_CLIENTS,
    Bucket,
    bytes_of,
    clients_at_once,
    make_schedule,
    order_jobs,
)
from emulator.engines.gpu.stackable import check_stackable, predicts_stacked, random_passes
from emulator.engines.pickling import pickle_by_value

PILOT_CLIENTS = 4  # clients on which the memory of a pass is measured


@dataclass(frozen=True, kw_only=True)
class StackedRecipe:
    """`device`: torch's name, or `auto`: CUDA where there is one. `chunk`: clients at once, else planned."""

    model: Model
    device: str = "auto"
    dtype: str = "float32"
    chunk: int | None = None

    def open(self) -> Learner:
        """See `Recipe`. Raises ProgramRefused for a model that torch cannot stack."""
        device = torch_device(self.device)
        if device.type == "cpu":
            torch.set_num_threads(1)
        objective = Objective(self.model, device=device, dtype=self.dtype)
        check_stackable(objective)
        return StackedLearner(objective, chunk=self.chunk, stacks_models=predicts_stacked(objective))

    def __reduce__(self) -> Any:  # noqa: ANN401 - pickle's
        return pickle_by_value(self)


class StackedLearner(ProbeMixin):
    """See `Learner`."""

    def __init__(self, objective: Objective, *, chunk: int | None, stacks_models: bool) -> None:
        super().__init__(objective, stacks_batches=True, stacks_models=stacks_models)
        self._chunk = chunk
        self._activations: dict[int, int] = {}  # batch size -> bytes of one client's pass

    def train(self, jobs: Sequence[TrainingJob]) -> Iterator[TrainedModel]:
        """In the jobs' order, whatever the order of the work; a result waits for all results before it."""
        for _, alike in groupby(jobs, key=lambda job: job.task.optimiser):  # a stack has one optimiser
            yield from self._train(list(alike))

    def _train(self, jobs: Sequence[TrainingJob]) -> Iterator[TrainedModel]:
        order, done, following = order_jobs(jobs), dict[int, TrainedModel](), 0

        def stacked(first: int, last: int) -> dict[int, TrainedModel]:
            part = order[first:last]
            stack = _Stack(self.objective, self.resident, [jobs[i] for i in part])
            with use_exact_kernels(self.objective.device):
                return dict(zip(part, stack.run(), strict=True))

        size = self._chunk or self._planned(jobs)
        for found in run_in_parts(len(order), size, stacked, what="clients", halved=self._halved):
            done |= found
            while following in done:
                yield done.pop(following)
                following += 1

    def _halved(self, size: int) -> None:
        self._chunk = size
        self.resident.clear()

    def _planned(self, jobs: Sequence[TrainingJob]) -> int:
        """Clients at once, for the largest job's memory."""
        objective = self.objective
        if objective.device.type != "cuda":
            return MAX_CPU_CLIENTS
        itemsize = objective.dtype.itemsize
        per_client = max(
            (
                bytes_of(
                    job,
                    size=objective.size,
                    target=math.prod(objective.source.target),
                    activations=self._bytes_of_pass(max(len(index) for index in job.batches)),
                    itemsize=itemsize,
                )
                for job in jobs
            ),
            default=1,
        )
        held = torch.cuda.memory_reserved(objective.device) - torch.cuda.memory_allocated(objective.device)
        free = torch.cuda.mem_get_info(objective.device)[0] + held - self.resident.free_bytes
        return clients_at_once(len(jobs), per_client=per_client, free=free, most=MAX_CUDA_CLIENTS)

    def _bytes_of_pass(self, batch: int) -> int:
        """Of one client's forward and backward pass, measured once on a few clients."""
        if batch not in self._activations:
            device, some = self.objective.device, random_passes(self.objective, clients=PILOT_CLIENTS, batch=batch)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            try:
                with use_exact_kernels(device):
                    some.run_stacked(self.objective)
            except torch.OutOfMemoryError:
                return torch.cuda.mem_get_info(device)[1]  # more than there is: one client at once
            self._activations[batch] = (torch.cuda.max_memory_allocated(device) - before) // PILOT_CLIENTS
        return self._activations[batch]


class _Stack:
    """Some clients from their first step to their last; they come in the order of `order_jobs`."""

    def __init__(self, objective: Objective, resident: DeviceDataCache, jobs: Sequence[TrainingJob]) -> None:
        self.objective, self.jobs, self.plan = objective, jobs, make_schedule(jobs)
        tensor, n = objective.tensor, objective.n_params
        start = objective.once_each([job.start for job in jobs])
        self.w, self.b = start[:, :n].clone(), start[:, n:].clone()
        optimiser = jobs[0].task.optimiser
        self.rule = None if optimiser is None else RuleState.zeros(optimiser, self.w)
        self.v = torch.zeros_like(self.w if optimiser is None else self.w[:0])
        self.lr, self.momentum, self.mu = (
            tensor([getattr(job.task, name) for job in jobs])[:, None] for name in ("lr", "momentum", "mu")
        )
        self.pull = self._pulls()
        self.x, self.y = resident.gather([(job.data, used) for job, used in zip(jobs, self.plan.used, strict=True)])
        self.rows = torch.from_numpy(self.plan.rows).to(objective.device)
        self.q = tensor(self.plan.q)
        self.losses = torch.zeros(len(jobs), len(self.plan.steps), dtype=objective.dtype, device=objective.device)

    def run(self) -> list[TrainedModel]:
        self.objective.training()
        for k, step in enumerate(self.plan.steps):
            g = self._gradients(k, step.active, step.buckets)
            active = slice(0, step.active)
            pull = None if self.pull is None else self.pull[active]
            w, lr, mu = self.w[active], self.lr[active], self.mu[active]
            if self.rule is None:
                sgd_step_(w, self.v[active], g, pull, lr, self.momentum[active], mu)
            else:
                now = StepScalars.of(self.rule.optimiser, k + 1)
                self.rule.step_(w, g, pull, lr, mu, now.scale, now.floor)
        vectors, losses = torch.cat([self.w, self.b], 1).cpu().numpy(), self.losses.double().cpu().numpy()
        return [
            TrainedModel(vector=vectors[i].copy(), losses=losses[i, : len(job.batches)].copy())
            for i, job in enumerate(self.jobs)
        ]

    def _gradients(self, k: int, active: int, buckets: Sequence[Bucket]) -> Tensor:
        """[active, n_params]; buffers and losses are written on the way."""
        g = None if len(buckets) == 1 else torch.empty_like(self.w[:active])
        for bucket in buckets:
            who = bucket.who if isinstance(bucket.who, slice) else torch.from_numpy(bucket.who).to(self.w.device)
            uses = slice(bucket.at, bucket.at + bucket.clients * bucket.batch)
            rows = self.rows[uses].view(bucket.clients, bucket.batch)
            with use_noise(self._noise(k, bucket)):
                found, after, loss = self.objective.gradients(
                    self.w[who], self.b[who], self.x[rows], self.y[rows], self.q[uses].view_as(rows)
                )
            self.b[who], self.losses[who, k] = after, loss
            if g is None:
                return found
            g[who] = found
        return g  # type: ignore[return-value]  # two buckets or more

    def _noise(self, k: int, bucket: Bucket) -> Tensor | None:
        program = self.objective.program
        if not self.objective.source.noise:
            return None
        who = range(bucket.who.start, bucket.who.stop) if isinstance(bucket.who, slice) else bucket.who
        drawn = [step_noise(program, self.jobs[i].task.seed, k, bucket.batch)["noise"] for i in who]
        return self.objective.tensor(np.concatenate(drawn))

    def _pulls(self) -> Tensor | None:
        """[clients, n_params] linear - mu anchor, or nothing where no job has either."""
        tasks, zero = [job.task for job in self.jobs], np.zeros(self.objective.size)
        pull = None
        if any(task.linear is not None for task in tasks):
            pull = self._params([zero if task.linear is None else task.linear for task in tasks])
        if any(task.anchor is not None for task in tasks):
            anchors = self._params([zero if task.anchor is None else task.anchor for task in tasks])
            pull = anchors.mul_(-self.mu) if pull is None else pull.addcmul_(anchors, self.mu, value=-1)
        return pull

    def _params(self, vectors: Sequence[Flat]) -> Tensor:
        return self.objective.once_each(vectors)[:, : self.objective.n_params].clone()
