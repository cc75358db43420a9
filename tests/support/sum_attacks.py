"""What the coordinator finds of single devices in right sums, by arithmetic on what it was sent."""

from __future__ import annotations

import numpy as np

from coordinator.clustering.summed_kmeans import ClusterSums
from edge_client.protocol.task import F64

Step = tuple[F64, ClusterSums]  # of k-means: the centroids [r, k, d], and their sums
SAME = 1e-4  # of a squared length: sums of words of 32 bits are more exact


def single_points(steps: list[Step], *, repeat: bool = False) -> F64:
    """[m, d] points of single devices, over the first centroid: what two clusters of any steps differ by.

    Where one has one device more, and the squared length of the difference is the difference of the squared lengths,
    the difference is the point of that device. With `repeat` each found point is taken out of the clusters that it was
    nearest to, and the search goes on in the rest; the first step, whose clusters are drawn by lot, is then left out.
    """
    origin, found = steps[0][0][0, 0], list[F64]()
    rows = [_over(origin, *step) for step in (steps[1:] if repeat else steps)]
    while fresh := _new(found, _differences(*(np.concatenate(column) for column in zip(*rows, strict=True)))):
        found += fresh if not repeat else fresh[:1]
        if not repeat:
            break
        for (points, _), (counts, totals, squares) in zip(steps[1:], rows, strict=True):
            _take_out(found[-1], points - origin, counts, totals, squares)
    return np.array(found).reshape(-1, len(origin))


def _over(origin: F64, points: F64, sums: ClusterSums) -> tuple[F64, F64, F64]:
    """Of each cluster: its devices [r k], the sum of their points [r k, d] and of squared lengths [r k]."""
    moved, n = points - origin, sums.counts
    cross, own = (np.einsum("rkd,rkd->rk", moved, other) for other in (sums.shifts, moved))
    totals = sums.shifts + n[:, :, None] * moved
    return n.ravel().copy(), totals.reshape(-1, len(origin)), (sums.squares + 2 * cross + n * own).ravel()


def _differences(counts: F64, totals: F64, squares: F64) -> list[F64]:
    counts, squares = np.append(counts, 0), np.append(squares, 0)  # and the empty cluster
    totals = np.vstack([totals, np.zeros(totals.shape[1])])
    products, lengths = totals @ totals.T, squares[:, None] - squares[None]
    apart = np.diag(products)[:, None] + np.diag(products)[None] - 2 * products
    likely = (counts[:, None] - counts[None] == 1) & (lengths > 0) & (np.abs(apart - lengths) < 100 * SAME * lengths)
    found = [(totals[more] - totals[fewer], lengths[more, fewer]) for more, fewer in np.argwhere(likely)]
    return [point for point, length in found if abs(point @ point - length) < SAME * length]


def _new(known: list[F64], found: list[F64]) -> list[F64]:
    fresh = list[F64]()
    for one in found:
        if all((one - other) @ (one - other) > SAME * (one @ one) for other in (*known, *fresh)):
            fresh.append(one)
    return fresh


def _take_out(point: F64, centroids: F64, counts: F64, totals: F64, squares: F64) -> None:
    runs, k, _ = centroids.shape
    apart = ((centroids - point) ** 2).sum(axis=2)
    apart[counts.reshape(runs, k) <= 0] = np.inf  # closed, or all its devices are known
    at = np.arange(runs) * k + apart.argmin(axis=1)
    counts[at] -= 1
    totals[at] -= point
    squares[at] -= point @ point
