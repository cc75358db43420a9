"""Reducing updates to centers: c_k <- (1 - step) c_k + step * REDUCE_i ALIGN(w_i, c_k), weighted by R[i, k] a[i].

Rows are updates [m, p], columns of R [m, K] are centers. Sums are taken in float64; results have the centers' dtype.
Buffers (batch norm's running statistics, the last columns) are counted by samples, however a method weighs its
parameters: a mean of means is one only with the numbers behind it. Knows no device and no method.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coordinator.clustering.backend import backend, best
from edge_client.errors import ConfigError
from edge_client.protocol.task import Array, Flat

Reduce = Callable[[Array, Array], Flat]  # rows [m, p] and their positive weights [m] -> [p]
Align = Callable[[Array, Flat], Array]  # rows [m, p] and a center [p] -> the rows, as they are compared with it
REDUCES = ("mean", "trimmed-mean", "median")
COLUMNS = 8_192  # so many are raised to float64 at a time; with hundreds of rows that stays in the cache


def weighted_mean(rows: Array, weights: Array) -> Flat:
    """[m, p] rows and [m] weights -> [p], in the rows' dtype."""
    mean: NDArray[np.float64] = _shares(np.asarray(weights)[:, None])[0] @ rows.astype(np.float64, copy=False)
    return mean.astype(rows.dtype)


def _shares(weights: Array) -> NDArray[np.float64]:
    """[m, K] weights -> [K, m] shares, each row adding up to one."""
    weight = np.ascontiguousarray(weights.T, dtype=np.float64)
    total = weight.sum(axis=1)
    if not np.isfinite(total).all() or (total <= 0).any() or (weight < 0).any():
        raise ValueError(f"weights must be non-negative with positive finite sums, got sums {total}")
    shares: NDArray[np.float64] = weight / total[:, None]
    return shares


def trimmed_mean(rows: Array, weights: Array, *, trim: float) -> Flat:
    """[m, p] -> [p]: each coordinate's mean without its floor(trim m) least and as many greatest values (Yin 2018).

    Everybody counts the same, whatever the weights: a number of samples is only what a device says of itself.
    """
    cut = int(trim * len(rows))
    kept = np.sort(rows, axis=0)[cut : len(rows) - cut] if cut else rows
    return weighted_mean(kept, np.ones_like(weights, shape=len(kept)))


def median(rows: Array, weights: Array) -> Flat:  # noqa: ARG001 - as trimmed_mean
    """[m, p] -> [p]: each coordinate's median, for which everybody counts the same."""
    middle: Flat = np.median(rows.astype(np.float64, copy=False), axis=0).astype(rows.dtype)
    return middle


def reducer(name: str, *, trim: float = 0.0) -> Reduce:
    """One of REDUCES by name; `trim` is the share cut off at either end by "trimmed-mean", below one half."""
    if name not in REDUCES:
        raise ConfigError(f"reduce is {name!r}", hint=f"use one of {', '.join(REDUCES)}")
    if not 0 <= trim < 0.5:  # noqa: PLR2004 - a half leaves nothing
        raise ConfigError(f"{trim} is cut off at either end", hint="use at least 0 and less than 0.5")
    by_name: dict[str, Reduce] = {
        "mean": weighted_mean,
        "trimmed-mean": partial(trimmed_mean, trim=trim),
        "median": median,
    }
    return by_name[name]


def aggregate(  # noqa: PLR0913 - the formula has these parts
    centers: Array,
    rows: Array,
    R: Array,
    a: Array,
    *,
    step: float = 1.0,
    reduce: Reduce = weighted_mean,
    align: Align | None = None,
    n_params: int | None = None,
    n: Array | None = None,
) -> Array:
    """New centers [K, p] from updates [m, p], responsibilities R [m, K], client weights a [m] and a step in (0, 1].

    With `n_params` and `n` [m], samples per device, the columns from `n_params` on are buffers: they are reduced in
    the same way with weights R[i, k] n[i]. A center whose weights sum to zero keeps its
    values; the inputs are left as they were.
    """
    if not 0 < step <= 1:
        raise ValueError(f"step must be in (0, 1], got {step}")
    if R.shape != (len(rows), len(centers)) or a.shape != (len(rows),):
        raise ValueError(f"{len(rows)} updates, {len(centers)} centers, but R is {R.shape} and a is {a.shape}")
    border = centers.shape[1] if n_params is None else n_params
    weights = R * a[:, None], R * (a if n is None else n)[:, None]  # of parameters, of buffers
    blocks = [(columns, weights[columns.start >= border]) for columns in _blocks(border, centers.shape[1])]
    used = weights[0] != 0  # [m, K]; a far outlier with weight zero must not even be multiplied
    out, some = centers.copy(), np.flatnonzero(used.any(axis=0))
    if reduce is weighted_mean and align is None and some.size:
        for columns, by in blocks:
            out[some, columns] = _stepped(
                out[some, columns], _means(rows[:, columns], by[:, some], used[:, some]), step
            )
        return out
    for k in some:
        mine = rows[used[:, k]] if align is None else align(rows[used[:, k]], centers[k])
        for columns, by in blocks:
            reduced = reduce(mine[:, columns].astype(np.float64, copy=False), by[used[:, k], k])
            out[k, columns] = _stepped(out[k, columns], reduced, step)
    return out


def _means(rows: Array, weights: Array, used: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[m, c] rows and [m, K] weights -> [K, c] weighted means in float64, each of the rows that it has `used` [m, K].

    Where centers share rows, or on CUDA, all of them are one product. With hard labels each row is raised to float64
    and read once either way, and the product would multiply it by K - 1 zeros.
    """
    if best() == "cuda" or np.count_nonzero(used) > len(used):
        shared = used.any(axis=1)
        block = rows if shared.all() else rows[shared]
        with np.errstate(invalid="ignore"):  # somebody's infinity times zero: found below
            means = backend().sums(_shares(weights[shared]), block)
        if np.isfinite(means).all():
            return means
    own = ((rows[mine].astype(np.float64, copy=False), weights[mine, k]) for k, mine in enumerate(used.T))
    return np.stack([weighted_mean(block, by) for block, by in own])


def _stepped(old: Array, new: Array, step: float) -> Array:
    return (1 - step) * old + step * new if step < 1 else new


def one_hot(labels: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    """[m] labels -> [m, k] hard responsibilities."""
    return np.eye(k)[labels]


def _blocks(border: int, size: int) -> list[slice]:
    """Columns 0..size in blocks of COLUMNS at most, none of which holds columns from both sides of `border`."""
    edges = sorted({*range(0, border, COLUMNS), *range(border, size, COLUMNS), size})
    return [slice(start, end) for start, end in itertools.pairwise(edges)]
