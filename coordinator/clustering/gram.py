"""The Gram matrix of a fleet's updates, one row per arriving update.

Rows are points [d], taken as differences to one pivot common to all (close to them: raw weights lose the digits that
tell clients apart). Products are summed in float64, by blocks of columns. Everything that k-means needs (distances,
centroids, objectives) lies in this matrix [n, n]; the points are not read again. Nothing here knows what a round is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_client.protocol.task import Array

F64 = NDArray[np.float64]
COLUMNS = 4_096  # products of so many columns are summed in the points' own precision, the blocks in float64


class Gram:
    """Grows by `add`; at most `capacity` points of the pivot's size."""

    def __init__(self, pivot: Array, capacity: int) -> None:
        self._pivot = pivot
        self._points = np.empty((capacity, pivot.size), dtype=pivot.dtype)
        self._matrix = np.zeros((capacity, capacity))
        self.n = 0

    def add(self, point: Array) -> int:
        """Take one point [d] and return its index."""
        if self.n == len(self._points):
            raise ValueError(f"room for {self.n} points only")
        index, self.n = self.n, self.n + 1
        self._points[index] = point - self._pivot
        row = np.zeros(self.n)
        for start in range(0, self._pivot.size, COLUMNS):
            block = self._points[: self.n, start : start + COLUMNS]
            row += block @ block[index]
        self._matrix[index, : self.n] = self._matrix[: self.n, index] = row
        return index

    @property
    def matrix(self) -> F64:
        """[n, n] symmetric inner products of the points so far, relative to the pivot; a copy."""
        return self._matrix[: self.n, : self.n].copy()


def gram(points: Array, pivot: Array | None = None) -> F64:
    """[n, d] points -> their Gram matrix [n, n] about `pivot` [d], or about their mean."""
    about = points.mean(axis=0, dtype=np.float64).astype(points.dtype) if pivot is None else pivot
    grown = Gram(about, len(points))
    for point in points:
        grown.add(point)
    return grown.matrix


def squared_distances(matrix: F64, a: Array, b: Array) -> F64:
    """Squared distances [len(a), len(b)] between the points with indices `a` and those with indices `b`."""
    norms = np.diag(matrix)
    distance: F64 = norms[a][:, None] + norms[b][None, :] - 2 * matrix[np.ix_(a, b)]
    return np.maximum(distance, 0.0)
