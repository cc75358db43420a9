"""FedProx (Li 2020): FedAvg whose devices minimise f_i(w) + (mu / 2) ||w - w_t||^2, started at w_t."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.strategies.base import Fleet
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.common.setting_checks import setting
from coordinator.strategies.plans.asynchronous_plan import AsynchronousPlan
from coordinator.strategies.plans.sum_plan import SumPlan
from edge_client.protocol.task import Fit, Flat


@dataclass(frozen=True, kw_only=True, repr=False)
class FedProx(FedAvg):
    """One model for all devices, with a proximal pull to it. mu = 0 is FedAvg."""

    mu: float = setting(  # the seed papers' baseline; the original tries 0.001 to 1
        0.1, "weight of the pull to the center, mu / 2 times the squared distance", low=0.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_pull(self.mu, "every device", setting="mu")

    def sum_plan(self, fleet: Fleet) -> SumPlan:
        """The same with the pull."""
        return replace(super().sum_plan(fleet), pulls=dict.fromkeys(fleet, self.mu))

    def asynchronous_plan(self, fleet: Fleet) -> AsynchronousPlan:
        """The same with the pull."""
        return replace(super().asynchronous_plan(fleet), pulls=dict.fromkeys(fleet, self.mu))

    def _task(self, center: Flat, seed: int) -> Fit:
        return self.fit(start=center, seed=seed, anchor=center, mu=self.mu, center=0)
