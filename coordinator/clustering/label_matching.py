"""Numbering of clusters: by the old clusters that they continue, or in the order of first appearance."""

from __future__ import annotations

import numpy as np

from edge_client.protocol.task import I64, Array


def match_labels(distances: Array) -> I64:
    """Distances [n_old, n_new], n_new <= n_old -> the old cluster of each new one, one to one, of least total distance.

    Where each has one nearest, and no two the same, that is the only answer; else by the Hungarian method. Raises
    ValueError for another shape.
    """
    if distances.ndim != 2 or distances.shape[1] > distances.shape[0]:  # noqa: PLR2004 - a matrix
        raise ValueError(f"need as many old clusters as new ones, got {distances.shape}")
    least = distances.min(axis=0)
    nearest: I64 = distances.argmin(axis=0)
    alone = np.isfinite(least).all() and (distances == least).sum() == len(least)
    if alone and len(np.unique(nearest)) == len(nearest):
        return nearest
    from scipy.optimize import linear_sum_assignment

    new, old = linear_sum_assignment(distances.T)
    out = np.empty(distances.shape[1], dtype=np.int64)
    out[new] = old
    return out


def canonical_labels(labels: I64) -> I64:
    """[n] -> the same partition, numbered in the order of first appearance."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]
