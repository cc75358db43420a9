"""Ditto (Li 2021): FedAvg's one model w, and a personal model v_i of each device, pulled to w.

    w    <- FedAvg
    v_i  <- local SGD from v_i on f_i(v) + (lam / 2) ||v - w_t||^2, w_t being the model that the round began with

A personal model begins as the common start and never leaves its device; w does not depend on it. With a `common_weight`
a device is served both models, as MAPPER interpolates them (Mansour et al. 2020):

    p(y | x) = (1 - common_weight) p(y | x; v_i) + common_weight p(y | x; w)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coordinator.strategies.base import Fleet, Round, ServedModels, State
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.setting_checks import setting
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.numbered_fleet import all_of_one_center
from coordinator.strategies.plans.sum_plan import PersonalFit, SumPlan
from edge_client.protocol.task import OWN_MODEL, ClientId, Flat, OwnModel, Schema

PERSONAL_SLOT = "personal"


@dataclass(frozen=True, kw_only=True, repr=False)
class Ditto(FedAvg):
    """One common model and one personal model per device. lam = 0: the personal models are those of local training."""

    lam: float = setting(  # the least of the three that the paper tries; 1 holds the digits' groups together
        0.1, "weight of the pull of the personal model to the common one", low=0.0
    )
    common_weight: float = setting(  # Ditto has 0
        0.0, "share of the common model beside the personal one where a device is served", low=0.0, high=1.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_pull(self.lam, "every device", setting="lam")

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:
        return replace(super().begin(model, schema, fleet, rng), extra={"start": model.copy()})

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """Two exchanges with one cohort, over the same batches: the common model, then the personal ones."""
        cohort, seeds = self.cohort(fleet, rng), TaskSeeds.from_rng(rng)
        w, start = state.centers[0], state.extra["start"]
        replies = yield {c: self.fit(start=w, seed=seeds.of(c), center=0) for c in cohort}
        centers = self._reduce(state.centers, ClientUpdates.from_replies(replies, schema.size), schema)
        yield {
            c: self.fit(
                start=OWN_MODEL, init=start, anchor=w, mu=self.lam, slot=PERSONAL_SLOT, upload=False, seed=seeds.of(c)
            )
            for c in cohort
        }
        return replace(state, centers=centers, assignment=all_of_one_center(fleet))

    @property
    def compared_centers(self) -> int:
        """The common model, and what stands in for the personal one, are served together."""
        return 2 if 0 < self.common_weight < 1 else 1

    def sum_plan(self, fleet: Fleet) -> SumPlan:
        """The common model as FedAvg, then the personal ones, which stay on their devices."""
        return replace(super().sum_plan(fleet), personal=PersonalFit(slot=PERSONAL_SLOT, mu=self.lam))

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        """The device's personal model, and the common one by its weight; that alone for a device without one."""
        common, weight = state.centers[0], self.common_weight
        if who is None or weight == 1:
            return ((1.0, common),)
        personal = OwnModel(slot=PERSONAL_SLOT, init=common)
        return ((1.0 - weight, personal), (weight, common)) if weight else ((1.0, personal),)
