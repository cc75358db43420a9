"""Profiles of a fleet's inputs and answers, also without one of its devices, to judge that one as a newcomer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from edge_client.protocol.nearest.answer_moments import AnswerMoments, AnswerProfile, make_answer_profile
from edge_client.protocol.nearest.input_moments import InputMoments, InputProfile, make_profile
from edge_client.protocol.task import I64


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
