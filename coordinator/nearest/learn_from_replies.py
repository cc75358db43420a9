"""The router of a federation, from its devices' answers to one probe: every center's loss, and the moments of inputs.

Every answer counts as one measurement of the median number of samples. A device's inputs are compared with those of all
other devices, as a device that never trained has contributed nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np

from coordinator.nearest.fit_router import CenterMeasurement, feature_baseline, learn_router
from coordinator.nearest.fleet_profiles import answer_profiles, distance_of, leave_one_out, make_profile
from coordinator.strategies.base import Replies
from edge_client.errors import Malformed
from edge_client.protocol.nearest.answer_moments import MAX_CLASSES, AnswerLook, AnswerMoments
from edge_client.protocol.nearest.input_moments import InputMoments
from edge_client.protocol.nearest.router import LocalRound, Router
from edge_client.protocol.task import I64, Array, ClientId

T = TypeVar("T")

MIN_MEASUREMENTS = 3  # devices behind a router
MAX_LOSS = 1e6  # that counts of a device; a larger one is taken as this one, so that limits stay finite
OUTLIER = 100.0  # times the fleet's median distance, at least 1: a device whose samples are so far away does not count;
# and times its median loss, at least that of guessing: a larger loss counts as this one
CAP = 0.9  # the quantile of the devices beyond which no device's distances decide which center is nearest
MIN_INPUTS = 3  # devices of a profile of inputs or answers; it would show too much of fewer


def look_of_a_device(loss: str, classes: int) -> frozenset[str]:
    """What the probe asks for, of a program with this loss and so many classes."""
    return frozenset(
        {"loss", "inputs"} | ({"answers"} if loss == "cross-entropy" and classes <= MAX_CLASSES else set())
    )


def same_features(parts: Mapping[str, InputMoments]) -> dict[str, InputMoments]:
    """Those of the devices that agree with most on the number of features."""
    counts = Counter(len(part.first) for part in parts.values())
    usual = max(counts, key=lambda features: (counts[features], features), default=0)
    return {name: part for name, part in parts.items() if len(part.first) == usual}


def learn_from_replies(
    replies: Replies,
    assignment: Mapping[ClientId, int],
    *,
    centers: int,
    round: LocalRound | None,  # noqa: A002 - the way's name
    signed: bool = False,
    guess: float = 0.0,
) -> Router:
    """Devices' answers with mean losses [centers] and moments, where they could give them -> the router.

    `signed`: a loss of the user's own, which may be below zero. `guess`: the loss of guessing, 0 if it is not known.
    """
    rows = [(c, reply.inputs, reply.answers) for c, reply in sorted(replies.items())]
    moments = same_features(_possible({c: inputs for c, inputs, _ in rows}, InputMoments.from_vector))
    moments, inputs_apart = _counted(moments, lambda some: _inputs_apart(some, centers), assignment)
    told = _possible(
        {c: answers for c, _, answers in rows}, lambda answers: [AnswerLook.from_vector(row) for row in answers]
    )
    told, answers_apart = _counted(told, lambda some: _answers_apart(some, assignment), assignment)
    typical = int(np.median([reply.n for reply in replies.values()]))
    losses = {c: cast("Array", reply.losses) for c, reply in sorted(replies.items())}
    most = _most([float(all_losses[assignment[c]]) for c, all_losses in losses.items()], guess)
    looks = []
    for device, c in enumerate(losses):
        distances: dict[str, Array] = {"loss": _bounded(losses[c], most, signed=signed)}
        if c in inputs_apart:
            distances["inputs"] = inputs_apart[c]
        if c in told:
            distances["entropy"] = np.array([look.entropy for look in told[c]])
        if c in answers_apart:
            distances["answers"] = answers_apart[c]
        looks.append(CenterMeasurement(device=device, n=typical, distances=distances, own_center=assignment[c]))
    router = learn_router(
        looks,
        sizes=[typical],
        centers=centers,
        round=round,
        inputs=make_profile(moments.values()) if moments else None,
        cap=CAP,
    )
    return replace(router, answers=answer_profiles(*_trained(told, assignment), least=MIN_INPUTS) if told else None)


def limits_from_tests(
    losses: Mapping[ClientId, float], *, samples: int, centers: int, signed: bool = False, guess: float = 0.0
) -> Router:
    """Each device's loss at its own center in the last test, of about so many samples -> limits of the loss alone.

    This needs nothing that devices have not sent. No rule is learned: the center of least loss is the nearest.
    """
    most = _most(list(losses.values()), guess)
    looks = [
        CenterMeasurement(
            device=device,
            n=samples,
            distances={"loss": _bounded(np.full(centers, loss), most, signed=signed)},
            own_center=0,
        )
        for device, (_, loss) in enumerate(sorted(losses.items()))
    ]
    return Router(centers=centers, sizes=(samples,), usual={"loss": feature_baseline("loss", [looks])}, ways={})


def _possible(told: Mapping[ClientId, Array | None], read: Callable[[Array], T]) -> dict[ClientId, T]:
    """What devices told, read.

    Without numbers that are not those of samples any more: cut to the samples that count, some are beyond the rounding.
    """
    found = {}
    for c, numbers in told.items():
        with suppress(Malformed):
            if numbers is not None:
                found[c] = read(numbers)
    return found


def _counted(
    told: dict[ClientId, T],
    apart: Callable[[Mapping[ClientId, T]], dict[ClientId, Array]],
    assignment: Mapping[ClientId, int],
) -> tuple[dict[ClientId, T], dict[ClientId, Array]]:
    """What devices told, and how far each is from the others under each center [K].

    Without those that are too far for that to be true: one of them would widen the profile and the limits until every
    input fits. Nothing where fewer than MIN_INPUTS are left.
    """
    found = apart(told) if len(told) >= MIN_INPUTS else {}
    own = {c: float(distances[assignment[c]]) for c, distances in found.items()}
    bound = OUTLIER * max(1.0, float(np.median([*own.values()] or [1.0])))
    if far := {c for c, distance in own.items() if distance > bound}:
        told = {c: one for c, one in told.items() if c not in far}
        found = apart(told) if len(told) >= MIN_INPUTS else {}
    return (told, found) if len(told) >= MIN_INPUTS else ({}, {})


def _inputs_apart(moments: Mapping[ClientId, InputMoments], centers: int) -> dict[ClientId, Array]:
    """From the profile of all other devices; the same under each center."""
    pairs = zip(moments.items(), leave_one_out(list(moments.values())), strict=True)
    return {c: np.full(centers, other.distance(mine)) for (c, mine), other in pairs if other is not None}


def _answers_apart(
    told: Mapping[ClientId, Sequence[AnswerLook]], assignment: Mapping[ClientId, int]
) -> dict[ClientId, Array]:
    """Under each center [K], from the profile of its other devices; of devices that have held-out samples."""
    answers, at = _trained(told, assignment)
    found = {}
    for i, (c, looks) in enumerate(told.items()):
        profiles = answer_profiles(answers, at, without=i, least=MIN_INPUTS)
        if profiles is not None and all(look.test.n for look in looks):
            pairs = zip(profiles, looks, strict=True)
            found[c] = np.array([distance_of(profile, look.test) for profile, look in pairs])
    return found


def _trained(
    told: Mapping[ClientId, Sequence[AnswerLook]], assignment: Mapping[ClientId, int]
) -> tuple[list[list[AnswerMoments]], I64]:
    """Of n devices: their answers on training samples, [n][K], and their centers [n]."""
    return [[look.train for look in looks] for looks in told.values()], np.array([assignment[c] for c in told])


def _most(own: Sequence[float], guess: float) -> float:
    """The greatest loss that counts, from the losses of devices at their own centers."""
    return min(MAX_LOSS, max(OUTLIER * float(np.median(np.abs(own))), guess) or MAX_LOSS)


def _bounded(losses: Array, most: float, *, signed: bool) -> Array:
    return np.clip(losses, -most if signed else 0.0, most)
