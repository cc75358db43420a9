"""Reducing updates to centers: c_k <- (1 - step) c_k + step * mean of its updates, weighted by R[i, k] a[i].

Rows are updates [m, p], columns of R [m, K] are centers. Sums are taken in float64; results have the centers' dtype.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_client.protocol.task import Array, Flat


def weighted_mean(rows: Array, weights: Array) -> Flat:
    """[m, p] rows and [m] weights -> [p], in the rows' dtype."""
    weight = np.asarray(weights, dtype=np.float64)
    total = float(weight.sum())
    if not np.isfinite(total) or total <= 0 or (weight < 0).any():
        raise ValueError(f"weights must be non-negative with a positive finite sum, got sum {total}")
    mean: NDArray[np.float64] = (weight / total) @ rows.astype(np.float64, copy=False)
    return mean.astype(rows.dtype)


def aggregate(centers: Array, rows: Array, R: Array, a: Array, *, step: float = 1.0) -> Array:
    """New centers [K, p] from updates [m, p], responsibilities R [m, K], client weights a [m] and a step in (0, 1].

    A center whose weights sum to zero keeps its values; the inputs are left as they were.
    """
    if not 0 < step <= 1:
        raise ValueError(f"step must be in (0, 1], got {step}")
    if R.shape != (len(rows), len(centers)) or a.shape != (len(rows),):
        raise ValueError(f"{len(rows)} updates, {len(centers)} centers, but R is {R.shape} and a is {a.shape}")
    out = centers.copy()
    for k in range(len(centers)):
        weight = R[:, k] * a
        if weight.any():
            chosen = weight != 0  # a far outlier with weight zero must not even be multiplied
            mean = weighted_mean(rows[chosen].astype(np.float64, copy=False), weight[chosen])
            out[k] = (1 - step) * out[k] + step * mean if step < 1 else mean
    return out


def one_hot(labels: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    """[m] labels -> [m, k] hard responsibilities."""
    return np.eye(k)[labels]
