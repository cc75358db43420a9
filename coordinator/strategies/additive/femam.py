"""FeMAM (Chen, Zhou, Long, Ma, Jiang, Zhang, 2024, arXiv 2405.16472): a sum of levels, from all devices to one.

    y = f(x; w) + f(x; c_k(i)) + f(x; p_i)
    level 1   w    by FedAvg on L_i( f(w) )
    level 2   c_k  by k-means on the devices' last layers and means by samples, on L_i( f(w) + f(c) ), w fixed
    level 3   p_i  by the device alone, on L_i( f(w) + f(c_k(i)) + f(p) ), w and c fixed

One level is trained at a time, and a level that has been trained stays as it is. A new level's output begins as zero.
A device that no round of the second level asked tells its losses in the last one, takes the center of the least, and
trains when it is asked again. p_i never leaves its device. A center is exported as w + c_k, with a third member that
gives zeros, from which a new device can train its own.
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
from coordinator.strategies.base import Fleet, Round, ServedModels, State
from coordinator.strategies.common.assignment import centers_of_newcomers, newcomers, serving_center
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.setting_checks import setting
from coordinator.strategies.numbered_fleet import reassigned
from coordinator.strategies.wecfl import WeCFL
from edge_client.protocol.task import OWN_MODEL, ClientId, Fit, Flat, OwnModel, Schema

PERSONAL, SLOT = 1, "personal"  # the member of the sum, and where a device keeps it
ROUNDS_KEY = "rounds-trained"  # in State.extra
LEVELS = 3


@dataclass(frozen=True, kw_only=True, repr=False)
class FeMAM(WeCFL):
    """A common model, `clusters` centers over it, and a personal model over these, one after the other."""

    members: ClassVar[int] = LEVELS

    batch_norm: str = setting("average", **BATCH_NORM)
    level_rounds: int = setting(4, "rounds in which each level but the last is trained", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy(self)

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:
        """All centers alike, before the first level. Raises ConfigError for a model that is no sum of three."""
        begin = partial(super().begin, schema=schema, fleet=fleet, rng=rng)
        state = begin_sum(SumLayout(schema, self.members), model, begin)
        return replace(state, extra={**state.extra, ROUNDS_KEY: np.array(0)})

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """One exchange, of the level that is trained."""
        layout, level, before = SumLayout(schema, self.members), self._level(state), state
        state = replace(state, extra={**state.extra, ROUNDS_KEY: state.extra[ROUNDS_KEY] + 1})
        if level == 0:
            after = yield from train_common(self, layout, state, fleet, rng)
            return before if unmoved(before, after) else after
        if level == 1:
            clustered = partial(super().round, schema=schema, fleet=fleet, rng=rng)
            after = yield from train_groups(layout, state, clustered)
            return before if unmoved(before, after) else after
        cohort, seeds = self.cohort(fleet, rng), TaskSeeds.from_rng(rng)
        new, starts = newcomers(cohort, state), layout.with_trained(state.centers, PERSONAL)
        fits = {
            c: self._personal(starts[serving_center(state.assignment, c)], seeds.of(c)) for c in cohort if c not in new
        }
        replies = yield {**fits, **{c: self.probe_centers(state, "loss", least=True) for c in new}}
        chosen = centers_of_newcomers(new, replies)
        return replace(state, assignment=reassigned(fleet, state.assignment, chosen)) if chosen else state

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        """The center of the device; with its personal model as soon as that is trained."""
        center = state.centers[serving_center(state.assignment, who)]
        if who is None or int(state.extra[ROUNDS_KEY]) <= (LEVELS - 1) * self.level_rounds:
            return ((1.0, center),)
        return ((1.0, OwnModel(slot=SLOT, init=center)),)

    def _personal(self, start: Flat, seed: int) -> Fit:
        return self.fit(start=OWN_MODEL, init=start, slot=SLOT, upload=False, seed=seed)

    def _level(self, state: State) -> int:
        """The level of the next round, from 0."""
        return min(int(state.extra[ROUNDS_KEY]) // self.level_rounds, LEVELS - 1) if self.level_rounds else LEVELS - 1
