"""Local training only: min f_i(w_i) on each device, from one common start; devices send losses, no models.

It is the baseline for each federated method with the same number of local steps. The server's only model is the common
start, which serves a device that never trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.strategies.base import Fleet, Round, ServedModels, State
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.sampling import TaskSeeds, sample_cohort
from edge_client.protocol.task import OWN_MODEL, ClientId, OwnModel, Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class NonFed(LocalSgd):
    """One model per device. On a fleet of one device this is FedAvg."""

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:  # noqa: ARG002 - the interface's
        cohort, seeds = sample_cohort(fleet, self.fraction_train, rng), TaskSeeds.from_rng(rng)
        yield {c: self.fit(start=OWN_MODEL, init=state.centers[0], upload=False, seed=seeds.of(c)) for c in cohort}
        return state

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        start = state.centers[0]
        return ((1.0, start if who is None else OwnModel(init=start)),)
