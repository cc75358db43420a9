"""Weighted k-means on a Gram matrix [n, n]: greedy k-means++ seeds, Lloyd, Hartigan's single moves, best of several.

    min  sum_k sum_{i in k} a_i ||x_i - c_k||^2,   c_k = sum_{i in k} a_i x_i / sum_{i in k} a_i

batched_kmeans.py runs all starts side by side and says how distances follow from the Gram matrix; the functions here
are one run each, except `kmeans`. Hartigan's moves matter in high dimension, where a point's own share of its centroid
holds it back and Lloyd stops early.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.clustering import batched_kmeans as side_by_side
from coordinator.clustering.backend import Backend, select_backend
from coordinator.clustering.batched_kmeans import (
    ClusteringProblem,
    assign_to_seeds,
    distinct_partitions,
    kmeanspp_seeds,
    squared_centroid_distances,
    start_runs,
)
from edge_client.protocol.task import F64, I64


@dataclass(frozen=True)
class Clustering:
    """Labels [n] in 0..k-1 (some may be unused) and the weighted sum of squared distances to the centroids."""

    labels: I64
    objective: float


def kmeans(  # noqa: PLR0913 - the device is one more
    matrix: F64,
    k: int,
    rng: np.random.Generator,
    *,
    weights: F64 | None = None,
    restarts: int = 20,
    init: I64 | None = None,
    where: Backend | None = None,
) -> Clustering:
    """The best of `restarts` runs, and of one run from the labels `init` [n] if given. Weights [n] are positive.

    With n <= k every distinct point may have a cluster of its own; the rest stay empty. Raises ValueError for k below
    1, no points, weights that are not positive, or no start.

    >>> points = np.array([[0.0], [1.0], [10.0], [11.0]])
    >>> found = kmeans(points @ points.T, 2, np.random.default_rng(0))
    >>> found.objective, bool(found.labels[0] == found.labels[1] != found.labels[2])
    (1.0, True)
    """
    a = np.ones(len(matrix)) if weights is None else np.asarray(weights, dtype=np.float64)
    if k < 1 or len(matrix) < 1 or a.shape != (len(matrix),) or not (np.isfinite(a).all() and (a > 0).all()):
        raise ValueError(f"need k >= 1, points, and one positive weight each; got k={k}, {matrix.shape}, {a.shape}")
    if restarts < 1 and init is None:
        raise ValueError("need restarts or initial labels")
    points = _points(matrix, k, a, where or select_backend())
    starts = [] if init is None else [np.asarray(init, dtype=np.int64)[None]]
    if restarts > 0:
        starts.append(assign_to_seeds(points, kmeanspp_seeds(points, rng, restarts=restarts)))
    found = side_by_side.hartigan(points, side_by_side.lloyd(points, np.concatenate(starts)))
    first = distinct_partitions(found.labels, k)  # the numbering of clusters must not depend on the last bit of a score
    best = found.labels[first[int(found.score[first].argmax())]]
    return Clustering(best, objective(matrix, best, k, a))


def objective(matrix: F64, labels: I64, k: int, a: F64) -> float:
    """The weighted sum of squared distances of the points to their centroids."""
    points = _points(matrix, k, a)
    return max(0.0, float(a @ points.norms - start_runs(points, labels[None]).score[0]))


def spread_seeds(matrix: F64, k: int, a: F64, rng: np.random.Generator, *, spare: int = 0) -> list[int]:
    """At most k points, far apart, of one run of `batched_kmeans.kmeanspp_seeds`."""
    chosen: list[int] = kmeanspp_seeds(_points(matrix, k, a), rng, restarts=1, spare=spare)[0].tolist()
    return [point for point in chosen if point >= 0]


def centroid_distances(matrix: F64, labels: I64, k: int, a: F64) -> F64:
    """Squared distances [n, k] to the centroids; infinite for an empty cluster. A weight of zero forms no centroid."""
    points = _points(matrix, k, a)
    d2: F64 = squared_centroid_distances(points, start_runs(points, labels[None]))[0].T
    return d2


def lloyd(matrix: F64, labels: I64, k: int, a: F64) -> I64:
    """Labels after alternating centroids and nearest centroids until nothing changes; an empty cluster stays empty."""
    after: I64 = side_by_side.lloyd(_points(matrix, k, a), labels[None]).labels[0]
    return after


def hartigan(matrix: F64, labels: I64, k: int, a: F64) -> I64:
    """Labels after moving points while a single move lowers the objective; fills empty clusters."""
    points = _points(matrix, k, a)
    after: I64 = side_by_side.hartigan(points, start_runs(points, labels[None])).labels[0]
    return after


def _points(matrix: F64, k: int, a: F64, where: Backend | None = None) -> ClusteringProblem:
    products = (where or select_backend("cpu")).products(matrix)
    return ClusteringProblem(g=products, norms=np.diag(matrix).copy(), a=a, k=k)
