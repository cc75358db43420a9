"""k-means of points that stay on their devices: centroids go out, sums over the points of each cluster come back.

    n_k = sum_{i in k} 1,    s_k = sum_{i in k} (x_i - c_k),    q_k = sum_{i in k} |x_i - c_k|^2
    centroid  c_k + s_k / n_k,    scatter  q_k - |s_k|^2 / n_k

Lloyd from random groups stops at a poor optimum where clusters are clear. So each run then makes moves: the two
clusters whose union adds the least scatter become one (or a cluster without points is taken), the cluster of greatest
scatter is split along a random direction, and Lloyd goes on. A move that does not lower the scatter is taken back
(split and merge, as in Ueda, Nakano, Ghahramani and Hinton 2000). Runs go side by side: a step of all runs is one sum.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from edge_client.protocol.task import F64

RUNS = 4  # side by side; the best one counts
STEPS = 3  # of Lloyd, at first and after a move
PATIENCE = 2  # moves in a row that help no run
MIN_GAIN = 1e-6  # of the scatter; sums of whole numbers are not more exact
SPLIT = 1e-3  # half the distance of the two centroids of a split cluster, in units of its spread


@dataclass(frozen=True, kw_only=True)
class ClusterSums:
    """Of each run and cluster: the number of points [r, k], s [r, k, d] and q [r, k] of the module's formula."""

    counts: F64
    shifts: F64
    squares: F64


@dataclass(frozen=True, kw_only=True)
class SummedRuns:
    """Centroids [r, k, d], the points of each [r, k] and its scatter [r, k]."""

    points: F64
    counts: F64
    scatter: F64

    @property
    def total(self) -> F64:
        """[r] the objective of each run."""
        total: F64 = self.scatter.sum(axis=1)
        return total

    def better_of(self, other: SummedRuns, chosen: NDArray[np.bool_]) -> SummedRuns:
        """Each run of `other` that is `chosen` [r], else of this."""
        parts = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return SummedRuns(
            **{name: np.where(chosen.reshape(-1, *[1] * (a.ndim - 1)), b, a) for name, (a, b) in parts.items()}
        )


Asks = Generator[tuple[F64, bool], "ClusterSums | None", "SummedRuns | None"]


def settled(points: F64, sums: ClusterSums) -> SummedRuns:
    """The runs after a sum around the centroids `points` [r, k, d]; a cluster without points keeps its centroid."""
    shift = sums.shifts / np.maximum(sums.counts, 1)[:, :, None]
    scatter = sums.squares - sums.counts * np.einsum("rkd,rkd->rk", shift, shift)
    return SummedRuns(points=points + shift, counts=sums.counts, scatter=np.maximum(scatter, 0.0))


def summed_kmeans(start: F64, k: int, rng: np.random.Generator) -> Asks:
    """The best centroids, as the only run; None where a sum was not made.

    Yields the centroids [r, k, d] of the next sum, and whether each point is put into a random cluster instead of the
    nearest one; is sent the sums, or None. `start` [d] is where all points are close to.
    """
    runs = yield from _lloyd(np.tile(start, (RUNS, k, 1)), dealt=True)
    tried = np.zeros((RUNS, k), dtype=np.bool_)
    idle, left = 0, 2 * k
    while runs is not None and idle < PATIENCE and left > 0:
        proposed = [_moved(*run, rng) for run in zip(runs.points, runs.counts, runs.scatter, tried, strict=True)]
        if all(split is None for _, split in proposed):
            break
        found = yield from _lloyd(np.stack([points for points, _ in proposed]))
        if found is None:
            return None
        helps = found.total < (1 - MIN_GAIN) * runs.total
        for run, (_, split) in enumerate(proposed):
            if split is not None:
                tried[run, split] = True
        tried[helps] = False
        runs, idle, left = runs.better_of(found, helps), 0 if helps.any() else idle + 1, left - 1
    if runs is None:
        return None
    best = np.flatnonzero(runs.total == runs.total.min())[:1]
    return SummedRuns(points=runs.points[best], counts=runs.counts[best], scatter=runs.scatter[best])


def _lloyd(points: F64, *, dealt: bool = False) -> Asks:
    found = None
    for step in range(STEPS):
        sums = yield points, dealt and step == 0
        if sums is None:
            return None
        found = settled(points, sums)
        points = found.points
    return found


def _moved(
    points: F64, counts: F64, scatter: F64, tried: NDArray[np.bool_], rng: np.random.Generator
) -> tuple[F64, int | None]:
    """Centroids [k, d] after one merge and one split, and which cluster is split; None where none is left to try."""
    after, may = points.copy(), (counts > 1) & ~tried
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        free = int(empty[0])
    else:
        apart = ((points[:, None] - points[None]) ** 2).sum(axis=2)
        cost = apart * np.outer(counts, counts) / np.add.outer(counts, counts)
        np.fill_diagonal(cost, np.inf)
        into, free = (int(i) for i in np.unravel_index(int(cost.argmin()), cost.shape))
        after[into] = np.average(points[[into, free]], axis=0, weights=counts[[into, free]])
        may[[into, free]] = False
    if not may.any():
        return points, None
    split = int(np.where(may, scatter, -1.0).argmax())
    way = rng.standard_normal(points.shape[1])
    way *= SPLIT * np.sqrt(scatter[split] / counts[split]) / np.linalg.norm(way)
    after[free], after[split] = points[split] + way, points[split] - way
    return after, split
