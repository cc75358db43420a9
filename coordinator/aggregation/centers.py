"""Aggregation of updates into centers: c_k <- (1 - step) c_k + step * REDUCE_i ALIGN(w_i, c_k).

Rows are read one by one (rows.py): a mean needs one pass over them and the sums of its centers, a robust reducer a file
of them, by blocks of columns.

REDUCE is a reducer of robust.py; the mean weighs row i with R[i, k] a[i], a robust reducer with R[i, k]. Rows are
updates [m, p], columns of R [m, K] are centers. Sums are taken in float64; results have the centers' dtype.
Buffers (batch norm's running statistics, the last columns) are weighted by samples whatever the weights of the
parameters are, since a mean of means needs the numbers of samples behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from coordinator.aggregation.robust import MEAN_REDUCER, Reducer, normalized_shares
from coordinator.aggregation.rows import ColumnReader, Rows, column_blocks
from edge_client.protocol.task import F64, I64, Array, Flat

Align = Callable[[Array, Flat], Array]  # rows [m, p] and a center [p] -> the rows, as they are compared with it
COLUMN_BLOCK = 8_192  # so many are raised to float64 at a time, which stays in the cache
ROW_BLOCK = 16  # rows that are multiplied together
MEMORY_VALUES = 2**23  # of these rows: 32 MiB of float32


def aggregate(  # noqa: PLR0913 - the formula has these parts
    centers: Array,
    rows: Array | Rows,
    R: Array,
    a: Array,
    *,
    step: float = 1.0,
    reduce: Reducer = MEAN_REDUCER,
    align: Align | None = None,
    n_params: int | None = None,
    n: Array | None = None,
) -> Array:
    """New centers [K, p] from updates [m, p], responsibilities R [m, K], client weights a [m] and a step in (0, 1].

    With `n_params` and `n` [m], samples per device, the columns from `n_params` on are buffers: they are reduced in
    the same way, as rows of their own, with weights R[i, k] n[i] (or R[i, k]). A center whose weights sum to zero
    keeps its values; the inputs are not changed. Raises ValueError for shapes that do not match or another step.

    >>> aggregate(np.zeros((1, 2)), np.array([[1.0, 0.0], [4.0, 3.0]]), np.ones((2, 1)), np.array([2.0, 1.0]))
    array([[2., 1.]])
    """
    if not 0 < step <= 1:
        raise ValueError(f"step must be in (0, 1], got {step}")
    if R.shape != (len(rows), len(centers)) or a.shape != (len(rows),):
        raise ValueError(f"{len(rows)} updates, {len(centers)} centers, but R is {R.shape} and a is {a.shape}")
    border = centers.shape[1] if n_params is None else n_params
    used = (R * a[:, None]) != 0  # [m, K]; a far outlier with weight zero must not even be multiplied
    weights = (R * a[:, None], R * (a if n is None else n)[:, None]) if reduce.counts_samples else (R, R)
    spans = [(0, border), (border, centers.shape[1])]  # parameters, then buffers
    parts = [
        (span, np.where(used, weight, 0)) for span, weight in zip(spans, weights, strict=True) if span[0] < span[1]
    ]
    out, some, source = centers.copy(), np.flatnonzero(used.any(axis=0)), Rows.of(rows)
    apart = align is not None or reduce is not MEAN_REDUCER or not (used.sum(axis=1) > 1).any()
    for together in some[:, None] if apart else some[None]:
        mine, center = np.flatnonzero(used[:, together].any(axis=1)), centers[together[0]]
        own, by = source.select(mine), [(span, weight[mine][:, together]) for span, weight in parts]
        if align is not None:
            own = own.map(partial(_aligned, align, center))
        for block, reduced in _means(own, by) if reduce is MEAN_REDUCER else _reduced(own, center, by, reduce):
            for k, new in zip(together, reduced, strict=True):
                out[k, block] = (1 - step) * out[k, block] + step * new if step < 1 else new
    return out


def row_means(rows: Rows, weights: Array) -> F64:
    """The means [K, p] of rows [m, p] by weights [m, K], in float64."""
    means = np.empty((weights.shape[1], rows.width))
    for block, values in _means(rows, [((0, rows.width), weights)]):
        means[:, block] = values
    return means


Weights = list[tuple[tuple[int, int], Array]]  # spans of columns, and the weights [m, K] of the rows in them
Moved = Iterator[tuple[slice, Array]]  # blocks of columns, and the new values [K, c] in float64


def _means(rows: Rows, by: Weights) -> Moved:
    """The weighted means of the rows for K centers that share them; each row is read once, some of them at a time."""
    sums = np.zeros((by[0][1].shape[1], rows.width))
    shared = [(span, normalized_shares(weight)) for span, weight in by]
    blocks = [(block, shares) for span, shares in shared for block in column_blocks(*span, 1, COLUMN_BLOCK)]
    together = max(1, min(ROW_BLOCK, MEMORY_VALUES // max(rows.width, 1)))
    wide = np.empty((together, COLUMN_BLOCK))
    for start in range(0, len(rows), together):
        some = slice(start, min(start + together, len(rows)))
        read = [rows[i] for i in range(some.start, some.stop)]
        for block, shares in blocks:
            held = wide[: len(read), : block.stop - block.start]
            for into, row in zip(held, read, strict=True):
                into[:] = row[block]
            sums[:, block] += _products(shares[:, some], held)
        read.clear()  # before the next ones are read
    for block, _ in blocks:
        yield block, sums[:, block]


def _products(shares: F64, rows: F64) -> F64:
    """[K, m] shares of rows [m, c] -> their sums [K, c]; a row without a share must not even be multiplied."""
    with np.errstate(invalid="ignore"):  # infinity times zero gives NaN
        sums: F64 = shares @ rows
    if not np.isfinite(sums).all():
        sums = np.stack([share[share != 0] @ rows[share != 0] for share in shares])
    return sums


def _reduced(rows: Rows, center: Flat, by: Weights, reduce: Reducer) -> Moved:
    """The rows of one center, reduced robustly, by blocks of columns."""
    read = rows.by_columns()
    for (start, stop), weight in by:
        blocks = list(column_blocks(start, stop, len(rows), COLUMN_BLOCK))
        weights = weight[:, 0]
        if reduce.columns is not None:
            for block in blocks:
                yield block, reduce.columns(read(block).astype(np.float64, copy=False), weights)[None]
        elif reduce.shares is not None:
            yield from _shared(read, center, weights, blocks, reduce.shares)


def _shared(
    read: ColumnReader, center: Flat, weights: Array, blocks: list[slice], find: Callable[[F64, F64], F64]
) -> Moved:
    """The same where the reducer gives every row one share, which it finds from the Gram matrix."""
    gram = np.zeros((len(weights), len(weights)))
    for block in blocks:
        apart = read(block).astype(np.float64, copy=False) - center[block]
        gram += apart @ apart.T
    shares = find(gram, np.asarray(weights, dtype=np.float64))
    chosen = shares != 0
    for block in blocks:
        apart = read(block)[chosen].astype(np.float64, copy=False) - center[block]
        yield block, (center[block] + shares[chosen] @ apart)[None]


def _aligned(align: Align, center: Flat, row: Flat) -> Flat:
    aligned: Flat = align(row[None], center)[0]
    return aligned


def one_hot(labels: I64, k: int) -> F64:
    """[m] labels -> [m, k] hard responsibilities."""
    return np.eye(k)[labels]
