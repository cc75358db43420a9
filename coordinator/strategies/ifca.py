"""IFCA (Ghosh 2020) and HypCluster (Mansour 2020): each device trains the center that fits its own data best.

    k_i = argmin_k f_i(c_k)                                         on all local training samples, inference mode
    w_i = local SGD from c_{k_i}
    c_k <- sum_{k_i = k} a_i w_i / sum_{k_i = k} a_i       a_i = 1 (IFCA, model averaging) or n_i (HypCluster)

Centers must start apart, or all devices choose the same one. Equal losses are decided by lot. A center that no device
chose keeps its values; a device that does not answer keeps its last center. With start "loss" the first centers are
those of loss_starts.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coordinator.aggregation.centers import one_hot
from coordinator.strategies.base import Fleet, Replies, Round, State
from coordinator.strategies.common.assignment import choose_by_loss
from coordinator.strategies.common.initial_centers import START_MODES, MultiStartSgd
from coordinator.strategies.common.loss_starts import ClearStarts
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.setting_checks import WEIGHTS, setting
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.numbered_fleet import reassigned
from coordinator.strategies.plans.asynchronous_plan import AsynchronousPlan
from coordinator.strategies.plans.sum_plan import SORTS, SumPlan, single_updates
from edge_client.protocol.task import ClientId, Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class IFCA(MultiStartSgd):
    """`clusters` models for the fleet, chosen by loss."""

    start: str = setting(
        "groups", 'how centers begin apart: "groups", "k-means", "redraw" or "loss"', choices=(*START_MODES, "loss")
    )
    weights: str = setting("equal", **WEIGHTS)  # "samples": devices weigh n_i, which is HypCluster

    def sum_plan(self, fleet: Fleet) -> SumPlan:  # noqa: ARG002 - the interface's
        """Each device chooses by its losses and tells no one. Raises ConfigError for starts that compare updates."""
        if self.start == "k-means":
            raise single_updates(self, "start k-means compares the devices' updates", "set start = groups")
        first = "none" if self.start == "redraw" else "groups"
        sorts = 0 if self.server.privacy_noise else SORTS  # with noise each sum costs epsilon
        return SumPlan(choose="loss", weigh=self.weights, first=first, sorts=sorts, served="center")

    def asynchronous_plan(self, fleet: Fleet) -> AsynchronousPlan:  # noqa: ARG002 - the interface's
        """Each device tells its losses at the newest centers, and trains the one that fits it best."""
        return AsynchronousPlan(choose="loss", weigh=self.weights)

    def choose(self, replies: Replies, rng: np.random.Generator) -> dict[ClientId, int]:
        """The center of each device that told its losses at all K centers."""
        return choose_by_loss(replies, rng)

    def separate_starts(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """As the base class says, and "loss": random groups that devices sort by their losses."""
        if self.start != "loss" or "ungrouped" not in state.extra:
            return (yield from super().separate_starts(state, schema, fleet, rng))
        starts = ClearStarts(
            method=self,
            schema=schema,
            fleet=fleet,
            mean=lambda centers, updates, R, a: self.server.aggregate(centers, updates, R, a, schema),
            by_samples=self.weights == "samples",
        )
        after = yield from starts.round(state, rng)
        return replace(after, extra={k: v for k, v in after.extra.items() if k != "ungrouped" or after is state})

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """Two exchanges: the cohort's losses, then a fit from the chosen center for each device that reported them."""
        state = yield from self.separate_starts(state, schema, fleet, rng)
        cohort, seeds = self.cohort(fleet, rng), TaskSeeds.from_rng(rng)
        least = type(self).choose is IFCA.choose  # a class that chooses in another way reads all losses
        replies = yield {c: self.probe_centers(state, "loss", seed=seeds.of(c), least=least) for c in cohort}
        chosen = self.choose(replies, rng)
        if not chosen:
            return state
        replies = yield {c: self.fit(start=state.centers[k], seed=seeds.of(c), center=k) for c, k in chosen.items()}
        updates = ClientUpdates.from_replies(replies, schema.size)
        labels = np.array([chosen[c] for c in updates.clients], dtype=np.int64)
        a = updates.n if self.weights == "samples" else np.ones(len(labels))
        centers = self.server.aggregate(state.centers, updates, one_hot(labels, self.clusters), a, schema)
        return replace(state, centers=centers, assignment=reassigned(fleet, state.assignment, chosen))


@dataclass(frozen=True, kw_only=True, repr=False)
class HypCluster(IFCA):
    """IFCA whose devices weigh by their samples."""

    weights: str = "samples"
