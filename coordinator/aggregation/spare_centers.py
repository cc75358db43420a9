"""More centers than wanted, from which clusters come by splitting and merging alone: of sums, no point is ever seen.

Devices that choose among random starts soon share few of them, and groups of devices that differ may share one. So a
center that no device chose becomes one half of the greatest: both halves stand on either side of it, in a random
direction. The gradients of two groups that share a center point against each other, so each group takes another half.
In the end the centers, weighted by their devices, are clustered by k-means, and each cluster is one center.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coordinator.clustering.gram import gram_matrix
from coordinator.clustering.kmeans import kmeans
from edge_client.protocol.task import F64, I64, Array, Flat

APART = 0.1  # of a half from the center that is split, in units of the center's distance from the common start


def refilled(
    centers: Array,
    counts: I64,
    start: Flat,
    *,
    least: int,
    rng: np.random.Generator,
    moves: NDArray[np.bool_] | None = None,
) -> Array:
    """Centers [M, p] of which those without devices are halves of others; each half expects `least` devices or more.

    `counts` [M] are the devices of each center, `start` [p] is where all of them began. `moves` [p] are the
    numbers that a direction changes. The others both halves have as they are: buffers, of which a variance may become
    negative, and what training holds.
    """
    out, expected = centers.copy(), counts.astype(np.float64)
    some = np.ones(len(start), dtype=np.bool_) if moves is None else moves
    for free in np.flatnonzero(counts == 0).tolist():
        split = int(expected.argmax())
        if expected[split] < 2 * least:
            break
        way = rng.standard_normal(len(start))
        way[~some] = 0
        moved = (out[split].astype(np.float64) - start)[some]
        way *= APART * np.linalg.norm(moved) / np.linalg.norm(way)
        out[free], out[split] = out[split] - way, out[split] + way
        expected[free] = expected[split] = expected[split] / 2
    return out


def merged(centers: Array, counts: I64, points: F64, spare: Array, rng: np.random.Generator) -> tuple[Array, I64]:
    """K centers [K, p] and their devices [K] from M of them; `points` [M, c] are what is compared.

    `spare` [K, p] are the centers of clusters that stay empty.
    """
    used = np.flatnonzero(counts > 0)
    origin = points[used].mean(axis=0)
    labels = kmeans(gram_matrix(points[used], origin), len(spare), rng, weights=counts[used].astype(np.float64)).labels
    out, total = spare.copy(), np.zeros(len(spare), dtype=np.int64)
    for k in np.unique(labels):
        mine = used[labels == k]
        out[k] = np.average(centers[mine].astype(np.float64), axis=0, weights=counts[mine])
        total[k] = counts[mine].sum()
    return out, total
