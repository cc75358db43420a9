"""Methods from their papers' formulas, as plain loops over torch's softmax regression in float64.

A device's task gives the seed of its batches and nothing else; clusters are the best of all partitions, one by one.
A model is a flat vector [SIZE], a sum of models the vectors of its members one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edge_client.data.dataset import Dataset
from edge_client.protocol.task import F64, I64, ClientId, Fit, Flat
from tests.support.methods import MethodWorld
from tests.support.softmax_program import CLASSES, FEATURES

SIZE = CLASSES * FEATURES + CLASSES
STEPS, BATCH, RATE, MOMENTUM = 3, 8, 0.1, 0.9  # what tests.support.methods builds methods with
SAME = 1e-11  # float64 sums in another order, over a few rounds of small numbers


def fit(  # noqa: PLR0913 - the objective has these parts
    start: Flat,
    data: Dataset,
    seed: int,
    *,
    mu: float = 0.0,
    anchor: Flat | None = None,
    q: F64 | None = None,
    linear: Flat | None = None,
    moves: int | None = None,
    steps: int = STEPS,
) -> Flat:
    """SGD with momentum on (1/n) sum_j q_j loss_j + <linear, w> + (mu/2) |w - anchor|^2.

    `moves`: which member of a sum it moves.
    """
    w, velocity = np.array(start), np.zeros_like(start)
    on = np.ones_like(w) if moves is None else (np.arange(len(w)) // SIZE == moves).astype(np.float64)
    weight = torch.from_numpy(np.ones(len(data)) if q is None else q)
    for rows in _batches(len(data), seed, steps):
        leaf = torch.tensor(w, requires_grad=True)
        loss = (weight[rows] * _losses(leaf, data.x[rows], data.y[rows])).sum() / len(rows)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no hints here
        assert leaf.grad is not None
        pull = (0.0 if anchor is None else mu * (w - anchor)) + (0.0 if linear is None else linear)
        velocity = MOMENTUM * velocity + on * leaf.grad.numpy() + pull
        w = w - RATE * velocity
    return w


def losses(model: Flat, data: Dataset, shift: F64 | None = None) -> F64:
    """[n] of a model, or of a sum, on the samples; `shift` [CLASSES] is added to the scores."""
    return np.asarray(_losses(torch.from_numpy(model), data.x, data.y, shift).numpy())


def best_partition(points: F64, a: F64, k: int) -> I64:
    """[n] the labels of at most k clusters with the least sum of a_i |x_i - c|^2, in the order of first appearance."""

    def scatter(labels: I64) -> float:
        total = 0.0
        for j in range(int(labels.max()) + 1):
            own, weight = points[labels == j], a[labels == j]
            total += float(weight @ ((own - np.average(own, axis=0, weights=weight)) ** 2).sum(axis=1))
        return total

    return min((np.array(labels) for labels in _partitions(len(points), k)), key=scatter)


def matched(distances: F64) -> I64:
    """[old, new] -> the old one of each new one, one to one, of the least sum."""
    old, new = distances.shape
    orders = itertools.permutations(range(old), new)
    return np.array(min(orders, key=lambda order: sum(distances[k, j] for j, k in enumerate(order))))


def squared(points: F64, others: F64) -> F64:
    """[n, m] squared distances."""
    found: F64 = ((points[:, None] - others[None]) ** 2).sum(axis=2)
    return found


def mean(rows: Collection[Flat], weights: Sequence[float]) -> Flat:
    return np.asarray(np.average(np.stack(list(rows)), axis=0, weights=weights))


def seeds(world: MethodWorld, exchange: int) -> Mapping[ClientId, int]:
    """Those of the fits in an exchange of the last round, which are different numbers."""
    found = {c: task.seed for c, task in world.exchanges[exchange].items() if isinstance(task, Fit)}
    if len({*found.values()}) < len(found):
        raise AssertionError("devices of one exchange share a seed")
    return found


@dataclass
class PlainMomentum:
    """Polyak's heavy ball for one model of the server."""

    beta: float
    velocity: Flat | None = None

    def move(self, old: Flat, new: Flat) -> Flat:
        """Where a model goes that a method moves from `old` to `new`; its first move is not made again."""
        if self.velocity is None:
            self.velocity = np.zeros_like(old)
            return new
        moved = new + self.beta * self.velocity
        self.velocity = moved - old
        return moved


def _losses(vector: torch.Tensor, x: F64, y: I64, shift: F64 | None = None) -> torch.Tensor:
    scores = torch.zeros(len(x), CLASSES, dtype=torch.float64)
    for one in vector.reshape(-1, SIZE):
        scores = scores + torch.from_numpy(x) @ one[:-CLASSES].reshape(CLASSES, FEATURES).T + one[-CLASSES:]
    if shift is not None:
        scores = scores + torch.from_numpy(shift)
    return torch.nn.functional.cross_entropy(scores, torch.from_numpy(y), reduction="none")


def _batches(n: int, seed: int, steps: int) -> list[I64]:
    rng, found = np.random.Generator(np.random.PCG64(seed)), list[I64]()
    while len(found) < steps:
        order = rng.permutation(n)
        found += [order[at : at + BATCH] for at in range(0, n, BATCH)]
    return found[:steps]


def _partitions(n: int, k: int) -> Iterator[list[int]]:
    """Every partition of n points into at most k parts, numbered in the order of first appearance."""
    if n == 0:
        yield []
        return
    for labels in _partitions(n - 1, k):
        for label in range(min(max(labels, default=-1) + 2, k)):
            yield [*labels, label]
