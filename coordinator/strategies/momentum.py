"""Centers that keep going: Polyak's heavy ball on the server, as FedAvgM has it (Hsu, Qi, Brown 2019), for any method.

    c_k(t + 1) = m_k + beta v_k(t),    v_k(t + 1) = c_k(t + 1) - c_k(t)

m_k is what the method made of center k in this round. A mean of devices that each go most of the way to their own
optimum both creeps (where they agree) and overshoots (where they pull apart, center after center, to and fro). A ball
with momentum does less of either: rounds that multiply an error by 1 - s converge for every s below 2 (1 + beta).

The first move is a jump from one common start and leaves no velocity; nor has a new center any. One that nobody trained
stays where it is and keeps its velocity. Buffers (batch norm's running statistics) stay the method's. Pure; knows no
method and no device.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coordinator.strategies.base import Round, State, Strategy
from coordinator.strategies.parts import LocalSgd
from edge_client.protocol.task import Schema

VELOCITY = "server-velocity"  # in State.extra, [n_centers, n_params]


def coasting(strategy: Strategy, before: State, schema: Schema, exchanges: Round) -> Round:
    """The round itself; where the method has `server_momentum`, its centers then go on as they went before."""
    after = yield from exchanges
    if not isinstance(strategy, LocalSgd) or not strategy.server_momentum:
        return after
    return coasted(before, after, beta=strategy.server_momentum, n_params=schema.n_params)


def coasted(before: State, after: State, *, beta: float, n_params: int) -> State:
    """The state `after` a round with its trained centers carried on by `beta` in [0, 1) times their last move."""
    old, centers = before.centers[:, :n_params], after.centers.copy()
    new = centers[: len(old), :n_params]  # a view; a method that grows centers appends them
    trained = (new != old).any(axis=1)
    if not trained.any():
        return after
    velocity = np.zeros((len(centers), n_params), centers.dtype)
    if VELOCITY in before.extra:
        velocity[: len(old)] = before.extra[VELOCITY]
        new[trained] += beta * velocity[: len(old)][trained]
        velocity[: len(old)][trained] = (new - old)[trained]
    return replace(after, centers=centers, extra={**after.extra, VELOCITY: velocity})
