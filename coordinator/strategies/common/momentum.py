"""Server momentum for any method: Polyak's heavy ball on the centers, as in FedAvgM (Hsu, Qi, Brown 2019).

    c_k(t + 1) = m_k + beta v_k(t),    v_k(t + 1) = c_k(t + 1) - c_k(t)

m_k is the method's new center k in this round. The mean of devices that each go most of the way to their own optimum
creeps where they agree and oscillates where they disagree; momentum reduces both. Rounds that multiply an error by
1 - s converge for every s below 2 (1 + beta).

A center's first move leaves no velocity; a new center and one that has just been split have none. A center that no
device trained keeps its place and its velocity. In a sum of models this holds for each member of a center: a member
that is held in a round stays where it is, and the common one of all centers goes on being the same. Buffers (batch
norm's running statistics) keep the method's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from coordinator.models.members import SumLayout
from coordinator.strategies.base import Round, State, Strategy
from coordinator.strategies.common.local_sgd import LocalSgd
from edge_client.protocol.task import Array, Schema

VELOCITY_KEY = "server-velocity"  # in State.extra, [n_centers, n_params]; NaN: what has not made its first move
Part = slice | NDArray[np.bool_]  # of the parameters
WHOLE: Sequence[Part] = (slice(None),)


def with_momentum(strategy: Strategy, before: State, schema: Schema, exchanges: Round) -> Round:
    """The exchanges of a round; the centers of a method with `server_momentum` then move on by `apply_momentum`."""
    after = yield from exchanges
    if not isinstance(strategy, LocalSgd) or not strategy.server.server_momentum:
        return after
    n, parts = schema.n_params, WHOLE
    if strategy.members > 1:
        parts = tuple(SumLayout(schema, strategy.members).places[:, :n])
    return apply_momentum(before, after, beta=strategy.server.server_momentum, n_params=n, parts=parts)


def apply_momentum(before: State, after: State, *, beta: float, n_params: int, parts: Sequence[Part] = WHOLE) -> State:
    """The state `after` a round with what was trained carried on by `beta` in [0, 1) times its last move.

    Each of the `parts` of a center is trained, or held, as a whole.
    """
    old, centers = before.centers[:, :n_params], after.centers.copy()
    new = centers[: len(old), :n_params]  # a view; a method that grows centers appends them
    trained = new != old
    for part in parts:
        trained[:, part] = trained[:, part].any(axis=1, keepdims=True)
    if not trained.any():
        return after
    velocity = np.zeros((len(centers), n_params), centers.dtype)
    known = {**before.extra, **after.extra}  # a method may drop entries of `extra` that are not its own
    last = velocity[: len(old)]  # a view as well
    last[:] = known.get(VELOCITY_KEY, np.nan)
    going = trained & ~np.isnan(last)
    np.add(new, beta * last, out=new, where=going)
    last[trained] = np.where(going, new - old, 0)[trained]
    return replace(after, centers=centers, extra={**after.extra, VELOCITY_KEY: velocity})


def reset_velocity(extra: Mapping[str, Array], number: int) -> dict[str, Array]:
    """`extra` with the velocity of center `number` cleared, because the center now stands for other devices."""
    if VELOCITY_KEY not in extra:
        return dict(extra)
    velocity = extra[VELOCITY_KEY].copy()
    velocity[number] = np.nan
    return {**extra, VELOCITY_KEY: velocity}
