"""Centers that keep going: Polyak's heavy ball on the server, as FedAvgM has it (Hsu, Qi, Brown 2019), for any method.

    c_k(t + 1) = m_k + beta v_k(t),    v_k(t + 1) = c_k(t + 1) - c_k(t)

m_k is what the method made of center k in this round. A mean of devices that each go most of the way to their own
optimum both creeps (where they agree) and overshoots (where they pull apart, center after center, to and fro). A ball
with momentum does less of either: rounds that multiply an error by 1 - s converge for every s below 2 (1 + beta).

A center's first move is a jump from where all began and leaves no velocity; nor has a new center any, or one that has
just been split. One that nobody trained stays where it is and keeps its velocity. Buffers (batch norm's running
statistics) stay the method's. Pure; knows no method and no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from coordinator.strategies.base import Round, State, Strategy
from coordinator.strategies.common.local_sgd import LocalSgd
from edge_client.protocol.task import Array, Schema

VELOCITY_KEY = "server-velocity"  # in State.extra, [n_centers, n_params]; NaN: the center has not made its first move


def with_momentum(strategy: Strategy, before: State, schema: Schema, exchanges: Round) -> Round:
    """The round itself; where the method has `server_momentum`, its centers then go on as they went before."""
    after = yield from exchanges
    if not isinstance(strategy, LocalSgd) or not strategy.server.server_momentum:
        return after
    return apply_momentum(before, after, beta=strategy.server.server_momentum, n_params=schema.n_params)


def apply_momentum(before: State, after: State, *, beta: float, n_params: int) -> State:
    """The state `after` a round with its trained centers carried on by `beta` in [0, 1) times their last move."""
    old, centers = before.centers[:, :n_params], after.centers.copy()
    new = centers[: len(old), :n_params]  # a view; a method that grows centers appends them
    trained = (new != old).any(axis=1)
    if not trained.any():
        return after
    velocity = np.zeros((len(centers), n_params), centers.dtype)
    known = {**before.extra, **after.extra}  # a method need not carry on what it does not know
    velocity[: len(old)] = known.get(VELOCITY_KEY, np.nan)
    going = trained & ~np.isnan(velocity[: len(old)]).any(axis=1)
    new[going] += beta * velocity[: len(old)][going]
    velocity[: len(old)][trained] = np.where(going[:, None], new - old, 0)[trained]
    return replace(after, centers=centers, extra={**after.extra, VELOCITY_KEY: velocity})


def reset_velocity(extra: Mapping[str, Array], number: int) -> dict[str, Array]:
    """What a state keeps, with center `number` as if it had never moved: it now stands for other devices."""
    if VELOCITY_KEY not in extra:
        return dict(extra)
    velocity = extra[VELOCITY_KEY].copy()
    velocity[number] = np.nan
    return {**extra, VELOCITY_KEY: velocity}
