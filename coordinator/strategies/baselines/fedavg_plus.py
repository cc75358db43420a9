"""FedAvg+ and FedProx+ (Ma 2022): K independent runs of one method; a device is served their soft vote.

    p(y | x) = (1 / K) sum_k p(y | x; w_k)

Each run has its own start. In a round the runs train in turn, so a round costs K times the exchanges, steps and bytes.
The vote is the mean of the models' probabilities, as the paper says; its public code averages logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from coordinator.strategies.base import Exchange, Fleet, Mixture, Round, State, relay
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.baselines.fedprox import FedProx
from coordinator.strategies.common.initial_centers import initial_centers
from coordinator.strategies.common.setting_checks import described
from edge_client.protocol.task import MAX_MODELS, ClientId, Fit, Flat, Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class FedAvgPlus(FedAvg):
    """`runs` models, each trained by all devices; no device is assigned to one. One run is FedAvg."""

    runs: int = field(  # the paper's smaller number
        default=5, kw_only=False, metadata=described("number of independent runs", low=1, high=MAX_MODELS)
    )

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:  # noqa: ARG002 - the interface's
        return State(centers=initial_centers(model, schema, self.runs, rng))

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """The runs' exchanges, one run after the other; each draws its own cohort."""
        centers = []
        for k in range(self.runs):
            one = replace(state, centers=state.centers[k : k + 1])
            run = yield from relay(super().round(one, schema, fleet, rng), change=partial(_for_center, k))
            centers.append(run.centers)
        return replace(state, centers=np.concatenate(centers))

    @property
    def compared_centers(self) -> int:
        """A device is served the mixture of all."""
        return self.runs

    def predictor(self, state: State, who: ClientId | None) -> Mixture:  # noqa: ARG002 - all devices get the same
        return tuple((1.0 / self.runs, center) for center in state.centers)


def _for_center(k: int, exchange: Exchange) -> Exchange:
    return {c: replace(task, center=k) if isinstance(task, Fit) else task for c, task in exchange.items()}


@dataclass(frozen=True, kw_only=True, repr=False)
class FedProxPlus(FedAvgPlus, FedProx):
    """The same over FedProx: its tasks, its checks, K times."""
