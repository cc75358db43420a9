"""First centers from random groups that devices sort by their losses: more groups than centers, merged in the end.

Each group's mean after one fit from the common model is a center. Then, `sorts` times, the devices train and choose
among these by loss; before each time but the first, a center without devices becomes one half of the greatest
(aggregation/spare_centers.py). Centers of fewer than `least` devices are closed, and what their devices trained there
counts for their next choice. In the end k-means merges the centers into K. No point of a device is compared with
another's, so it works on sums of devices, too (`secure`), by the same choices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.centers import one_hot
from coordinator.aggregation.spare_centers import merged, refilled
from coordinator.models.members import SumLayout
from coordinator.strategies.base import Fleet, Replies, RequireAll, Round, State
from coordinator.strategies.common.assignment import told_losses
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.representation import represent
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.plans.sum_plan import SORTS
from edge_client.protocol.task import F64, MAX_MODELS, Array, ClientId, Schema

COUNTS_KEY = "center-devices"  # in State.extra, [K]: devices of each center at its last release
Mean = Callable[[Array, ClientUpdates, F64, F64], Array]  # new centers from updates, labels one-hot [m, K], weights [m]


class StartExchanges(Protocol):
    """What is asked of the devices; a round returns a state without COUNTS_KEY where no center could be made."""

    def groups(self, wide: State, deal: Mapping[ClientId, int], seeds: TaskSeeds) -> Round:
        """The means of the dealt groups after one fit from the common model, and COUNTS_KEY."""

    def sort(self, wide: State, number: int, seeds: TaskSeeds) -> Round:
        """The same for devices that chose by their losses; `number` counts from 1."""

    def points(self, centers: Array) -> Array:
        """[M, p] -> [M, c] what is compared in the merge."""


def starts_by_loss(  # noqa: PLR0913 - a start has these
    devices: StartExchanges,
    state: State,
    fleet: Fleet,
    rng: np.random.Generator,
    *,
    least: int,
    sorts: int,
    moves: NDArray[np.bool_],
) -> Round:
    """The state with its first K centers, and COUNTS_KEY; the state as it is where no center could be made.

    `moves` [size] is that of `refilled`.

    A fleet with no more groups of `least` devices than K begins with one group for each center, as does one with
    `sorts` of zero.
    """
    every, k, common = tuple(sorted(fleet)), len(state.centers), state.extra["start"]
    most, seeds = max(k, MAX_MODELS if sorts else 0), TaskSeeds.from_rng(rng)
    count = min(most, max(1, len(every) // least))
    deal = dict(zip(every, (rng.permutation(len(every)) % count).tolist(), strict=True))
    wide = yield from devices.groups(replace(state, centers=np.tile(common, (max(count, k), 1))), deal, seeds)
    if COUNTS_KEY not in wide.extra:
        return replace(state, extra=wide.extra)
    if count <= k:
        return wide
    for number in range(1, sorts + 1):
        if number > 1:
            counts = wide.extra[COUNTS_KEY]
            halves = refilled(wide.centers, counts, common, least=least, rng=rng, moves=moves)
            wide = replace(wide, centers=halves)
        wide = yield from devices.sort(wide, number, TaskSeeds.from_rng(rng))
    compared = devices.points(wide.centers).astype(np.float64)
    centers, counts = merged(wide.centers, wide.extra[COUNTS_KEY], compared, np.tile(common, (k, 1)), rng)
    return replace(wide, centers=centers, assignment={}, extra={**wide.extra, COUNTS_KEY: counts})


@dataclass(frozen=True, kw_only=True)
class ClearStarts:
    """These starts where the server is sent single updates.

    Devices count equally or by `by_samples`; `pulls` are their proximal terms to the center that they chose.
    """

    method: LocalSgd
    schema: Schema
    fleet: Fleet
    mean: Mean
    by_samples: bool
    pulls: Mapping[ClientId, float] = field(default_factory=dict)
    representation: str = "classifier"

    def round(self, state: State, rng: np.random.Generator, *, sorts: int = SORTS) -> Round:
        """The state with its first centers; `state` itself where no device answered.

        The numbers of devices do not stay in it.

        With `privacy_noise` the groups are the centers: each sort is a release more, and refills and the merge read
        exact numbers of devices.
        """
        least, moves = self.method.server.least_members, np.arange(self.schema.size) < self.schema.n_params
        if self.method.members > 1:  # the others are held
            moves &= SumLayout(self.schema, self.method.members).places[-1]
        sorts = 0 if self.method.server.privacy_noise else sorts
        after = yield from starts_by_loss(self, state, self.fleet, rng, least=least, sorts=sorts, moves=moves)
        if COUNTS_KEY not in after.extra:
            return state  # the callers make the start again
        return replace(after, assignment={}, extra={k: v for k, v in after.extra.items() if k != COUNTS_KEY})

    def groups(self, wide: State, deal: Mapping[ClientId, int], seeds: TaskSeeds) -> Round:
        start = wide.extra["start"]
        fits = {c: self.method.fit(start=start, slot="start", seed=seeds.of(c)) for c in deal}
        updates = ClientUpdates.from_replies((yield RequireAll(fits)), self.schema.size)
        return self._averaged(wide, updates, deal, updates.n) if updates.clients else wide

    def sort(self, wide: State, number: int, seeds: TaskSeeds) -> Round:  # noqa: ARG002 - of the interface
        told = yield RequireAll(
            {c: self.method.probe_centers(wide, "loss", seed=seeds.of(c)) for c in sorted(self.fleet)}
        )
        best, chosen = choose_open(told, self.method.server.least_members)
        if not chosen:
            return wide
        fits = {}
        for c in chosen:
            center, mu = wide.centers[best[c]], self.pulls.get(c, 0.0)
            fits[c] = self.method.fit(start=center, anchor=center, mu=mu, slot="start", seed=seeds.of(c))
        updates = ClientUpdates.from_replies((yield RequireAll(fits)), self.schema.size)
        a = updates.n if self.by_samples else np.ones(len(updates.clients))
        return self._averaged(wide, updates, chosen, a) if updates.clients else wide

    def points(self, centers: Array) -> Array:
        return represent(centers, self.schema, self.representation)

    def _averaged(self, wide: State, updates: ClientUpdates, chosen: Mapping[ClientId, int], a: F64) -> State:
        labels = np.array([chosen[c] for c in updates.clients], dtype=np.int64)
        centers = self.mean(wide.centers, updates, one_hot(labels, len(wide.centers)), a)
        counts = np.bincount(labels, minlength=len(centers))
        return replace(wide, centers=centers, extra={**wide.extra, COUNTS_KEY: counts})


def choose_open(replies: Replies, least: int) -> tuple[dict[ClientId, int], dict[ClientId, int]]:
    """The center of least loss of each device that told its losses, and the one among those of `least` devices or more.

    The second is empty where no center has so many.
    """
    told = told_losses(replies)
    best = {c: int(losses.argmin()) for c, losses in told.items()}
    counts = Counter(best.values())
    is_open = [k for k in sorted(counts) if counts[k] >= least]
    return best, {c: is_open[int(losses[is_open].argmin())] for c, losses in told.items()} if is_open else {}
