"""Trimmed k-means on a Gram matrix: the share `trim` of the points, those farthest from every centroid, is left out.

    min over kept sets S of n - floor(trim n) points, and over k-means of S:  sum_{i in S} min_k ||x_i - c_k||^2

Alternates k-means on the kept points with keeping the points nearest to a centroid (Cuesta-Albertos 1997,
Garcia-Escudero 2008: impartial trimming over all clusters), and takes the best of several starts. With no point trimmed
it is k-means. Points count equally, since a device could lie about its weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.clustering.batched_kmeans import MAX_LLOYD_SWEEPS
from coordinator.clustering.gram import squared_distances
from coordinator.clustering.kmeans import centroid_distances, hartigan, kmeans, lloyd, objective, spread_seeds
from edge_client.protocol.task import F64, I64


@dataclass(frozen=True)
class TrimmedClustering:
    """Labels [n] of all points, trimmed ones by the nearest centroid; which are kept [n]; the sum over the kept."""

    labels: I64
    kept: NDArray[np.bool_]
    objective: float


def left_out(trim: float, count: int) -> int:
    """floor(trim * count) of the numbers as they are written: 0.29 of 100 are 29, and their product is below."""
    return int(round(trim * count, 9))


def trimmed_kmeans(
    matrix: F64, k: int, rng: np.random.Generator, *, trim: float, restarts: int = 20, init: I64 | None = None
) -> TrimmedClustering:
    """The best of `restarts` runs, and of one run from the labels `init` if given; `trim` is in [0, 0.5).

    Raises ValueError for k below 1, no points, another `trim`, or no start.
    """
    if k < 1 or len(matrix) < 1 or not 0 <= trim < 0.5 or (restarts < 1 and init is None):  # noqa: PLR2004 - most are kept
        raise ValueError(f"need k >= 1, points, trim in [0, 0.5) and a start; got k={k}, {matrix.shape}, {trim}")
    spare, equal = left_out(trim, len(matrix)), np.ones(len(matrix))
    if spare == 0:
        found = kmeans(matrix, k, rng, restarts=restarts, init=init)
        return TrimmedClustering(found.labels, np.ones(len(matrix), dtype=np.bool_), found.objective)
    starts = [] if init is None else [(init, _to(matrix, _medoids(matrix, init)))]
    for _ in range(restarts):
        d2 = _to(matrix, spread_seeds(matrix, k, equal, rng, spare=spare))
        starts.append((d2.argmin(axis=1), d2))
    return min((_concentrate(matrix, labels, d2, k, spare) for labels, d2 in starts), key=lambda run: run.objective)


def _to(matrix: F64, chosen: list[int]) -> F64:
    return squared_distances(matrix, np.arange(len(matrix)), np.array(chosen))


def _medoids(matrix: F64, labels: I64) -> list[int]:
    """The point of each label with the least sum of distances to the others: a minority cannot move it far."""
    groups = [np.flatnonzero(labels == j) for j in np.unique(labels)]
    return [int(own[np.sqrt(squared_distances(matrix, own, own)).sum(axis=1).argmin()]) for own in groups]


def _concentrate(matrix: F64, labels: I64, d2: F64, k: int, spare: int) -> TrimmedClustering:
    """From the points nearest to some centers (squared distances [n, ...]): cluster the kept, keep the near, again."""
    labels, kept = labels.copy(), _nearest(d2, spare)
    for _ in range(MAX_LLOYD_SWEEPS):
        inner, equal = np.ix_(kept, kept), np.ones(int(kept.sum()))
        labels[kept] = hartigan(matrix[inner], lloyd(matrix[inner], labels[kept], k, equal), k, equal)
        d2 = centroid_distances(matrix, labels, k, kept.astype(np.float64))
        nearest = _nearest(d2, spare)
        if (nearest == kept).all():
            break
        labels, kept = d2.argmin(axis=1), nearest
    d2 = centroid_distances(matrix, labels, k, kept.astype(np.float64))
    labels[~kept] = d2[~kept].argmin(axis=1)  # among those that have a kept point
    inner = np.ix_(kept, kept)
    return TrimmedClustering(labels, kept, objective(matrix[inner], labels[kept], k, np.ones(int(kept.sum()))))


def _nearest(d2: F64, spare: int) -> NDArray[np.bool_]:
    """All but the `spare` points farthest from every center, from squared distances [n, k]."""
    kept = np.ones(len(d2), dtype=np.bool_)
    kept[np.argsort(d2.min(axis=1), kind="stable")[len(d2) - spare :]] = False
    return kept
