"""The router of an emulated run: the devices measure every center, and coordinator/nearest/fit_router.py fits.

The centers' sketches are made of training samples. The measurements use test samples, since a center fits its devices'
training samples better than those of a newcomer. A device's own contribution is subtracted from its center's sketch
and from the moments of the fleet's inputs before its own inputs are compared with them, as a newcomer has contributed
nothing; so all of its samples serve for that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from coordinator.nearest.fit_router import LARGEST_LIMIT, CenterMeasurement, learn_router, local_round_of
from coordinator.nearest.fleet_profiles import answer_profiles, leave_one_out, make_profile
from coordinator.strategies.common.local_sgd import LocalSgd
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import Malformed
from edge_client.nearest import features
from edge_client.protocol.nearest import selection_rule, sketch
from edge_client.protocol.nearest.answer_moments import (
    MAX_CLASSES,
    AnswerMoments,
    answer_moments,
)
from edge_client.protocol.nearest.input_moments import InputProfile, moments_of
from edge_client.protocol.nearest.router import InputSketch, LocalRound, Router
from edge_client.protocol.task import F64, I64, Array, ClientId, Flat
from edge_client.training.learner import Learner

log = logging.getLogger(__name__)
MEASUREMENTS_BY_SIZE = {1: 3, 5: 2, 20: 2, 100: 1}  # samples of a look: how many looks a device takes
MAX_SKETCHED_DEVICES, MAX_MEASURING_DEVICES = 64, 40  # devices whose samples are sketched, and of these who look
MAX_ANSWER_SAMPLES = 256  # samples of a device for the profile of each center's answers
MAX_WIDTH_SAMPLES = 40  # samples of a device for the width of the sketch, and the number of devices that give some
SEED = 1


@dataclass(frozen=True, kw_only=True)
class FinishedTraining:
    """A run that has ended: the common start, its K centers, and who is assigned to which."""

    learner: Learner
    method: LocalSgd
    start: Flat
    centers: Sequence[Flat]
    assignment: Mapping[ClientId, int]
    devices: Mapping[ClientId, DeviceData]


def fit_router(run: FinishedTraining, *, seed: int, by_round: bool = True) -> Router:
    """The guide of a run. `by_round`: learn what one local round tells, too; every device trains for that."""
    rng = np.random.Generator(np.random.PCG64(seed))
    members = [c for c in sorted(run.devices) if c in run.assignment]
    members = sorted(rng.permutation(members)[:MAX_SKETCHED_DEVICES].tolist())
    at = np.array([run.assignment[c] for c in members])
    width = _width([run.devices[c].train for c in members], rng)
    about = InputSketch(seed=SEED, width=width, centers=np.zeros((len(run.centers), sketch.INPUT_SKETCH_SIZE)))
    inputs = np.stack([features.sketch_inputs(run.devices[c].train, about) for c in members])
    around = _CenterMeans(inputs, at, len(run.centers))
    about = InputSketch(seed=SEED, width=width, centers=around.points())
    rounds, after = local_round_of(run.method, len(run.centers)) if by_round else None, None
    if rounds is not None:
        try:
            went = [features.sketch_local_round(run.learner, run.start, run.devices[c].train, rounds) for c in members]
            after = _CenterMeans(np.stack(went), at, len(run.centers), unit=True)
            rounds = replace(rounds, centers=after.points())
        except Malformed as diverged:
            rounds = None
            log.warning("the guide has no way `round`, since a local round from the start fails: %s", diverged.message)
    moments = [moments_of(_all_inputs(run.devices[c])) for c in members]
    profiles = leave_one_out(moments)
    answers = _answers_of_members(run, members, rng)
    newcomers = _Newcomers(
        run=run,
        members=members,
        at=at,
        sketch=about,
        around=around,
        rounds=rounds,
        after=after,
        profiles=profiles,
        answers=answers,
    )
    chosen = sorted(rng.permutation(len(members))[:MAX_MEASURING_DEVICES].tolist())
    looks = [look for i in chosen for look in newcomers.looks(i, rng)]
    router = learn_router(
        looks,
        sizes=MEASUREMENTS_BY_SIZE,
        centers=len(run.centers),
        sketch=about,
        round=rounds,
        inputs=make_profile(moments) if profiles[0] is not None else None,
    )
    return replace(router, answers=None if answers is None else answer_profiles(answers, at))


def _answers_of_members(
    run: FinishedTraining, members: Sequence[ClientId], rng: np.random.Generator
) -> list[list[AnswerMoments]] | None:
    """Of each member under each center, on training samples; None for a model without classes, or with very many."""
    program = run.learner.program
    if program.loss != "cross-entropy" or program.classes > MAX_CLASSES:
        return None
    found = []
    for member in members:
        train = run.devices[member].train
        rows = rng.permutation(len(train))[:MAX_ANSWER_SAMPLES]
        some = Dataset(train.x[rows], train.y[rows])
        batch = run.learner.fixed_batch or features.EVALUATION_BATCH
        found.append([answer_moments(run.learner.evaluate([m], some, batch=batch)[1][0]) for m in run.centers])
    return found


def _all_inputs(local: DeviceData) -> Array:
    return local.train.x if local.test is None else np.concatenate([local.train.x, local.test.x])


@dataclass(frozen=True, kw_only=True)
class _Newcomers:
    """Measures every center for a member as for a device that never trained: without the member's own contribution.

    `at` [n] has the center of each of the n `members`. `after` are the points of a local round by `rounds`, and as
    `rounds` None where there is none. `profiles` are of the inputs of all other members.
    """

    run: FinishedTraining
    members: Sequence[ClientId]
    at: I64
    sketch: InputSketch
    around: _CenterMeans
    rounds: LocalRound | None
    after: _CenterMeans | None
    profiles: Sequence[InputProfile | None]
    answers: Sequence[Sequence[AnswerMoments]] | None

    def looks(self, i: int, rng: np.random.Generator) -> list[CenterMeasurement]:
        """The looks of member `i` at its test samples; none without any."""
        run, local, others = self.run, self.run.devices[self.members[i]], self.profiles[i]
        if local.test is None or not len(local.test):
            return []
        answers = None if self.answers is None else answer_profiles(self.answers, self.at, without=i)
        everything, found = _all_inputs(local), []
        for n, time in ((n, time) for n, times in MEASUREMENTS_BY_SIZE.items() for time in range(times)):
            rows = rng.permutation(len(local.test))[:n]
            few = Dataset(local.test.x[rows], local.test.y[rows])
            d = features.model_distances(run.learner, run.centers, few, labels=True, answers=answers)
            points = features.sketch_inputs(few, self.sketch)
            d["sketch"] = selection_rule.sketch_distance(points, self.around.points(without=i))
            if time == 0 and (norms := features.norm_distances(run.learner, run.centers, few)) is not None:
                d["norms"] = norms
            if time == 0 and self.after is not None and self.rounds is not None:
                with suppress(Malformed):  # on few samples it may diverge: this look has no such distance
                    point = features.sketch_local_round(run.learner, run.start, few, self.rounds, seed=n)
                    d["round"] = selection_rule.sketch_distance(point, self.after.points(without=i))
            if others is not None:
                x = everything[rng.permutation(len(everything))[:n]]
                d["inputs"] = np.full(len(run.centers), others.distance(moments_of(x)))
            found.append(CenterMeasurement(device=i, n=n, distances=d, own_center=int(self.at[i])))
        return found


class _CenterMeans:
    """The mean point of each center's devices; a device can be left out of its own."""

    def __init__(self, points: F64, at: I64, centers: int, *, unit: bool = False) -> None:
        self._points, self._at, self._unit = points, at, unit
        member = np.arange(centers)[:, None] == at
        self._sums, self._counts = member @ points, member.sum(axis=1)
        self._whole = points.mean(axis=0)

    def points(self, without: int | None = None) -> F64:
        """[K, d]; a center without devices is at the mean of the whole fleet."""
        sums, counts = self._sums.copy(), self._counts.copy()
        if without is not None:
            sums[self._at[without]] -= self._points[without]
            counts[self._at[without]] -= 1
        found: F64 = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], self._whole)
        if self._unit:
            found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found


def _width(parts: Sequence[Dataset], rng: np.random.Generator) -> float:
    """The median distance between two samples of the fleet: the usual width of a Gaussian kernel."""
    some = [parts[i] for i in rng.permutation(len(parts))[:MAX_WIDTH_SAMPLES]]
    x = np.concatenate(
        [d.x[rng.permutation(len(d))[:MAX_WIDTH_SAMPLES]].reshape(min(len(d), MAX_WIDTH_SAMPLES), -1) for d in some]
    )
    x = _folded(rng.permutation(x))
    half = len(x) // 2
    apart = np.linalg.norm(x[:half] - x[half : 2 * half], axis=1)
    return min(max(float(np.median(apart)) if half else 1.0, 1e-6), LARGEST_LIMIT)


def _folded(x: Array) -> Array:
    return x if x.shape[1] <= sketch.MAX_INPUT_WIDTH else sketch.count_sketch(x, sketch.MAX_INPUT_WIDTH)
