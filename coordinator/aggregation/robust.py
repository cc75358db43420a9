"""Reducers of one center's rows: the mean, and robust means that hold although some of the rows are hostile.

Rows are models of one center's devices, [m, p]; weights [m] are positive. A reducer works by column, each coordinate by
itself, or by row: it then gives every row one share and needs only the Gram matrix of the rows' differences to the
center. Only the mean counts samples. The others count a device by its responsibility, once where it has one center,
because a device's number of samples is only its own claim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from coordinator.clustering.trimmed_kmeans import left_out
from edge_client.errors import ConfigError
from edge_client.protocol.task import F64, Array, Flat

REDUCER_NAMES = ("mean", "trimmed-mean", "median", "norm-clip", "krum", "multi-krum", "geometric-median")
TRIMMED_REDUCERS = ("trimmed-mean", "krum", "multi-krum")  # those that use `trim`
_TIE = 1e-9  # scores this close are equal: they differ by the rounding of the Gram matrix
_MAX_STEPS = 200  # of Weiszfeld's algorithm; with fewer hostile than honest rows it settles within some dozens
_MOVE_TOLERANCE = 1e-12  # change of the shares
# Weiszfeld divides by no smaller distance, relative to how far row and point are from the old center. From these, the
# Gram matrix gives a distance that is right to 1.5e-8, the root of float64's rounding: below, rounding would decide.
_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True)
class Reducer:
    """One of REDUCER_NAMES; exactly one of the two functions is given.

    `columns`: rows [m, c] and weights [m] -> [c]. `shares`: Gram matrix [m, m] of the rows' differences to the center,
    and weights [m], -> shares [m] of these differences, so that the result is center + shares @ (rows - center).
    """

    columns: Callable[[Array, Array], Flat] | None = None
    shares: Callable[[F64, F64], F64] | None = None
    counts_samples: bool = False


def make_reducer(name: str, *, trim: float = 0.0) -> Reducer:
    """The reducer `name` of REDUCER_NAMES. `trim` is the share of the rows that may be hostile, below one half.

    "trimmed-mean" cuts it off at either end, and the two Krums leave it out: TRIMMED_REDUCERS use it. Raises
    ConfigError.

    >>> make_reducer("median").columns(np.array([[1.0], [2.0], [90.0]]), np.ones(3))
    array([2.])
    """
    if name not in REDUCER_NAMES:
        raise ConfigError(f"reduce is {name!r}", hint=f"use one of {', '.join(REDUCER_NAMES)}")
    if not 0 <= trim < 0.5:  # noqa: PLR2004 - a half leaves nothing
        raise ConfigError(f"{trim} is cut off at either end", hint="use at least 0 and less than 0.5")
    by_name = {
        "mean": MEAN_REDUCER,
        "trimmed-mean": Reducer(columns=partial(trimmed_mean, trim=trim)),
        "median": Reducer(columns=median),
        "norm-clip": Reducer(shares=norm_clip),
        "krum": Reducer(shares=partial(krum, trim=trim, several=False)),
        "multi-krum": Reducer(shares=partial(krum, trim=trim, several=True)),
        "geometric-median": Reducer(shares=geometric_median),
    }
    return by_name[name]


def weighted_mean(rows: Array, weights: Array) -> Flat:
    """[m, p] rows and [m] weights -> [p], in the rows' dtype."""
    mean: F64 = normalized_shares(np.asarray(weights)[:, None])[0] @ rows.astype(np.float64, copy=False)
    return mean.astype(rows.dtype)


MEAN_REDUCER = Reducer(columns=weighted_mean, counts_samples=True)


def normalized_shares(weights: Array) -> F64:
    """[m, K] weights -> [K, m] shares, each row adding up to one."""
    weight = np.ascontiguousarray(weights.T, dtype=np.float64)
    total = weight.sum(axis=1)
    if not np.isfinite(total).all() or (total <= 0).any() or (weight < 0).any():
        raise ValueError(f"weights must be non-negative with positive finite sums, got sums {total}")
    shares: F64 = weight / total[:, None]
    return shares


def trimmed_mean(rows: Array, weights: Array, *, trim: float) -> Flat:
    """[m, p] -> [p]: each coordinate's mean without the least and the greatest values (Yin et al. 2018, definition 2).

    At either end values are cut off while they weigh `trim` of all together, or less; with equal weights that is
    floor(trim m) of them, as in the paper. Fewer hostile rows than that leave it within the range of the honest ones.
    Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates".
    """
    if len(set(weights.tolist())) == 1:
        cut = left_out(trim, len(rows))
        kept = np.sort(rows, axis=0)[cut : len(rows) - cut] if cut else rows
        return weighted_mean(kept, np.ones(len(kept)))
    values, weight, before, through = _sorted(rows, weights)
    total = through[-1]
    weight = np.where((through <= trim * total) | (total - before <= trim * total), 0.0, weight)
    mean: Flat = ((weight * values).sum(axis=0) / weight.sum(axis=0)).astype(rows.dtype)
    return mean


def median(rows: Array, weights: Array) -> Flat:
    """[m, p] -> [p]: each coordinate's median, of the weight; breaks down at one half (Yin et al. 2018, definition 1).

    Where the weight divides exactly in two, the mean of the values at either side.
    """
    if len(set(weights.tolist())) == 1:
        middle: Flat = np.median(rows.astype(np.float64, copy=False), axis=0).astype(rows.dtype)
        return middle
    values, _, before, through = _sorted(rows, weights)
    half = through[-1] / 2
    low = np.take_along_axis(values, (through >= half).argmax(axis=0)[None], axis=0)[0]
    high = np.take_along_axis(values, (before <= half).cumsum(axis=0).argmax(axis=0)[None], axis=0)[0]
    between: Flat = ((low + high) / 2).astype(rows.dtype)
    return between


def _sorted(rows: Array, weights: Array) -> tuple[F64, F64, F64, F64]:
    """Each column's values in ascending order, their weights, and the weight before and through each, all [m, c]."""
    beside = np.broadcast_to(np.asarray(weights, dtype=np.float64)[:, None], rows.shape)
    order = np.lexsort((beside, rows), axis=0)  # by weight among equals, so that the rows' order does not matter
    weight = np.take_along_axis(beside, order, axis=0)
    through = weight.cumsum(axis=0)
    before = np.concatenate([np.zeros_like(through[:1]), through[:-1]])
    return np.take_along_axis(rows.astype(np.float64, copy=False), order, axis=0), weight, before, through


def norm_clip(gram: F64, weights: F64) -> F64:
    """The mean of the rows, each moved towards the center until it is at most as far as the median row.

    No row moves the center by more than its weight times an honest distance. Sun, Kairouz, Suresh and McMahan 2019,
    "Can You Really Backdoor Federated Learning?", section 4.2 (norm thresholding), with the median in place of their
    fixed bound M, so that it follows learning rate and progress.
    """
    far = np.sqrt(np.diag(gram).clip(0))
    bound = float(np.median(far))
    kept = np.minimum(1.0, np.divide(bound, far, out=np.ones_like(far), where=far > 0))
    shares: F64 = weights / weights.sum() * kept
    return shares


def krum(gram: F64, weights: F64, *, trim: float, several: bool) -> F64:
    """The row nearest to its m - f - 2 nearest neighbours, f = floor(trim m); `several`: the mean of the m - f best.

    Equal scores are all taken, so the result does not depend on an order; chosen rows count by their weights. Needs
    m > 2 f + 2 to promise anything. Blanchard, El Mhamdi, Guerraoui and Stainer 2017, "Machine Learning with
    Adversaries: Byzantine Tolerant Gradient Descent", sections 3 and 5.2 (Multi-Krum).
    """
    m = len(gram)
    if m == 1:
        return np.ones(1)
    hostile = left_out(trim, m)
    apart = _squared(gram)
    np.fill_diagonal(apart, np.inf)
    score = np.sort(apart, axis=1)[:, : max(1, m - hostile - 2)].sum(axis=1)
    worst = np.sort(score)[m - hostile - 1 if several else 0]
    chosen = np.where(score <= worst * (1 + _TIE), weights, 0.0)
    shares: F64 = chosen / chosen.sum()
    return shares


def geometric_median(gram: F64, weights: F64) -> F64:
    """The point with the least sum of distances to the rows, by the smoothed Weiszfeld algorithm; breaks down at half.

    Every iterate is a mean of the rows, so the matrix is all it needs. Pillutla, Kakade and Harchaoui 2022, "Robust
    Aggregation for Federated Learning" (RFA), algorithm 2.
    """
    weight: F64 = weights / weights.sum()
    shares, norms2 = weight, np.diag(gram)
    for _ in range(_MAX_STEPS):
        along = gram @ shares
        norm2 = max(float(shares @ along), np.finfo(np.float64).tiny)
        d2 = norms2 - 2 * along + norm2
        pulled = weight / np.sqrt(np.maximum(d2, _FLOOR**2 * (norms2 + norm2)))
        before, shares = shares, pulled / pulled.sum()
        if np.abs(shares - before).max() < _MOVE_TOLERANCE:
            break
    return shares


def _squared(gram: F64) -> F64:
    """[m, m] Gram matrix -> squared distances, symmetric to the last bit."""
    norms = np.diag(gram)
    apart: F64 = (norms[:, None] + norms - gram - gram.T).clip(0)
    return apart
