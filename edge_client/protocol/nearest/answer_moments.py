"""Whether a model answers samples as it answers those of its own devices: moments of the scores of each class. Pure.

The scores (logits) of a sample count for the class that the model names. `AnswerMoments` holds the number of samples
and the sum of their scores for each named class, and one sum of the products of every two scores. Sums of devices add
up. An `AnswerProfile` is made of the sums of a center's devices: the mean scores of each class, and the inverse of the
covariance around them. The distance of other samples is the mean squared Mahalanobis length of their scores around the
mean of the class that is named; it needs no label. Lee et al. 2018, "A Simple Unified Framework for Detecting
Out-of-Distribution Samples and Adversarial Attacks", section 2.1, take hidden layers and the best class; a program
gives scores only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol.task import F64, Array

MAX_CLASSES = 32  # a profile has 2 C^2 numbers for each center; models of more classes have none
MIN_VARIANCE = 1e-9  # of the scores, on average
MAX_SCORE = 1e7  # of a mean; scores of a trained model are below some hundreds
ENTROPY_ROUNDING = 1e-3
ROUNDING = 1e-9  # of a variance, in parts of all mean squares together


@dataclass(frozen=True, kw_only=True)
class AnswerMoments:
    """Samples by named class: `counts` [C], sums of their scores `first` [C, C]; products of scores `second` [C, C]."""

    counts: F64
    first: F64
    second: F64

    def __add__(self, other: AnswerMoments) -> AnswerMoments:
        return AnswerMoments(
            counts=self.counts + other.counts, first=self.first + other.first, second=self.second + other.second
        )

    def __sub__(self, other: AnswerMoments) -> AnswerMoments:
        """The sums without those of `other`."""
        return AnswerMoments(
            counts=self.counts - other.counts, first=self.first - other.first, second=self.second - other.second
        )

    @property
    def n(self) -> float:
        """The number of samples."""
        return float(self.counts.sum())

    def at_most(self, n: float) -> AnswerMoments:
        """The same means of `n` samples at most."""
        share = min(1.0, n / max(self.n, 1.0))
        return AnswerMoments(counts=self.counts * share, first=self.first * share, second=self.second * share)

    def to_vector(self) -> F64:
        """[C + C^2 + C (C + 1) / 2]: the counts, `first` row by row, the upper triangle of `second` row by row."""
        upper = self.second[np.triu_indices(len(self.counts))]
        return np.concatenate([self.counts, self.first.ravel(), upper])

    @staticmethod
    def from_vector(values: Array, classes: int) -> AnswerMoments:
        """What `to_vector` wrote, from anyone. Raises Malformed."""
        if len(values) != vector_size(classes) or not np.isfinite(values).all():
            raise Malformed("bad_schema", f"moments of answers are {vector_size(classes)} finite numbers")
        counts, first, upper = np.split(np.asarray(values, np.float64), [classes, classes + classes**2])
        second = np.zeros((classes, classes))
        second[np.triu_indices(classes)] = upper
        second += np.triu(second, 1).T
        moments = AnswerMoments(counts=counts, first=first.reshape(classes, classes), second=second)
        if not moments.is_possible():
            raise Malformed("bad_schema", "no answers have these moments")
        return moments

    def is_possible(self) -> bool:
        """Whether samples could have these sums: no mean is too large, and no direction has a negative variance."""
        named = self.counts > 0
        if (self.counts < 0).any() or (self.counts >= 2**31).any() or self.first[~named].any():
            return False
        means = self.first / np.maximum(self.counts, 1e-12)[:, None]
        if np.abs(means).max() > MAX_SCORE or np.abs(self.second).max() > max(self.n, 1.0) * MAX_SCORE**2:
            return False
        within = self.second - (self.counts[:, None] * means).T @ means
        return bool(np.linalg.eigvalsh(within)[0] >= -ROUNDING * max(np.trace(self.second), 1.0))


@dataclass(frozen=True, kw_only=True)
class AnswerProfile:
    """A center's answers to its devices: `means` [C, C], a row of scores for each named class; `precision` [C, C]."""

    means: F64
    precision: F64

    def distance(self, logits: Array) -> float:
        """Scores [n, C] -> the mean over the samples of r' precision r / C, r from the mean of the named class."""
        apart = np.asarray(logits, np.float64) - self.means[np.argmax(logits, axis=-1)]
        return float(np.einsum("nc,cd,nd->n", apart, self.precision, apart).mean() / len(self.means))


@dataclass(frozen=True, kw_only=True)
class AnswerLook:
    """What a device tells of a center's answers: their mean entropy, and moments on training and held-out samples."""

    entropy: float
    train: AnswerMoments
    test: AnswerMoments

    def at_most(self, n: float) -> AnswerLook:
        """The same means of `n` samples at most, of either kind."""
        return AnswerLook(entropy=self.entropy, train=self.train.at_most(n), test=self.test.at_most(n))

    def to_vector(self) -> F64:
        """[1 + 2 (C + C^2 + C (C + 1) / 2)]: the entropy, the moments of training samples, those of held-out ones."""
        return np.concatenate([[self.entropy], self.train.to_vector(), self.test.to_vector()])

    @staticmethod
    def from_vector(values: Array) -> AnswerLook:
        """What `to_vector` wrote, from anyone. Raises Malformed."""
        size = (len(values) - 1) // 2
        classes = next((c for c in range(1, MAX_CLASSES + 1) if vector_size(c) == size), 0)
        if not classes or len(values) != 1 + 2 * size or not 0 <= values[0] <= np.log(classes) + ENTROPY_ROUNDING:
            raise Malformed("bad_schema", f"{len(values)} numbers are no moments of answers with their entropy")
        train, test = values[1 : 1 + size], values[1 + size :]
        return AnswerLook(
            entropy=float(values[0]),
            train=AnswerMoments.from_vector(train, classes),
            test=AnswerMoments.from_vector(test, classes),
        )


def vector_size(classes: int) -> int:
    """Numbers of the moments of a model of so many classes."""
    return classes + classes**2 + classes * (classes + 1) // 2


def answer_moments(logits: Array) -> AnswerMoments:
    """Scores [n, C] -> their sums."""
    scores = np.asarray(logits, np.float64)
    named = np.eye(scores.shape[-1])[scores.argmax(axis=-1)]
    return AnswerMoments(counts=named.sum(axis=0), first=named.T @ scores, second=scores.T @ scores)
