"""The Gram matrix of a fleet's updates, one row per arriving update: G_ij = (x_i - p) . (x_j - p).

Points x_i [d] are taken relative to one pivot p near all of them: inner products of raw weights lose the digits in
which clients differ. Products are summed in float64, by blocks of columns. Distances, centroids and objectives of
k-means follow from this matrix [n, n]; the points are not read again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from coordinator.clustering.backend import Backend, select_backend
from edge_client.errors import ConfigError
from edge_client.protocol.task import F64, I64, Array


class GramMatrix:
    """Grows by `add`; at most `capacity` points of the pivot's size.

    Arrivals are multiplied in blocks, since one by one each of them would read all points; smaller ones towards the
    end: when the last of `capacity` points arrives, only its own row is left to compute. Memory beyond the points,
    which go to a file where they are many (column_store.py): the matrix, capacity^2 float64. Raises ConfigError where
    this machine has no memory for it.
    """

    def __init__(self, pivot: Array, capacity: int, *, where: Backend | None = None) -> None:
        _require_memory(capacity)
        self._pivot, self.capacity = pivot, capacity
        self._points = (where or select_backend()).points(capacity, pivot.size, pivot.dtype)
        self._matrix = np.zeros((capacity, capacity))
        self._rows: list[int] = []  # of the matrix, in the order of arrival
        self._done = 0  # so many of them are known

    @property
    def n(self) -> int:
        """The number of points added."""
        return len(self._rows)

    def add(self, point: Array, *, at: int | None = None) -> int:
        """Take one point [d] and return its row in the matrix: `at`, which must be free, else the number of points.

        Raises ValueError beyond the capacity.
        """
        if self.n == self.capacity:
            raise ValueError(f"room for {self.n} points only")
        self._points.put(self.n, point - self._pivot)
        self._rows.append(self.n if at is None else at)
        if self.n - self._done >= min(self._points.together, self.capacity - self.n):
            self._multiply()
        return self._rows[-1]

    def grow(self, capacity: int) -> None:
        self._multiply()
        self._points.grow(capacity)
        self._matrix = np.pad(self._matrix, (0, capacity - self.capacity))
        self.capacity = capacity

    def submatrix(self, rows: I64) -> F64:
        """[m, m] inner products, relative to the pivot, of the points in these rows, in this order; not to be written.

        All rows in ascending order are returned without a copy.
        """
        self._multiply()
        if len(rows) == self.capacity and (rows == np.arange(self.capacity)).all():
            return self._matrix
        return self._matrix.take(rows, axis=0).take(rows, axis=1)

    @property
    def matrix(self) -> F64:
        """[n, n] symmetric inner products of the first n rows, relative to the pivot; a copy."""
        self._multiply()
        return self._matrix[: self.n, : self.n].copy()

    def _multiply(self) -> None:
        """Rows and columns of the points that came since the last time."""
        done, self._done = self._done, self.n
        if done < self.n:
            rows = self._points.inner_products(done, self.n)
            square = rows[:, done:]
            rows[:, done:] = np.tril(square) + np.tril(square, -1).T  # symmetric to the last bit
            new, every = np.array(self._rows[done:]), np.array(self._rows)
            self._matrix[np.ix_(new, every)] = rows
            self._matrix[np.ix_(every, new)] = rows.T


def _require_memory(points: int) -> None:
    needed, here = 8 * points**2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > here:
        raise ConfigError(
            f"to compare {points:,} models with each other takes {needed / 1e9:.0f} GB of {here / 1e9:.0f} here",
            hint="let fewer devices train in a round (fraction-train), or take a method that compares none, as ifca",
        )


class Points(Protocol):
    """Vectors [d], read one after another."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Array]: ...


def gram_matrix(points: Points, pivot: Array | None = None, *, where: Backend | None = None) -> F64:
    """Points [d] -> their Gram matrix [n, n] about `pivot` [d], or about their mean; then they are read twice."""
    grown = GramMatrix(mean_point(points) if pivot is None else pivot, len(points), where=where)
    for point in points:
        grown.add(point)
    return grown.matrix


def mean_point(points: Points) -> Array:
    """Points [d] -> [d], in their dtype."""
    total, dtype = np.zeros(1), np.dtype(np.float64)
    for point in points:
        total, dtype = total + point, point.dtype
    mean: Array = (total / len(points)).astype(dtype)
    return mean


def squared_distances(matrix: F64, a: Array, b: Array) -> F64:
    """Squared distances [len(a), len(b)] between the points with indices `a` and those with indices `b`."""
    norms = np.diag(matrix)
    distance: F64 = norms[a][:, None] + norms[b][None, :] - 2 * matrix[np.ix_(a, b)]
    return np.maximum(distance, 0.0)
