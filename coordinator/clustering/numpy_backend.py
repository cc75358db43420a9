"""The clustering's matrix products on the CPU, by numpy.

Points [n, d] are multiplied in tiles of 16 rows by 2,048 columns, in the points' own precision; the tiles' products are
added in float64, column block by column block. The product of two points has the same bits in whatever order they
arrive: only row counts are used for which the BLAS library was seen to repeat itself, and float64 where there are none.
Tiles are so small that OpenBLAS multiplies them without packing.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from edge_client.protocol.task import F64, I64, Array

TILE_ROWS = 16  # with COLUMN_BLOCK below OpenBLAS's bound of 10^6 for small products
COLUMN_BLOCK = 2_048  # columns whose products are summed in the points' own precision


class NumpyPoints:
    """Rows in memory, in tiles. Memory beyond the rows: one [16, n] product at a time."""

    def __init__(self, capacity: int, width: int, dtype: np.dtype[np.generic]) -> None:
        self._counts, self._wide = reproducible_row_counts(dtype) or (TILE_ROWS,), not reproducible_row_counts(dtype)
        self._rows = np.zeros((_padded(capacity), width), dtype=dtype)  # pages are taken when they are written

    def put(self, index: int, row: Array) -> None:
        self._rows[index] = row

    def grow(self, capacity: int) -> None:
        rows = np.zeros((_padded(capacity), self._rows.shape[1]), dtype=self._rows.dtype)
        rows[: len(self._rows)] = self._rows
        self._rows = rows

    def inner_products(self, start: int, stop: int) -> F64:
        """Inner products [stop - start, stop]; at most 16 rows at a time, and as many as the library can repeat."""
        out, first = np.empty((stop - start, stop)), start
        while first < stop:
            count = max([m for m in self._counts if m <= stop - first], default=min(self._counts))
            low = max(0, min(first, len(self._rows) - count))
            last = min(low + count, stop)
            out[first - start : last - start] = self._some(low, low + count, stop)[first - low : last - low]
            first = last
        return out

    def _some(self, first: int, last: int, stop: int) -> F64:
        """[last - first, stop] for at most 16 rows."""
        tiles, width = -(-stop // TILE_ROWS), self._rows.shape[1]
        grouped = self._rows[: tiles * TILE_ROWS].reshape(tiles, TILE_ROWS, width)
        total = np.zeros((tiles, last - first, TILE_ROWS))
        for start in range(0, width, COLUMN_BLOCK):
            columns = slice(start, start + COLUMN_BLOCK)
            total += _product(self._rows[first:last, columns], grouped[:, :, columns], wide=self._wide)
        return total.transpose(1, 0, 2).reshape(last - first, tiles * TILE_ROWS)[:, :stop]


def _product(left: Array, tiles: Array, *, wide: bool) -> Array:
    """[m, c] and [t, 16, c] -> [t, m, 16]. The left is copied: numpy has a routine of its own for x @ x.T of one x."""
    dtype = np.float64 if wide else left.dtype
    product: Array = np.matmul(left.astype(dtype), tiles.astype(dtype, copy=False).swapaxes(1, 2))
    return product


@lru_cache
def reproducible_row_counts(dtype: np.dtype[np.generic]) -> tuple[int, ...]:
    """The row counts of a product for which two rows' inner product has the same bits at each place.

    OpenBLAS adds in another order at the edges of its kernels, which differ from processor to processor, so the counts
    are found by trial. Empty if no count repeats.
    """
    rng, good = np.random.default_rng(0), list[int]()
    cases = [rng.standard_normal((2, TILE_ROWS, c)).astype(dtype) for c in (COLUMN_BLOCK, 650, 20)]
    for count in (16, 12, 8, 4, 2):
        if all(_repeats(x, y, count, good[0] if good else count) for x, y in cases):
            good.append(count)
    return tuple(good)


def _repeats(x: Array, y: Array, count: int, reference: int) -> bool:
    """Whether products of `count` rows of x or y equal those of `reference` rows of x, wherever the rows stand."""
    parts = [
        _product(np.roll(x, -i, axis=0)[:reference], y[None], wide=False)[0] for i in range(0, TILE_ROWS, reference)
    ]
    known = np.concatenate(parts)[:TILE_ROWS]
    return all(
        (
            _product(np.roll(left, by, axis=0)[:count], right[None], wide=False)[0] == np.roll(out, by, axis=0)[:count]
        ).all()
        for left, right, out in ((x, y, known), (y, x, known.T))
        for by in (0, 1, 5, 12)
    )


def _padded(rows: int) -> int:
    return -(-max(rows, 1) // TILE_ROWS) * TILE_ROWS


class NumpyProducts:
    """A matrix in memory."""

    def __init__(self, matrix: F64) -> None:
        self._matrix = matrix

    def rows(self, index: I64) -> F64:
        return self._matrix[index]

    def multiply(self, left: F64, index: I64 | None = None) -> F64:
        product: F64 = left @ (self._matrix if index is None else self._matrix[index])
        return product


class NumpyBackend:
    """The backend of the CPU."""

    def points(self, capacity: int, width: int, dtype: np.dtype[np.generic]) -> NumpyPoints:
        return NumpyPoints(capacity, width, dtype)

    def products(self, matrix: F64) -> NumpyProducts:
        return NumpyProducts(matrix)

    def sums(self, weights: F64, rows: Array) -> F64:
        total: F64 = weights @ rows.astype(np.float64, copy=False)
        return total
