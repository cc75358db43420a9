"""The clustering's matrix products on the CPU, by numpy.

Points [n, d] are multiplied in tiles of 16 rows by 2,048 columns, in the points' own precision; the tiles' products are
added in float64, column block by column block. The product of two points has the same bits in whatever order they
arrive: only row counts are used for which the BLAS library was seen to repeat itself, and float64 where there are none.
Tiles are so small that OpenBLAS multiplies them without packing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from coordinator.clustering.column_store import ColumnStore
from edge_client.protocol.task import F64, I64, Array

TILE_ROWS = 16  # with COLUMN_BLOCK below OpenBLAS's bound of 10^6 for small products
COLUMN_BLOCK = 2_048  # columns whose products are summed in the points' own precision
READ_ROWS = 64 * TILE_ROWS  # of a block of columns that is read at a time, 8 MiB of float32


class NumpyPoints:
    """Rows in tiles, in a file where they are many. Memory beyond them: a block of columns and the products asked for.

    Rows are read again for each `together` of arrivals, so these are more where the rows are in a file.
    """

    def __init__(self, capacity: int, width: int, dtype: np.dtype[np.generic]) -> None:
        self._counts, self._wide = reproducible_row_counts(dtype) or (TILE_ROWS,), not reproducible_row_counts(dtype)
        self._rows = ColumnStore(_padded(capacity), width, dtype)

    @property
    def together(self) -> int:
        return TILE_ROWS * (4 if self._rows.in_file else 1)

    def put(self, index: int, row: Array) -> None:
        self._rows.put(index, row)

    def grow(self, capacity: int) -> None:
        self._rows = self._rows.grown(_padded(capacity))

    def inner_products(self, start: int, stop: int) -> F64:
        """Inner products [stop - start, stop]; at most 16 rows in a product, and as many as the library can repeat."""
        groups = list(self._groups(start, stop))
        out = np.empty((stop - start, stop))
        totals = [np.zeros((_padded(stop) // TILE_ROWS, last - first, TILE_ROWS)) for first, last in groups]
        for left in range(0, self._rows.width, COLUMN_BLOCK):
            right = min(left + COLUMN_BLOCK, self._rows.width)
            mine = [self._rows.columns(left, right, first=first, last=last) for first, last in groups]
            for top in range(0, _padded(stop), READ_ROWS):
                below = min(top + READ_ROWS, _padded(stop))
                block = self._rows.columns(left, right, first=top, last=below)
                tiles = block.reshape(-1, TILE_ROWS, right - left)
                for rows, total in zip(mine, totals, strict=True):
                    total[top // TILE_ROWS : below // TILE_ROWS] += _product(rows, tiles, wide=self._wide)
        for (first, last), total in zip(groups, totals, strict=True):
            rows = total.transpose(1, 0, 2).reshape(last - first, -1)[:, :stop]
            begin, end = max(first, start), min(last, stop)
            out[begin - start : end - start] = rows[begin - first : end - first]
        return out

    def _groups(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The rows of each product; together they cover start..stop, and may go beyond it."""
        while start < stop:
            count = max([m for m in self._counts if m <= stop - start], default=min(self._counts))
            low = max(0, min(start, self._rows.capacity - count))
            yield low, low + count
            start = low + count


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
