"""Aggregation of updates into centers: c_k <- (1 - step) c_k + step * REDUCE_i ALIGN(w_i, c_k).

REDUCE is a reducer of robust.py; the mean weighs row i with R[i, k] a[i], a robust reducer with R[i, k]. Rows are
updates [m, p], columns of R [m, K] are centers. Sums are taken in float64; results have the centers' dtype.
Buffers (batch norm's running statistics, the last columns) are weighted by samples whatever the weights of the
parameters are, since a mean of means needs the numbers of samples behind them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.robust import MEAN_REDUCER, Reducer, normalized_shares, weighted_mean
from coordinator.clustering.backend import default_device, select_backend
from edge_client.protocol.task import F64, I64, Array, Flat

Align = Callable[[Array, Flat], Array]  # rows [m, p] and a center [p] -> the rows, as they are compared with it
COLUMN_BLOCK = 8_192  # so many are raised to float64 at a time; with hundreds of rows that stays in the cache


def aggregate(  # noqa: PLR0913 - the formula has these parts
    centers: Array,
    rows: Array,
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
    parts = [  # parameters, then buffers: blocks of columns and the weights of their rows
        (_blocks(0, border), weights[0]),
        (_blocks(border, centers.shape[1]), weights[1]),
    ]
    out, some = centers.copy(), np.flatnonzero(used.any(axis=0))
    if reduce is MEAN_REDUCER and align is None and some.size:
        for columns, by in ((block, by) for blocks, by in parts for block in blocks):
            out[some, columns] = _stepped(
                out[some, columns], _means(rows[:, columns], by[:, some], used[:, some]), step
            )
        return out
    for k in some:
        mine = rows[used[:, k]] if align is None else align(rows[used[:, k]], centers[k])
        for blocks, by in parts:
            for columns, reduced in _reduced(mine, centers[k], by[used[:, k], k], blocks, reduce):
                out[k, columns] = _stepped(out[k, columns], reduced, step)
    return out


def _reduced(
    rows: Array, center: Flat, weights: Array, blocks: list[slice], reduce: Reducer
) -> Iterator[tuple[slice, Flat]]:
    """[m, p] rows of one center -> each block of columns and its reduced values, in float64."""
    if reduce.columns is not None:
        yield from ((block, reduce.columns(rows[:, block].astype(np.float64, copy=False), weights)) for block in blocks)
    elif reduce.shares is not None and blocks:
        gram = np.zeros((len(rows), len(rows)))
        for block in blocks:
            apart = rows[:, block].astype(np.float64, copy=False) - center[block]
            gram += apart @ apart.T
        shares = reduce.shares(gram, np.asarray(weights, dtype=np.float64))
        chosen = shares != 0
        for block in blocks:
            apart = rows[chosen, block].astype(np.float64, copy=False) - center[block]
            yield block, center[block] + shares[chosen] @ apart


def _means(rows: Array, weights: Array, used: NDArray[np.bool_]) -> F64:
    """[m, c] rows and [m, K] weights -> [K, c] weighted means in float64, each of the rows that it has `used` [m, K].

    Where centers share rows, or on CUDA, all of them are one product. With hard labels each row is raised to float64
    and read once either way, and the product would multiply it by K - 1 zeros.
    """
    if default_device() == "cuda" or np.count_nonzero(used) > len(used):
        shared = used.any(axis=1)
        block = rows if shared.all() else rows[shared]
        with np.errstate(invalid="ignore"):  # infinity times zero gives NaN, which is checked below
            means = select_backend().sums(normalized_shares(weights[shared]), block)
        if np.isfinite(means).all():
            return means
    own = ((rows[mine].astype(np.float64, copy=False), weights[mine, k]) for k, mine in enumerate(used.T))
    return np.stack([weighted_mean(block, by) for block, by in own])


def _stepped(old: Array, new: Array, step: float) -> Array:
    return (1 - step) * old + step * new if step < 1 else new


def one_hot(labels: I64, k: int) -> F64:
    """[m] labels -> [m, k] hard responsibilities."""
    return np.eye(k)[labels]


def _blocks(start: int, end: int) -> list[slice]:
    edges = [*range(start, end, COLUMN_BLOCK), end]
    return [slice(left, right) for left, right in itertools.pairwise(edges)]
