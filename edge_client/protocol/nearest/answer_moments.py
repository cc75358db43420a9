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

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from edge_client.protocol.task import F64, Array

MAX_CLASSES = 32  # a profile has 2 C^2 numbers for each center; models of more classes have none
SHRINKAGE = 0.01  # of the covariance towards a multiple of the identity: a class may be named a few times only
MIN_VARIANCE = 1e-9  # of the scores, on average


@dataclass(frozen=True, kw_only=True)
class AnswerMoments:
    """Samples by named class: `counts` [C], sums of their scores `first` [C, C]; products of scores `second` [C, C]."""

    counts: F64
    first: F64
    second: F64

    def __add__(self, other: AnswerMoments) -> AnswerMoments:
        """The sums over both."""
        return AnswerMoments(
            counts=self.counts + other.counts, first=self.first + other.first, second=self.second + other.second
        )

    def __sub__(self, other: AnswerMoments) -> AnswerMoments:
        """The sums without those of `other`."""
        return AnswerMoments(
            counts=self.counts - other.counts, first=self.first - other.first, second=self.second - other.second
        )


@dataclass(frozen=True, kw_only=True)
class AnswerProfile:
    """A center's answers to its devices: `means` [C, C], a row of scores for each named class; `precision` [C, C]."""

    means: F64
    precision: F64

    def distance(self, logits: Array) -> float:
        """Scores [n, C] -> the mean over the samples of r' precision r / C, r from the mean of the named class."""
        apart = np.asarray(logits, np.float64) - self.means[np.argmax(logits, axis=-1)]
        return float(np.einsum("nc,cd,nd->n", apart, self.precision, apart).mean() / len(self.means))


def answer_moments(logits: Array) -> AnswerMoments:
    """Scores [n, C] -> their sums."""
    scores = np.asarray(logits, np.float64)
    named = np.eye(scores.shape[-1])[scores.argmax(axis=-1)]
    return AnswerMoments(counts=named.sum(axis=0), first=named.T @ scores, second=scores.T @ scores)


def make_answer_profile(parts: Iterable[AnswerMoments]) -> AnswerProfile:
    """The profile of these devices, of at least one sample; a class that is never named has the mean of all scores."""
    first, *others = parts
    total = sum(others, start=first)
    classes, n = len(total.counts), max(1.0, float(total.counts.sum()))
    seen = np.maximum(total.counts, 1)[:, None]
    means = np.where(total.counts[:, None] > 0, total.first / seen, total.first.sum(axis=0) / n)
    within = (total.second - (total.counts[:, None] * means).T @ means) / n
    floor = SHRINKAGE * max(float(np.trace(within)) / classes, MIN_VARIANCE)
    precision: F64 = np.asarray(np.linalg.inv(within + floor * np.eye(classes)), np.float64)
    return AnswerProfile(means=means, precision=precision)
