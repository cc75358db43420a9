"""Clustering by direction: cosines of points to the principal directions of all points (FedGroup) and to group means.

    cosine(x, v) = x . v / (|x| |v|)

A point at zero has no direction: its cosines are 0.
"""

from __future__ import annotations

import numpy as np

from coordinator.clustering.gram import Points
from edge_client.protocol.task import F64, I64, Array


def principal_cosines(matrix: F64, k: int) -> F64:
    """Gram matrix [n, n] about zero -> cosines [n, k] of the points to the first k right singular vectors of all.

    With X = U S V', the cosine of x_i and v_j is U_ij S_j / |x_i| (Duan 2021, decomposed cosine), and U S comes from
    X X' alone. Directions that the points do not have are zeros.
    """
    values, vectors = np.linalg.eigh(matrix)  # ascending
    scaled = (vectors * np.sqrt(np.maximum(values, 0.0)))[:, ::-1][:, :k]
    length = np.sqrt(np.maximum(np.diag(matrix), 0.0))[:, None]
    cosine: F64 = np.divide(scaled, length, out=np.zeros_like(scaled), where=length > 0)
    return np.pad(cosine, ((0, 0), (0, k - cosine.shape[1])))


def unit_means(points: Points, labels: I64, k: int) -> Array:
    """Points [d], n of them, and labels [n] -> [k, d] mean of the points of each label, of length one; in their dtype.

    Points count by direction only, and are read once. A label without points has a mean of zeros.
    """
    sums, dtype = np.zeros((k, 1)), np.dtype(np.float64)
    for point, label in zip(points, labels, strict=True):
        if sums.shape[1] != point.size:
            sums, dtype = np.zeros((k, point.size)), point.dtype
        sums[label] += _unit(point[None])[0]
    return _unit(sums).astype(dtype)


def assign_by_cosine(points: Array, means: Array) -> I64:
    """[n, d] points and [k, d] directions -> for each point the direction of greatest cosine, the first of equals."""
    labels: I64 = (_unit(points) @ _unit(means).T).argmax(axis=1)
    return labels


def _unit(rows: Array) -> F64:
    wide = rows.astype(np.float64, copy=False)
    length = np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
    unit: F64 = np.divide(wide, length, out=np.zeros_like(wide), where=length > 0)
    return unit
