"""The schedule of stacked clients: local updates of different lengths without padded samples or masked steps.

Clients are sorted by their number of steps, so that the active clients are a prefix that shrinks. Within a step,
clients whose batches have one size form a bucket, so that batch norm sees real samples only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_client.protocol.task import F64, I64
from edge_client.training.learner import TrainingJob

MAX_CPU_CLIENTS = 8  # more stacked clients exceed the caches of a CPU: measured with up to 100
MAX_CUDA_CLIENTS = 1024  # more clients do not make a GPU faster
MAX_CUDA_BATCHES = 32  # of one gradient at once
MAX_MEMORY_SHARE = 0.8  # of the free memory; the rest is for the kernels' own work space


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Clients of a stack whose batches of one step have one size; a slice where they are adjacent.

    Their samples are `rows[at : at + clients * batch]` of the schedule, client by client.
    """

    who: slice | I64
    clients: int
    batch: int
    at: int


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """The first `active` clients take a step, in these buckets."""

    active: int
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All steps of a stack in order; `rows` [uses] positions in the stack's samples, `q` [uses] float64 weights.

    `used[i]` are the indices of client i's samples that the stack holds, one client after the other.
    """

    steps: tuple[ScheduledStep, ...]
    rows: I64
    q: F64
    used: tuple[I64, ...]


def order_jobs(jobs: Sequence[TrainingJob]) -> list[int]:
    """Positions of the jobs, most steps first; equal sequences of batch sizes side by side."""
    return sorted(range(len(jobs)), key=lambda i: (-len(jobs[i].batches), _sizes(jobs[i])))


def make_schedule(jobs: Sequence[TrainingJob]) -> Schedule:
    """Of one stack, its jobs in the order of `order_jobs`."""
    used, places = zip(*(_compact(job) for job in jobs), strict=True)
    starts = np.concatenate([[0], np.cumsum([len(u) for u in used])])
    steps, rows, q, at = [], [], [], 0
    for k in range(len(jobs[0].batches)):
        active = sum(len(job.batches) > k for job in jobs)
        buckets = []
        for batch, who in _by_size([len(job.batches[k]) for job in jobs[:active]]):
            buckets.append(Bucket(who=_narrow(who), clients=len(who), batch=batch, at=at))
            at += batch * len(who)
            for i in who:
                rows.append(starts[i] + places[i][k])
                q.append(jobs[i].weights[jobs[i].batches[k]] / batch)
        steps.append(ScheduledStep(active=active, buckets=tuple(buckets)))
    return Schedule(steps=tuple(steps), rows=np.concatenate(rows), q=np.concatenate(q), used=used)


def clients_at_once(clients: int, *, per_client: int, free: int, most: int) -> int:
    """How many of `clients` to stack, in equal parts: at most `most`, within MAX_MEMORY_SHARE of `free` bytes."""
    fit = max(1, min(most, int(MAX_MEMORY_SHARE * free) // max(1, per_client)))
    return max(1, math.ceil(clients / math.ceil(max(1, clients) / fit)))


def bytes_of(job: TrainingJob, *, size: int, target: int, activations: int, itemsize: int) -> int:
    """What one client needs: w, b, velocity, gradient and pull of a model of `size` values, its pass, its samples.

    An optimiser's step has up to three more: Adam's mean squares, their roots, and the move.

    `target`: values of a sample's target on the device, one-hot for labels; `activations`: bytes of a pass.
    """
    uses = sum(len(index) for index in job.batches)
    sample = job.data.x[:1].size + target
    vectors = 4 if job.task.optimiser is None else 7
    return vectors * size * itemsize + activations + min(uses, len(job.data)) * sample * itemsize + 16 * uses


def _sizes(job: TrainingJob) -> tuple[int, ...]:
    return tuple(len(index) for index in job.batches)


def _compact(job: TrainingJob) -> tuple[I64, list[I64]]:
    """The samples that a job uses, once each, and its batches as positions in them."""
    used, inverse = np.unique(np.concatenate(job.batches), return_inverse=True)
    return used, np.split(inverse, np.cumsum(_sizes(job))[:-1])


def _by_size(sizes: Sequence[int]) -> list[tuple[int, I64]]:
    found = np.asarray(sizes)
    return [(int(size), np.flatnonzero(found == size)) for size in sorted(set(sizes), reverse=True)]


def _narrow(who: I64) -> slice | I64:
    first, last = int(who[0]), int(who[-1])
    return slice(first, last + 1) if last - first + 1 == len(who) else who
