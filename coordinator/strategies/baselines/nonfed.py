"""Local training only: min f_i(w_i) on each device, from one common start; devices send losses, no models.

It is the baseline for each federated method with the same number of local steps. The server's only model is the common
start, which serves a device that never trained.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from coordinator.strategies.base import Fleet, Round, ServedModels, State
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.server_options import SERVER_DEFAULTS, ServerOptions
from edge_client.errors import ConfigError
from edge_client.protocol.task import OWN_MODEL, ClientId, OwnModel, Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class NonFed(LocalSgd):
    """One model per device, no center, and so no ServerOptions. On a fleet of one device this is FedAvg."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = [
            option.name.replace("_", "-")
            for option in fields(ServerOptions)
            if option.metadata.get("setting", True)
            and getattr(self.server, option.name) != getattr(SERVER_DEFAULTS, option.name)
        ]
        if unused:
            raise ConfigError(f"nonfed makes no centers, so {unused[0]} has no effect", hint=f"leave {unused[0]} out")

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:  # noqa: ARG002 - the interface's
        cohort, seeds = self.cohort(fleet, rng), TaskSeeds.from_rng(rng)
        yield {c: self.fit(start=OWN_MODEL, init=state.centers[0], upload=False, seed=seeds.of(c)) for c in cohort}
        return state

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        start = state.centers[0]
        return ((1.0, start if who is None else OwnModel(init=start)),)
