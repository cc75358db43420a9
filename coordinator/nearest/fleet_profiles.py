"""Profiles of a fleet's inputs and answers, also without one of its devices, to judge that one as a newcomer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from edge_client.protocol.nearest.answer_moments import MIN_VARIANCE, AnswerMoments, AnswerProfile
from edge_client.protocol.nearest.input_moments import InputMoments, InputProfile
from edge_client.protocol.task import F64, I64

SHRINKAGE = 0.002  # of the correlations towards 0; more would hide values that always add up to the same sum
VARIANCE_FLOOR = 0.001  # of the mean variance of the features, added to each: a pixel may be empty in a small fleet
MIN_SPREAD = 1e-6  # of a feature
ANSWER_SHRINKAGE = 0.01  # of the covariance towards a multiple of the identity: a class may be named a few times only


def leave_one_out(parts: Sequence[InputMoments]) -> list[InputProfile | None]:
    """For each device the profile of all others, as one that never trained has added nothing; None of one device."""
    if len(parts) < 2:  # noqa: PLR2004 - a device and another
        return [None for _ in parts]
    first, *others = parts
    total = sum(others, start=first)
    return [make_profile([total - one]) for one in parts]


def answer_profiles(
    answers: Sequence[Sequence[AnswerMoments]],
    at: I64,
    *,
    without: int | None = None,
    least: int = 1,
) -> list[AnswerProfile] | None:
    """Of each center, from moments of n devices under each of K centers, [n][K], and the devices' centers `at` [n].

    A center of fewer than `least` devices, or with none but `without`, has the profile of all. None of one device.
    """
    if len(answers) < 2:  # noqa: PLR2004 - a device and another
        return None
    others = [i for i in range(len(answers)) if i != without]
    profiles = []
    for k in range(len(answers[0])):
        own = [i for i in others if at[i] == k] if int((at == k).sum()) >= least else []
        profiles.append(make_answer_profile(answers[i][k] for i in own or others))
    return profiles


def make_profile(parts: Iterable[InputMoments]) -> InputProfile:
    """The profile of all these devices; at least one."""
    first, *others = parts
    total = sum(others, start=first)
    mean = total.first / total.n
    covariance = total.second / total.n - np.outer(mean, mean)
    variance = np.maximum(np.diag(covariance), 0.0)
    spread = np.sqrt(np.maximum(variance + VARIANCE_FLOOR * variance.mean(), MIN_SPREAD**2))
    correlation = (1 - SHRINKAGE) * covariance / np.outer(spread, spread)
    np.fill_diagonal(correlation, 1.0)
    precision: F64 = np.asarray(np.linalg.inv(correlation), np.float64)
    return InputProfile(mean=mean, spread=spread, precision=precision)


def make_answer_profile(parts: Iterable[AnswerMoments]) -> AnswerProfile:
    """The profile of these devices, of at least one sample; a class that is never named has the mean of all scores."""
    first, *others = parts
    total = sum(others, start=first)
    classes, n = len(total.counts), max(1.0, float(total.counts.sum()))
    seen = np.maximum(total.counts, 1)[:, None]
    means = np.where(total.counts[:, None] > 0, total.first / seen, total.first.sum(axis=0) / n)
    within = (total.second - (total.counts[:, None] * means).T @ means) / n
    floor = ANSWER_SHRINKAGE * max(float(np.trace(within)) / classes, MIN_VARIANCE)
    precision: F64 = np.asarray(np.linalg.inv(within + floor * np.eye(classes)), np.float64)
    return AnswerProfile(means=means, precision=precision)


def distance_of(profile: AnswerProfile, moments: AnswerMoments) -> float:
    """The distance to a profile of samples of which only the moments are known."""
    cross = moments.first.T @ profile.means
    around = moments.second - cross - cross.T + (profile.means.T * moments.counts) @ profile.means
    return max(0.0, float((profile.precision * around).sum() / (max(moments.n, 1.0) * len(profile.means))))
