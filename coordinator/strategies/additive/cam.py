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

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from coordinator.models.members import SumLayout
from coordinator.strategies.additive.members import (
    BATCH_NORM,
    begin_sum,
    check_policy,
    train_common,
    train_groups,
    unmoved,
)
from coordinator.strategies.base import Fleet, Round, State
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.setting_checks import setting
from coordinator.strategies.ifca import IFCA
from coordinator.strategies.wecfl import WeCFL
from edge_client.protocol.task import Flat, Schema

WARM_UP_KEY = "warm-up-rounds"  # in State.extra: how many are to come


@dataclass(frozen=True, kw_only=True, repr=False)
class OverCommonModel(LocalSgd):
    """Centers over one common model; the base method, which makes and moves the centers, is the next base class."""

    members: ClassVar[int] = 2

    batch_norm: str = setting("average", **BATCH_NORM)
    warm_up: int = setting(0, "first rounds, in which the common model is trained alone", low=0)
    common: bool = setting(
        default=True,
        words="whether the common model is trained after the first warm_up rounds; without it this is the base method",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy(self)

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:
        """The base method's. Raises ConfigError for a model that is no sum of two."""
        base = partial(super().begin, schema=schema, fleet=fleet, rng=rng)
        state = begin_sum(SumLayout(schema, self.members), model, base)
        return replace(state, extra={**state.extra, WARM_UP_KEY: np.array(self.warm_up)})

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """The base method's exchanges, in which centers move; then one in which the common member does."""
        base = partial(super().round, schema=schema, fleet=fleet, rng=rng)  # type: ignore[misc]  # LocalSgd has none
        layout, to_come, before = SumLayout(schema, self.members), int(state.extra[WARM_UP_KEY]), state
        if to_come:
            state = replace(state, extra={**state.extra, WARM_UP_KEY: np.array(to_come - 1)})
        else:
            state = yield from train_groups(layout, state, base)
        if to_come or self.common:
            state = yield from train_common(self, layout, state, fleet, rng)
        return before if to_come and unmoved(before, state) else state


@dataclass(frozen=True, kw_only=True, repr=False)
class CAM(OverCommonModel, IFCA):
    """`clusters` centers over one common model; each device chooses the sum with the least loss, as IFCA does."""

    weights: str = "samples"


@dataclass(frozen=True, kw_only=True, repr=False)
class CAMWeCFL(OverCommonModel, WeCFL):
    """CAM over WeCFL: devices are grouped by k-means on the last layers of their group's member."""
