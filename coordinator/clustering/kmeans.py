"""Weighted k-means on a Gram matrix [n, n]: k-means++ seeds, Lloyd, Hartigan's single moves, best of several starts.

A cluster is the set of its points' indices; its centroid is never formed. With T = G Z and Q_k = z_k' G z_k, where
column z_k of Z holds the weights of cluster k and A_k their sum, d2(i, k) = G_ii - 2 T_ik / A_k + Q_k / A_k^2.

Hartigan's moves matter in high dimension: a point's own share of its centroid pulls it back, and Lloyd stops early.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
SWEEPS = 300  # of Lloyd; far more than it ever takes
RELATIVE_GAIN = 1e-12  # moves that gain less (of the total scatter) are rounding, and could go on for ever


@dataclass(frozen=True)
class Clustering:
    """Labels [n] in 0..k-1 (some may be unused) and the weighted sum of squared distances to the centroids."""

    labels: I64
    objective: float


def kmeans(
    matrix: F64,
    k: int,
    rng: np.random.Generator,
    *,
    weights: F64 | None = None,
    restarts: int = 20,
    init: I64 | None = None,
) -> Clustering:
    """The best of `restarts` runs, and of one run from the labels `init` if given. Weights [n] are positive.

    With n <= k every distinct point may have a cluster of its own; the rest stay empty.
    """
    a = np.ones(len(matrix)) if weights is None else np.asarray(weights, dtype=np.float64)
    if k < 1 or len(matrix) < 1 or a.shape != (len(matrix),) or not (np.isfinite(a).all() and (a > 0).all()):
        raise ValueError(f"need k >= 1, points, and one positive weight each; got k={k}, {matrix.shape}, {a.shape}")
    starts = [] if init is None else [init]
    starts += [seeds(matrix, k, a, rng) for _ in range(restarts)]
    if not starts:
        raise ValueError("need restarts or initial labels")
    runs = [hartigan(matrix, lloyd(matrix, start, k, a), k, a) for start in starts]
    best = min(runs, key=lambda labels: objective(matrix, labels, k, a))
    return Clustering(best, objective(matrix, best, k, a))


def objective(matrix: F64, labels: I64, k: int, a: F64) -> float:
    """The weighted sum of squared distances of the points to their centroids."""
    _, mass, q = _sums(matrix, labels, k, a)
    full = mass > 0
    return max(0.0, float(a @ np.diag(matrix) - (q[full] / mass[full]).sum()))


def seeds(matrix: F64, k: int, a: F64, rng: np.random.Generator) -> I64:
    """Labels [n] after greedy k-means++: the nearest of the points that `spread` chose."""
    chosen = spread(matrix, k, a, rng)
    labels: I64 = np.argmin(np.diag(matrix)[chosen][None, :] - 2 * matrix[:, chosen], axis=1)
    return labels


def spread(matrix: F64, k: int, a: F64, rng: np.random.Generator, *, spare: int = 0) -> list[int]:
    """At most k points, far apart: each is the best of a few drawn by weight times squared distance to those before it.

    The `spare` points farthest from those before are not drawn, and do not count when draws are compared.
    """
    norms, tries, counted = np.diag(matrix), 2 + int(np.log(k)), len(matrix) - spare
    chosen: list[int] = []
    nearest = np.ones(len(matrix))  # the first is drawn by weight alone
    while len(chosen) < min(k, len(matrix)):
        mass = a * nearest
        if chosen:
            mass[np.argsort(nearest, kind="stable")[counted:]] = 0.0
        if mass.sum() <= 0:
            break  # fewer distinct points than clusters
        drawn = rng.choice(len(matrix), size=tries if chosen else 1, p=mass / mass.sum())
        distance = np.maximum(norms[None, :] + norms[drawn][:, None] - 2 * matrix[drawn], 0.0)  # [tries, n]
        closer = np.minimum(nearest, distance) if chosen else distance
        best = int(np.argmin(np.sort(closer * a, axis=1)[:, :counted].sum(axis=1)))
        chosen.append(int(drawn[best]))
        nearest = closer[best]
    return chosen


def distances(matrix: F64, labels: I64, k: int, a: F64) -> F64:
    """Squared distances [n, k] to the centroids; infinite for an empty cluster. A weight of zero forms no centroid."""
    return _from_sums(np.diag(matrix), *_sums(matrix, labels, k, a))


def lloyd(matrix: F64, labels: I64, k: int, a: F64) -> I64:
    """Labels after alternating centroids and nearest centroids until nothing changes; an empty cluster stays empty."""
    for _ in range(SWEEPS):
        moved: I64 = np.argmin(distances(matrix, labels, k, a), axis=1)
        if (moved == labels).all():
            break
        labels = moved
    return labels


def hartigan(matrix: F64, labels: I64, k: int, a: F64) -> I64:
    """Labels after moving single points, the best move first, while that lowers the objective; fills empty clusters."""
    labels, norms = labels.copy(), np.diag(matrix)
    t, mass, q = _sums(matrix, labels, k, a)
    least = RELATIVE_GAIN * float(a @ norms)
    for _ in range(SWEEPS * len(labels)):
        i, c, change = _best_move(_from_sums(norms, t, mass, q), labels, mass, a)
        if change >= -least:
            break
        b, w = labels[i], a[i]
        q[b] += w * w * norms[i] - 2 * w * t[i, b]
        q[c] += w * w * norms[i] + 2 * w * t[i, c]
        t[:, b] -= w * matrix[:, i]
        t[:, c] += w * matrix[:, i]
        mass[b], mass[c] = mass[b] - w, mass[c] + w
        labels[i] = c
    return labels


def _best_move(d2: F64, labels: I64, mass: F64, a: F64) -> tuple[int, int, float]:
    """(point, cluster, change of the objective) of the move that lowers it most.

    Moving i from b to c changes it by A_c a_i / (A_c + a_i) d2(i, c) - A_b a_i / (A_b - a_i) d2(i, b). Alone in its
    cluster a point leaves nothing behind, and founding a cluster costs nothing.
    """
    every, (_, k) = np.arange(len(labels)), d2.shape
    alone = np.bincount(labels, minlength=k)[labels] == 1
    rest = np.where(alone, 1.0, mass[labels] - a)
    leave = np.where(alone, 0.0, mass[labels] * a / rest * d2[every, labels])
    empty = np.bincount(labels, minlength=k) == 0
    join = np.where(empty, 0.0, mass * a[:, None] / (mass + a[:, None]) * np.where(empty, 0.0, d2))
    change = join - leave[:, None]
    change[every, labels] = 0.0
    i, c = divmod(int(np.argmin(change)), k)
    return i, c, float(change[i, c])


def _sums(matrix: F64, labels: I64, k: int, a: F64) -> tuple[F64, F64, F64]:
    """T [n, k], A [k], Q [k] of the module's formula."""
    member = np.eye(k)[labels] * a[:, None]
    t = matrix @ member
    return t, member.sum(axis=0), np.einsum("ik,ik->k", member, t)


def _from_sums(norms: F64, t: F64, mass: F64, q: F64) -> F64:
    safe = np.where(mass > 0, mass, 1.0)
    d2: F64 = np.maximum(norms[:, None] - 2 * t / safe + q / safe**2, 0.0)
    d2[:, mass <= 0] = np.inf
    return d2
