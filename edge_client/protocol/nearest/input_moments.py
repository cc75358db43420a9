"""Whether inputs look like those of the fleet: means and covariances of a few features of each sample. Pure.

The features of a sample are arcsinh of its values, folded to `MAX_VALUES` numbers where it has more, and its lag-1
autocorrelation along each of its axes, which sees samples whose order in time is lost. A device sums them up in
`InputMoments`: one sum for each feature and one for each pair of features. Sums of devices add up. An `InputProfile` is
made of the sums of a fleet; the distance of other samples to it is their mean squared Mahalanobis length, which needs
no label and nearly ignores how frequent the classes are on a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import Malformed
from edge_client.protocol.task import F64, Array

MAX_VALUES = 64  # values of a sample; more are folded to so many
MAX_AXES = 4  # axes of a sample, its first ones, whose autocorrelation is a feature
MIN_AXIS = 3  # a shorter axis has no autocorrelation
MAX_FEATURES = MAX_VALUES + MAX_AXES
MIN_VARIANCE = 1e-9  # of the values of a sample
MAX_FEATURE = 1e7  # of a mean: arcsinh of a float32 is below 90, and a hundred thousand values may share a place
PART_VALUES = 1 << 18  # of samples
ROUNDING = 1e-9  # of a variance, in parts of all mean squares together


@dataclass(frozen=True, kw_only=True)
class InputMoments:
    """Sums over `n` samples: `first` [d] of the features, `second` [d, d] of their products."""

    n: int
    first: F64
    second: F64

    def __add__(self, other: InputMoments) -> InputMoments:
        return InputMoments(n=self.n + other.n, first=self.first + other.first, second=self.second + other.second)

    def __sub__(self, other: InputMoments) -> InputMoments:
        """The sums without those of `other`."""
        return InputMoments(n=self.n - other.n, first=self.first - other.first, second=self.second - other.second)

    def to_vector(self) -> F64:
        """[1 + d + d (d + 1) / 2]: n, the first sums, the upper triangle of the second ones row by row."""
        return np.concatenate([[self.n], self.first, self.second[np.triu_indices(len(self.first))]])

    @staticmethod
    def from_vector(values: Array) -> InputMoments:
        """What `to_vector` wrote, from anyone. Raises Malformed."""
        features = count_features(len(values))
        n = float(values[0])  # there is one: no number of features needs none
        if not np.isfinite(values).all() or not 1 <= n < 2**31 or n != int(n):
            raise Malformed("bad_schema", "the moments of inputs are finite numbers, after a number of samples")
        second = np.zeros((features, features))
        second[np.triu_indices(features)] = values[1 + features :]
        second += np.triu(second, 1).T
        moments = InputMoments(n=int(n), first=np.asarray(values[1 : 1 + features], np.float64), second=second)
        if not moments.is_possible():
            raise Malformed("bad_schema", "no samples have these moments")
        return moments

    def is_possible(self) -> bool:
        """Whether samples could have these sums: no mean is too large, and no direction has a negative variance."""
        mean, square = self.first / self.n, self.second / self.n
        if np.abs(mean).max() > MAX_FEATURE or np.abs(square).max() > MAX_FEATURE**2:
            return False
        least = np.linalg.eigvalsh(square - np.outer(mean, mean))[0]
        return bool(least >= -ROUNDING * np.trace(square))

    def at_most(self, n: int) -> InputMoments:
        """The same means of `n` samples at most."""
        if self.n <= n:
            return self
        return InputMoments(n=n, first=self.first * (n / self.n), second=self.second * (n / self.n))


@dataclass(frozen=True, kw_only=True)
class InputProfile:
    """Features of a fleet's inputs: `mean`, `spread` > 0 [d], `precision` [d, d], the inverse of their correlations."""

    mean: F64
    spread: F64
    precision: F64

    def distance(self, moments: InputMoments) -> float:
        """The mean over the samples of z' precision z / d, where z are their standardised features."""
        if moments.first.shape != self.mean.shape:
            raise Malformed("bad_field", f"inputs of {len(moments.first)} features, the run's have {len(self.mean)}")
        mean = moments.first / moments.n
        around = moments.second / moments.n - np.outer(mean, self.mean) - np.outer(self.mean, mean)
        around += np.outer(self.mean, self.mean)
        return max(0.0, float((self.precision * around / np.outer(self.spread, self.spread)).sum() / len(mean)))


def count_features(numbers: int) -> int:
    """Of so many numbers of a vector; raises Malformed where no number of features has so many."""
    features = int((np.sqrt(8 * numbers + 1) - 3) / 2)
    if not 1 <= features <= MAX_FEATURES or 1 + features + features * (features + 1) // 2 != numbers:
        raise Malformed("bad_schema", f"the moments of inputs cannot have {numbers} numbers")
    return features


def moments_of(x: Array) -> InputMoments:
    """Samples [n, ...] -> their sums, taken in parts: what one needs is ten times as large as it."""
    rows = max(1, PART_VALUES // math.prod(x.shape[1:]))
    first, *others = (_moments(x[at : at + rows]) for at in range(0, max(1, len(x)), rows))
    return sum(others, start=first)


def _moments(x: Array) -> InputMoments:
    features = input_features(x)
    return InputMoments(n=len(x), first=features.sum(axis=0), second=features.T @ features)


def input_features(x: Array) -> F64:
    """Samples [n, ...] -> [n, d]; see the module."""
    values = np.arcsinh(np.asarray(x, np.float64))
    return np.concatenate([_folded(values.reshape(len(x), -1)), *_autocorrelations(values)], axis=1)


def _folded(flat: F64) -> F64:
    """[n, p] -> [n, at most MAX_VALUES]: place and sign of column i are bits of a hash of i (PROTOCOL.md 12)."""
    p = flat.shape[1]
    if p <= MAX_VALUES:
        return flat
    mixed = _hash(np.arange(p, dtype=np.uint64))
    sign = np.where(mixed & np.uint64(1), 1.0, -1.0)
    place = (mixed >> np.uint64(1)) % np.uint64(MAX_VALUES)
    fold = np.zeros((p, MAX_VALUES))
    fold[np.arange(p), place.astype(np.int64)] = sign
    folded: F64 = flat @ fold
    return folded


def _hash(i: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Two rounds of multiplication modulo 2^32, as in murmur3's finaliser."""
    low = np.uint64(0xFFFFFFFF)
    mixed = (i * np.uint64(0x9E3779B1) + np.uint64(12345)) & low
    mixed = ((mixed ^ (mixed >> np.uint64(15))) * np.uint64(0x85EBCA77)) & low
    found: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(13))
    return found


def _autocorrelations(values: F64) -> list[F64]:
    """[n, ...] -> a column [n, 1] for each of the first axes that is long enough.

    It is the mean product of neighbours over the variance, both around the sample's mean.
    """
    every = tuple(range(1, values.ndim))
    around = values - values.mean(axis=every, keepdims=True)
    variance = np.square(around).mean(axis=every) + MIN_VARIANCE
    columns = []
    for axis in every[:MAX_AXES]:
        size = values.shape[axis]
        if size >= MIN_AXIS:
            products = np.take(around, range(size - 1), axis) * np.take(around, range(1, size), axis)
            columns.append((products.mean(axis=every) / variance)[:, None])
    return columns
