"""FedAvg (McMahan 2017): one center; w <- sum_i (n_i / n_S) w_i over the cohort S."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coordinator.strategies.base import Fleet, Replies, Round, ServedModels, State
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.numbered_fleet import all_of_one_center
from coordinator.strategies.plans.asynchronous_plan import AsynchronousPlan
from coordinator.strategies.plans.sum_plan import SumPlan
from edge_client.protocol.task import Array, ClientId, Fit, Flat, Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class FedAvg(LocalSgd):
    """One model for all devices."""

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:  # noqa: ARG002 - the interface's
        return State(centers=model[None].copy(), assignment=all_of_one_center(fleet))

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """One exchange; without replies the center keeps its values."""
        cohort, seeds = self.cohort(fleet, rng), TaskSeeds.from_rng(rng)
        replies = yield {c: self._task(state.centers[0], seeds.of(c)) for c in cohort}
        centers = self._reduce(state.centers, self._updates(replies, schema), schema)
        return replace(state, centers=centers, assignment=all_of_one_center(fleet))

    def sum_plan(self, fleet: Fleet) -> SumPlan:  # noqa: ARG002 - the interface's
        """Every device adds to the one center."""
        return SumPlan(choose="only")

    def asynchronous_plan(self, fleet: Fleet) -> AsynchronousPlan:  # noqa: ARG002 - the interface's
        """Every update moves the one center."""
        return AsynchronousPlan(choose="only")

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:  # noqa: ARG002 - all devices get the same
        return ((1.0, state.centers[0]),)

    def _updates(self, replies: Replies, schema: Schema) -> ClientUpdates:
        return ClientUpdates.from_replies(replies, schema.size)

    def _task(self, center: Flat, seed: int) -> Fit:
        return self.fit(start=center, seed=seed, center=0)

    def _reduce(self, centers: Array, updates: ClientUpdates, schema: Schema) -> Array:
        return self.server.aggregate(centers, updates, np.ones((len(updates.clients), 1)), updates.n, schema)
