"""How a method works without rounds: what one device trains, and which center its update moves.

A method states its `asynchronous_plan`, and coordinator/rounds/asynchronous/ carries it out. A method without a plan
needs the replies of a whole round, and is refused with `concurrency`. Rounds that a method needs at its beginning (the
first clusters of FeSEM, with start "loss" all that it chooses by loss; the starts of IFCA) are played as rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from coordinator.strategies.base import State
from edge_client.errors import ConfigError
from edge_client.protocol.task import F64, ClientId, Flat, Schema

BY_LOSS_KEY = "by-loss"  # in State.extra: rounds in which the devices still choose by their losses
HINT = "use fedavg, fedprox, ifca, hypcluster, or fesem with e-step = nearest; or leave out concurrency"


@dataclass(frozen=True, kw_only=True)
class AsynchronousPlan:
    """`choose` says which center an update moves: the "only" one, one by "loss", or the "nearest".

    By loss the device first tells its losses at all centers, and trains the one that fits it best. The nearest center
    has the least of `distances`, the squared distances [K] of a model to the centers of a state, with `hysteresis`
    (fesem.py). `weigh`: devices count "equal" or by their "samples". `pulls` are the proximal terms of the devices.
    """

    choose: Literal["only", "loss", "nearest"]
    weigh: str = "samples"
    pulls: Mapping[ClientId, float] = field(default_factory=dict)
    distances: Callable[[State, Schema, Flat], F64] | None = None
    hysteresis: float = 0.0

    def needs_round(self, state: State) -> bool:
        """Whether the method's centers are not far enough apart yet, which takes a whole round."""
        if "ungrouped" in state.extra or int(state.extra.get(BY_LOSS_KEY, 0)):
            return True
        return self.choose == "nearest" and not state.assignment


def whole_rounds(what: str, why: str, hint: str = HINT) -> ConfigError:
    """The refusal of a method or a setting that needs the replies of a whole round."""
    return ConfigError(f"concurrency with {what}: {why}", hint=hint)
