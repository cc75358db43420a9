"""The router of a federation, from its devices' answers to one probe: every center's loss, and the moments of inputs.

Every answer counts as one measurement of the median number of samples. A device's inputs are compared with those of all
other devices, as a device that never trained has contributed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np

from coordinator.nearest.fit_router import CenterMeasurement, feature_baseline, learn_router
from coordinator.strategies.base import Replies
from edge_client.protocol.nearest.answer_moments import MAX_CLASSES, AnswerLook, answer_profiles
from edge_client.protocol.nearest.input_moments import InputMoments, leave_one_out, make_profile, same_features
from edge_client.protocol.nearest.router import LocalRound, Router
from edge_client.protocol.task import Array, ClientId

MIN_MEASUREMENTS = 3  # devices behind a router
MAX_LOSS = 1e6  # that counts of a device; a larger one is taken as this one, so that limits stay finite
MIN_INPUTS = 3  # devices of a profile of inputs or answers; it would show too much of fewer


def look_of_a_device(loss: str, classes: int) -> frozenset[str]:
    """What the probe asks for, of a program with this loss and so many classes."""
    return frozenset(
        {"loss", "inputs"} | ({"answers"} if loss == "cross-entropy" and classes <= MAX_CLASSES else set())
    )


def learn_from_replies(
    replies: Replies,
    assignment: Mapping[ClientId, int],
    *,
    centers: int,
    round: LocalRound | None,  # noqa: A002 - the way's name
) -> Router:
    """Devices' answers with mean losses [centers] and moments, where they could give them -> the router."""
    moments = same_features(
        {c: InputMoments.from_vector(r.inputs) for c, r in sorted(replies.items()) if r.inputs is not None}
    )
    moments = moments if len(moments) >= MIN_INPUTS else {}
    others = dict(zip(moments, leave_one_out(list(moments.values())), strict=True))
    told = {
        c: [AnswerLook.from_vector(row) for row in r.answers]
        for c, r in sorted(replies.items())
        if r.answers is not None
    }
    told = told if len(told) >= MIN_INPUTS else {}
    answers, at = [[look.train for look in told[c]] for c in told], np.array([assignment[c] for c in told])
    numbers = {c: i for i, c in enumerate(told)}
    typical = int(np.median([reply.n for reply in replies.values()]))
    looks = []
    for device, (c, reply) in enumerate(sorted(replies.items())):
        distances: dict[str, Array] = {"loss": _bounded(cast("Array", reply.losses))}
        if (apart := others.get(c)) is not None:
            distances["inputs"] = np.full(centers, apart.distance(moments[c]))
        if c in told:
            distances["entropy"] = np.array([look.entropy for look in told[c]])
            profiles = answer_profiles(answers, at, without=numbers[c], least=MIN_INPUTS)
            if profiles is not None and all(look.test.n for look in told[c]):
                pairs = zip(profiles, told[c], strict=True)
                distances["answers"] = np.array([profile.distance_of(look.test) for profile, look in pairs])
        looks.append(CenterMeasurement(device=device, n=typical, distances=distances, own_center=assignment[c]))
    router = learn_router(
        looks,
        sizes=[typical],
        centers=centers,
        round=round,
        inputs=make_profile(moments.values()) if moments else None,
    )
    return replace(router, answers=answer_profiles(answers, at, least=MIN_INPUTS) if told else None)


def limits_from_tests(losses: Mapping[ClientId, float], *, samples: int, centers: int) -> Router:
    """Each device's loss at its own center in the last test, of about so many samples -> limits of the loss alone.

    This needs nothing that devices have not sent. No rule is learned: the center of least loss is the nearest.
    """
    looks = [
        CenterMeasurement(device=device, n=samples, distances={"loss": _bounded(np.full(centers, loss))}, own_center=0)
        for device, (_, loss) in enumerate(sorted(losses.items()))
    ]
    return Router(centers=centers, sizes=(samples,), usual={"loss": feature_baseline("loss", [looks])}, ways={})


def _bounded(losses: Array) -> Array:
    return np.clip(losses, 0.0, MAX_LOSS)
