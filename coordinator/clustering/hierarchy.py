"""Hierarchical clustering by scipy: the bipartition with the least similar sides, and clusters below a distance.

Labels are numbered in the order of first appearance.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from coordinator.clustering.label_matching import canonical_labels
from edge_client.protocol.task import F64, I64, Array

# The setting's word -> scipy's, of a block of columns.
METRICS: dict[str, Any] = {"cosine": "cosine", "l2": "sqeuclidean", "l1": "cityblock"}
LINKAGES = ("single", "complete", "average", "ward")


def cosines(matrix: F64) -> F64:
    """Gram matrix [n, n] about zero -> cosines [n, n]; a point at zero has cosine 0 with all others."""
    length = np.sqrt(np.diag(matrix))
    safe = np.where(length > 0, length, 1.0)
    cosine: F64 = np.clip(matrix / safe[:, None] / safe[None, :], -1.0, 1.0)
    np.fill_diagonal(cosine, 1.0)
    return cosine


def bipartition(cosine: F64, linkage: str = "single") -> tuple[I64, float]:
    """[n, n] cosines, n >= 2 -> sides [n] of 0 and 1, and the greatest cosine between them (Sattler 2019, CFL).

    "single" has the least such cosine of all bipartitions, since the most similar points are joined first. "complete",
    as in the published code, prefers sides that agree within themselves.
    """
    from scipy.cluster.hierarchy import cut_tree
    from scipy.cluster.hierarchy import linkage as link
    from scipy.spatial.distance import squareform

    apart, method = squareform(1.0 - (cosine + cosine.T) / 2, checks=False), cast("Any", linkage)
    sides = canonical_labels(cut_tree(link(apart, method=method), n_clusters=[2])[:, 0].astype(np.int64))
    return sides, float(cosine[np.ix_(sides == 0, sides == 1)].max())


def condensed_distances(blocks: Iterable[Array], metric: str) -> F64:
    """Blocks [n, c] of the columns of n points -> their distances [n (n - 1) / 2], as scipy orders them.

    A point at zero has no direction: its cosine distance is 1.
    """
    from scipy.spatial.distance import pdist, squareform

    wide = (block.astype(np.float64) for block in blocks)
    if metric == "cosine":
        cosine = cosines(sum((block @ block.T for block in wide), np.zeros((1, 1))))
        return cast("F64", squareform(1.0 - (cosine + cosine.T) / 2, checks=False))
    apart = sum((pdist(block, METRICS[metric]) for block in wide), np.zeros(1))
    return np.sqrt(apart) if metric == "l2" else apart


def agglomerative(apart: F64, *, linkage: str, threshold: float) -> I64:
    """Distances of all pairs of n points -> labels [n]; clusters are joined while at most `threshold` apart."""
    from scipy.cluster.hierarchy import fcluster
    from scipy.cluster.hierarchy import linkage as link

    if not apart.size:
        return np.zeros(1, dtype=np.int64)
    tree = link(np.maximum(apart, 0.0), method=cast("Any", linkage))
    return canonical_labels(fcluster(tree, threshold, criterion="distance").astype(np.int64))
