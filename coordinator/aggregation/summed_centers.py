"""Centers from sums of words (edge_client/protocol/summed_task.py): no update of one device is seen here.

With q the sum of the devices' words of a parameter, and V that of their weights, the mean of a center is

    c_k + clip q / V,    off by at most (clip / V) (1 + |mean - c_k| / clip) m per parameter for m devices

in units of 1 / levels; the rounding has mean zero, so the error of m devices is about sqrt(m) and not m.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.clustering.summed_kmeans import ClusterSums
from edge_client.protocol.summed_task import SumScale, Words
from edge_client.protocol.task import I64, Array


def centers_of_sums(
    centers: Array, sums: Words, scale: SumScale, blocks: Sequence[int], *, step: float = 1.0
) -> tuple[Array, I64]:
    """New centers [K, p] and the number of devices of each [K] from the summed blocks, one for each of `blocks`.

    A center moves the part `step` of the way to its devices' mean. One without devices keeps its values.
    """
    moved, counts = centers.copy(), np.zeros(len(centers), dtype=np.int64)
    for k, block in zip(blocks, sums.reshape(len(blocks), -1), strict=True):
        numbers = scale.signed(block)
        weight, counts[k] = numbers[-2], numbers[-1]
        if counts[k] > 0 and weight > 0:
            moved[k] = centers[k] + step * scale.clip * (numbers[:-2] / weight)
    return moved, counts


def cluster_sums(shape: tuple[int, int, int], sums: Words, scale: SumScale) -> ClusterSums:
    """What k-means needs of the clusters of [runs, K, d] centroids."""
    runs, k, width = shape
    blocks = scale.signed(sums).reshape(runs, k, width + 2).astype(np.float64)
    unit = scale.clip / scale.levels
    return ClusterSums(
        shifts=unit * blocks[:, :, :width], squares=unit * scale.clip * blocks[:, :, width], counts=blocks[:, :, -1]
    )
