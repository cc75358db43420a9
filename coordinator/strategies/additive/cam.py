"""CAM (Ma, Zhou, Long, Jiang, Zhang, NeurIPS 2023): one common model, and to its output that of the group's is added.

    min  sum_i (n_i / n) L_i( f(x; w) + f(x; c_k(i)) )
    k(i)  by the base method: argmin_k L_i(f(w) + f(c_k)) (IFCA), or k-means on the devices' c (WeCFL)
    c_k  <- the base method's round with w fixed
    w    <- sum_i (n_i / n) w_i, w_i being local SGD from w with c_k(i) fixed

The members learn each other's residual: what groups share moves to w, so that centers hold what groups differ in, and
one center that is better for all devices takes none from the others. In the first `warm_up` rounds w is trained alone,
which is FedAvg, since a center's output begins as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from coordinator.models.members import SumLayout
from coordinator.strategies.additive.members import begin_sum, check_policy, train_common, train_groups, unmoved
from coordinator.strategies.base import Fleet, Round, State
from coordinator.strategies.common.setting_checks import check_range
from coordinator.strategies.ifca import IFCA
from coordinator.strategies.wecfl import WeCFL
from edge_client.protocol.task import Flat, Schema

WARM_UP_KEY = "warm-up-rounds"  # in State.extra: how many are to come


@dataclass(frozen=True, kw_only=True, repr=False)
class CAM(IFCA):
    """`clusters` centers over one common model; each device chooses the sum with the least loss, as IFCA does."""

    members: ClassVar[int] = 2

    weights: str = "samples"
    warm_up: int = 0
    common: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:
        """The base method's. Raises ConfigError for a model that is no sum of two."""
        base = partial(super().begin, schema=schema, fleet=fleet, rng=rng)
        return _begin(self, base, model, schema)

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """The base method's exchanges, in which centers move; then one in which the common member does."""
        base = partial(super().round, schema=schema, fleet=fleet, rng=rng)
        return (yield from _round(self, base, state, schema, fleet, rng))


@dataclass(frozen=True, kw_only=True, repr=False)
class CAMWeCFL(WeCFL):
    """CAM over WeCFL: devices are grouped by k-means on the last layers of their group's member."""

    members: ClassVar[int] = 2

    warm_up: int = 0
    common: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:
        """The base method's. Raises ConfigError for a model that is no sum of two."""
        base = partial(super().begin, schema=schema, fleet=fleet, rng=rng)
        return _begin(self, base, model, schema)

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """The base method's exchange, in which centers move; then one in which the common member does."""
        base = partial(super().round, schema=schema, fleet=fleet, rng=rng)
        return (yield from _round(self, base, state, schema, fleet, rng))


Clustered = CAM | CAMWeCFL


def _check(method: Clustered) -> None:
    check_policy(method)
    check_range("warm-up", method.warm_up, low=0)


def _begin(method: Clustered, base: Callable[[Flat], State], model: Flat, schema: Schema) -> State:
    state = begin_sum(SumLayout(schema, method.members), model, base)
    return replace(state, extra={**state.extra, WARM_UP_KEY: np.array(method.warm_up)})


def _round(
    method: Clustered,
    base: Callable[[State], Round],
    state: State,
    schema: Schema,
    fleet: Fleet,
    rng: np.random.Generator,
) -> Round:
    layout, to_come, before = SumLayout(schema, method.members), int(state.extra[WARM_UP_KEY]), state
    if to_come:
        state = replace(state, extra={**state.extra, WARM_UP_KEY: np.array(to_come - 1)})
    else:
        state = yield from train_groups(layout, state, base)
    if to_come or method.common:
        state = yield from train_common(method, layout, state, fleet, rng)
    return before if to_come and unmoved(before, state) else state
