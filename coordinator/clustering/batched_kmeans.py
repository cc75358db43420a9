"""Many runs of weighted k-means side by side on one Gram matrix [n, n]: seeds, Lloyd, Hartigan's moves.

A run is labels [n]; r runs are [r, n]. A cluster is the set of its points' indices; its centroid is never computed.
With T = Z G and Q_k = z_k G z_k, where row z_k of Z holds the weights of cluster k and A_k their sum,

    d2(i, k)  = G_ii - 2 T_ki / A_k + Q_k / A_k^2
    objective = sum_i a_i G_ii - sum_k Q_k / A_k

All runs share one product with G. Runs that reach the same partition are merged; on clear clusters few are left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from coordinator.clustering.backend import MatrixProducts
from edge_client.protocol.task import F64, I64

MAX_LLOYD_SWEEPS = 300  # of Lloyd; it converges in far fewer
MIN_RELATIVE_GAIN = 1e-12  # of the total scatter; lesser moves are rounding, and may never end
GIVE_UP_FACTOR = 50  # a run ends when this many times the gain of its moves would not make it the best
FULL_PRODUCT_MAX_POINTS = 512  # up to these one product for all runs is cheaper than one per run for moved points


@dataclass(frozen=True, kw_only=True)
class ClusteringProblem:
    """The Gram matrix behind its products, its diagonal [n], the weights [n], and k."""

    g: MatrixProducts
    norms: F64
    a: F64
    k: int


@dataclass(frozen=True, kw_only=True)
class BatchedRuns:
    """Labels [r, n] in 0..k-1, and T [r, k, n], A [r, k], Q [r, k] of the module's formula, sizes [r, k]."""

    labels: I64
    t: F64
    mass: F64
    q: F64
    size: I64

    @property
    def score(self) -> F64:
        """[r] the total scatter less the objective: greater is better."""
        score: F64 = np.divide(self.q, self.mass, out=np.zeros_like(self.q), where=self.mass > 0).sum(axis=1)
        return score

    def take(self, chosen: I64 | NDArray[np.bool_]) -> BatchedRuns:
        return BatchedRuns(**{name: getattr(self, name)[chosen] for name in ("labels", "t", "mass", "q", "size")})

    def put(self, chosen: I64, others: BatchedRuns) -> None:
        for name in ("labels", "t", "mass", "q", "size"):
            getattr(self, name)[chosen] = getattr(others, name)


def start_runs(points: ClusteringProblem, labels: I64) -> BatchedRuns:
    """Runs from labels [r, n]."""
    r, n = labels.shape
    member = (labels[:, None, :] == np.arange(points.k)[:, None]) * points.a
    t = points.g.multiply(member.reshape(r * points.k, n)).reshape(r, points.k, n)
    return _counted(points, labels, t)


def relabel_runs(points: ClusteringProblem, runs: BatchedRuns, labels: I64) -> BatchedRuns:
    """The runs with other labels [r, n]; only the points that moved are multiplied, where that is cheaper."""
    (r, n), changed = labels.shape, runs.labels != labels
    if n <= FULL_PRODUCT_MAX_POINTS or changed.sum() > r * n / 4:
        return start_runs(points, labels)
    t = runs.t.copy()
    for run in np.flatnonzero(changed.any(axis=1)):
        who = np.flatnonzero(changed[run])
        step, every = np.zeros((points.k, len(who))), np.arange(len(who))
        step[labels[run, who], every] = points.a[who]
        step[runs.labels[run, who], every] = -points.a[who]
        touched = np.flatnonzero(step.any(axis=1))
        t[run, touched] += points.g.multiply(step[touched], who)
    return _counted(points, labels, t)


def _counted(points: ClusteringProblem, labels: I64, t: F64) -> BatchedRuns:
    """The runs with A, Q and sizes computed from their labels [r, n] and T."""
    (r, n), k = labels.shape, points.k
    own, cell = _own_cluster_values(t, labels), _cells(labels, k).ravel()
    mass: F64 = np.bincount(cell, weights=np.broadcast_to(points.a, (r, n)).ravel(), minlength=r * k).astype(
        np.float64, copy=False
    )
    q: F64 = np.bincount(cell, weights=(own * points.a).ravel(), minlength=r * k).astype(np.float64, copy=False)
    size = np.bincount(cell, minlength=r * k)
    return BatchedRuns(labels=labels, t=t, mass=mass.reshape(r, k), q=q.reshape(r, k), size=size.reshape(r, k))


def _cells(labels: I64, k: int) -> I64:
    """Labels [r, n] -> the index of each point's cluster in a flattened [r, k]."""
    cells: I64 = labels + k * np.arange(len(labels))[:, None]
    return cells


def _own_cluster_values(values: F64, labels: I64) -> F64:
    """[r, k, n] -> [r, n], each point's value for its own cluster."""
    _, k, n = values.shape
    own: F64 = values.ravel()[_cells(labels, k) * n + np.arange(n)]
    return own


def squared_centroid_distances(points: ClusteringProblem, runs: BatchedRuns) -> F64:
    """Squared distances [r, k, n] to the centroids; infinite for a cluster without weight."""
    safe = np.where(runs.mass > 0, runs.mass, 1.0)
    d2 = runs.t * (-2 / safe)[:, :, None]
    d2 += (np.where(runs.mass > 0, runs.q / safe**2, np.inf))[:, :, None]
    d2 += points.norms
    result: F64 = np.maximum(d2, 0.0, out=d2)
    return result


def nearest_clusters(values: F64) -> tuple[I64, F64]:
    """[r, k, n] -> for each run and point the first k of the least value, and that value; both [r, n]."""
    least, first = values[:, 0].copy(), np.zeros((values.shape[0], values.shape[2]), dtype=np.int64)
    for k in range(1, values.shape[1]):
        np.putmask(first, values[:, k] < least, k)
        np.minimum(least, values[:, k], out=least)
    return first, least


def distinct_partitions(labels: I64, k: int) -> I64:
    """[r, n] -> the indices of the first run of each partition; the numbering of clusters does not matter."""
    r, n = labels.shape
    cells = _cells(labels, k).ravel()
    marks = np.bincount(cells, weights=np.broadcast_to(_marks(n), (r, n)).ravel(), minlength=r * k).reshape(r, k)
    marks.sort(axis=1)
    seen: dict[bytes, int] = {}
    for run in range(r):
        seen.setdefault(marks[run].tobytes(), run)
    return np.fromiter(seen.values(), dtype=np.int64)


@lru_cache(maxsize=8)
def _marks(n: int) -> F64:
    """[n] fixed random numbers: clusters with the same sum of them, added in the same order, are the same cluster."""
    return np.random.default_rng(n).random(n)


def kmeanspp_seeds(points: ClusteringProblem, rng: np.random.Generator, *, restarts: int, spare: int = 0) -> I64:
    """[restarts, k] points, far apart (greedy k-means++); -1 where there are fewer distinct points than clusters.

    Each is the best of a few drawn by weight times squared distance to those before it.
    The `spare` points farthest from those before are not drawn, and do not count when draws are compared. Every run
    takes its own stretch of the generator's numbers, however many of them it uses.
    """
    n, tries, every = len(points.norms), 2 + int(np.log(points.k)), np.arange(restarts)
    uniform = rng.random((restarts, 1 + tries * (points.k - 1)))
    chosen = np.full((restarts, points.k), -1)
    nearest = np.ones((restarts, n))  # the first is drawn by weight alone
    for number in range(min(points.k, n)):
        mass = nearest * points.a
        if number and spare:
            np.put_along_axis(mass, np.argsort(nearest, axis=1, kind="stable")[:, n - spare :], 0.0, axis=1)
        some = uniform[:, :1] if number == 0 else uniform[:, 1 + (number - 1) * tries : 1 + number * tries]
        picked, possible = _draw_by_mass(mass, some)  # [restarts, tries]
        rows = points.g.rows(picked.ravel()).reshape(restarts, -1, n)
        distance = points.norms - 2 * rows + points.norms[picked][:, :, None]
        np.maximum(distance, 0.0, out=distance)
        if number:
            np.minimum(distance, nearest[:, None], out=distance)
        best = _total(distance * points.a, spare).argmin(axis=1)
        chosen[:, number] = np.where(possible, picked[every, best], -1)
        nearest = np.where(possible[:, None], distance[every, best], 0.0)
    return chosen


def _draw_by_mass(mass: F64, uniform: F64) -> tuple[I64, NDArray[np.bool_]]:
    """For every run [r] the points drawn by `mass` [r, n] with numbers in [0, 1) [r, tries]; whether any has mass."""
    cdf = mass.cumsum(axis=1)
    total = cdf[:, -1]
    possible = total > 0
    cdf /= np.where(possible, total, 1.0)[:, None]
    found = np.count_nonzero(cdf[:, None, :] <= uniform[:, :, None], axis=2)
    return np.minimum(found, mass.shape[1] - 1), possible


def _total(values: F64, spare: int) -> F64:
    """[..., n] -> [...] sums without the `spare` greatest."""
    if spare:
        values = np.sort(values, axis=-1)[..., : values.shape[-1] - spare]
    total: F64 = values.sum(axis=-1)
    return total


def assign_to_seeds(points: ClusteringProblem, chosen: I64) -> I64:
    """[r, k] points of `kmeanspp_seeds` -> labels [r, n], the nearest of them."""
    r, k = chosen.shape
    rows = points.g.rows(np.maximum(chosen, 0).ravel()).reshape(r, k, -1)
    return nearest_clusters(np.where((chosen >= 0)[:, :, None], points.norms[chosen][:, :, None] - 2 * rows, np.inf))[0]


def lloyd(points: ClusteringProblem, labels: I64) -> BatchedRuns:
    """Centroids and nearest centroids in turn until nothing changes: one run for each partition that was reached.

    An empty cluster stays empty.
    """
    runs = start_runs(points, labels[distinct_partitions(labels, points.k)])
    done: list[BatchedRuns] = []
    for _ in range(MAX_LLOYD_SWEEPS):
        after, _ = nearest_clusters(squared_centroid_distances(points, runs))
        still = (after == runs.labels).all(axis=1)
        if still.any():
            done.append(runs.take(still))
        if still.all():
            break
        runs, after = runs.take(~still), after[~still]
        keep = distinct_partitions(after, points.k)
        runs = relabel_runs(points, runs.take(keep), after[keep])
    else:
        done.append(runs)
    every = BatchedRuns(
        **{n: np.concatenate([getattr(d, n) for d in done]) for n in ("labels", "t", "mass", "q", "size")}
    )
    return every.take(distinct_partitions(every.labels, points.k))


def hartigan(points: ClusteringProblem, runs: BatchedRuns) -> BatchedRuns:
    """The runs after moving points while any single move lowers the objective; fills empty clusters.

    Moves that help alone are made together, as many of the best as help together: all at first, half as many whenever
    the objective did not fall, twice as many whenever it did. A single move falls by what was computed for it. A run
    far behind the best is left where it is; the best never is.
    """
    out = runs.take(np.arange(len(runs.labels)))
    least = MIN_RELATIVE_GAIN * float(points.a @ points.norms)
    active, limit = np.arange(len(out.labels)), np.full(len(out.labels), len(points.norms))
    for _ in range(MAX_LLOYD_SWEEPS * len(points.norms)):
        now = out.take(active)
        labels, count, gain = _best_moves(points, now, limit[active], least)
        some = (count > 0) & (now.score + GIVE_UP_FACTOR * gain >= out.score.max())
        active, now, labels, count = active[some], now.take(some), labels[some], count[some]
        if not len(active):
            break
        after = relabel_runs(points, now, labels)
        fell = after.score > now.score
        out.put(active[fell], after.take(fell))
        limit[active] = np.where(fell, np.minimum(2 * limit[active], len(points.norms)), count // 2)
        active = active[fell | (count > 1)]  # a single move that does not help is rounding
    return out


def _best_moves(points: ClusteringProblem, runs: BatchedRuns, limit: I64, least: float) -> tuple[I64, I64, F64]:
    """Labels [r, n] after the best moves of each run, at most `limit` [r]; how many these are [r].

    And the sum [r] of what all moves that help would gain, each alone.

    Moving i from b to c changes the objective by A_c a_i / (A_c + a_i) d2(i, c) - A_b a_i / (A_b - a_i) d2(i, b). Alone
    in its cluster a point leaves nothing behind, and founding a cluster costs nothing.
    """
    d2, labels, a = squared_centroid_distances(points, runs), runs.labels, points.a
    n, cells = labels.shape[1], _cells(labels, points.k)
    mass, alone = runs.mass.ravel()[cells], (runs.size == 1).ravel()[cells]
    leave = np.where(alone, 0.0, mass * a * _own_cluster_values(d2, labels) / np.where(alone, 1.0, mass - a))
    d2[runs.size == 0] = 0.0
    d2 *= a / (1 + a / np.where(runs.mass > 0, runs.mass, 1.0)[:, :, None])
    d2.ravel()[cells * n + np.arange(n)] = np.inf  # to stay is no move
    to, join = nearest_clusters(d2)
    gain = leave - join
    moves = gain > least
    count, promised = moves.sum(axis=1), np.where(moves, gain, 0.0).sum(axis=1)
    for run in np.flatnonzero(count > limit):
        who = np.flatnonzero(moves[run])
        moves[run, who[np.argsort(-gain[run, who], kind="stable")[limit[run] :]]] = False
    return np.where(moves, to, labels), np.minimum(count, limit), promised
