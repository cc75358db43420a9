"""FedDist and FedDWS: one center that moves by Reptile's outer step (Nichol 2018).

    w <- (1 - eps) w + eps sum_i a_i w_i / sum_i a_i      a_i = 1 (FedDist) or n_i (FedDWS, "FedDist+WS")

eps is constant. With eps = 1 FedDWS is FedAvg, and so is FedDist when all n_i are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coordinator.strategies.base import Fleet
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.common.setting_checks import WEIGHTS, setting
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.plans.sum_plan import SumPlan
from edge_client.protocol.task import Array, Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class FedDist(FedAvg):
    """One model for all devices; a round moves it by `eps` of the way to the mean of their models."""

    eps: float = setting(  # the public code's
        0.6, "share of the way to the mean that a round goes, 0 to 1", low=1e-9, high=1.0
    )
    weights: str = setting("equal", **WEIGHTS)  # "samples": devices weigh n_i, which is FedDWS

    def sum_plan(self, fleet: Fleet) -> SumPlan:
        """The same with the outer step."""
        return replace(super().sum_plan(fleet), step=self.eps, weigh=self.weights)

    def _reduce(self, centers: Array, updates: ClientUpdates, schema: Schema) -> Array:
        a = updates.n if self.weights == "samples" else np.ones(len(updates.n))
        return self.server.aggregate(centers, updates, np.ones((len(a), 1)), a, schema, step=self.eps)


@dataclass(frozen=True, kw_only=True, repr=False)
class FedDWS(FedDist):
    """FedDist whose devices weigh by their samples."""

    weights: str = "samples"
