"""The rounds of a sum of models whose first member is common to all devices and whose last is that of their group.

    y = f(x; w_common) + ... + f(x; c_k(i))

A center is the vector of a whole sum, so a clustered method's tasks, choices and means are over sums as they are over
models; which members a device moves is told by a buffer of the vector (models/sums.py). The gradient is that of the
loss of the sum, so a member learns what the others leave over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from coordinator.models.members import SumLayout
from coordinator.strategies.base import Fleet, Round, State
from coordinator.strategies.common.assignment import serving_center
from coordinator.strategies.common.local_sgd import BUFFER_SOURCES, LocalSgd
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.updates import ClientUpdates
from edge_client.errors import ConfigError
from edge_client.protocol.task import Array, Flat

BATCH_NORM: Mapping[str, Any] = {  # a setting of methods whose models are sums, in place of that of LocalSgd
    "words": 'running statistics that a device uses: "average" or "batch"',
    "choices": tuple(BUFFER_SOURCES),  # `check_policy` says why one of them is refused
}
COMMON, GROUP = 0, -1  # which member of the sum
_VECTORS = "start"  # the entry of State.extra that is a model as well: the common start of FeSEM and IFCA


def check_policy(method: LocalSgd) -> None:
    """Refuse running statistics that devices keep, and noise. Raises ConfigError.

    Which members are trained is among the statistics.
    """
    if method.server.privacy_noise > 0:
        raise ConfigError(
            "privacy-noise with a sum of models, whose common member would be one more release",
            hint="set privacy-noise = 0, or use another method",
        )
    if method.batch_norm == "local":
        hint = "set batch-norm = average, or batch"
        raise ConfigError("batch-norm local with a sum of models, whose switches are kept as statistics are", hint=hint)


def begin_sum(layout: SumLayout, model: Flat, begin: Callable[[Flat], State]) -> State:
    """The state with which a clustered method begins; its centers differ in the group's member only.

    The first center is the common start, whose group's member gives zeros. Others are drawn like the common member.
    """
    state = begin(layout.last_as_first(model))
    centers = layout.with_member(np.tile(model, (len(state.centers), 1)), GROUP, state.centers)
    centers[np.all(state.centers == state.centers[0], axis=1)] = model
    return replace(state, centers=centers, extra={**state.extra, _VECTORS: model.copy()})


def train_groups(layout: SumLayout, state: State, clustered: Callable[[State], Round]) -> Round:
    """A round of a clustered method, in which devices move the member of their group."""
    before = state.centers[0]
    after = yield from clustered(_with_vectors(state, lambda v: layout.with_trained(v, GROUP)))
    return _with_vectors(after, lambda v: layout.with_trained(layout.with_member(before, GROUP, v)))


def train_common(method: LocalSgd, layout: SumLayout, state: State, fleet: Fleet, rng: np.random.Generator) -> Round:
    """An exchange in which devices move the common member, each under its own center; its mean weighs samples."""
    cohort, seeds = method.cohort(fleet, rng), TaskSeeds.from_rng(rng)
    starts = layout.with_trained(state.centers, COMMON)
    own = {c: serving_center(state.assignment, c) for c in cohort}
    number = len(starts)  # what compression loses of the common member is made up for apart from the centers' losses
    replies = yield {c: method.fit(start=starts[own[c]], seed=seeds.of(c), center=number) for c in cohort}
    updates = ClientUpdates.from_replies(replies, layout.schema.size)
    if not updates.clients:
        return state
    old = state.centers[0]
    rows = updates.rows.map(lambda row: layout.with_member(old, COMMON, row))
    ones = np.ones((len(updates.clients), 1))
    new = method.server.aggregate(old[None], replace(updates, rows=rows), ones, updates.n, layout.schema)[0]
    return _with_vectors(state, lambda v: layout.with_member(v, COMMON, new))


def unmoved(before: State, after: State) -> bool:
    """Whether a round changed nothing, as without replies: then it is not one of the rounds that a phase has."""
    return np.array_equal(before.centers, after.centers) and before.assignment == after.assignment


def _with_vectors(state: State, change: Callable[[Array], Array]) -> State:
    """The state with its centers, and the common start if the method keeps one, changed."""
    starts = {name: change(value) for name, value in state.extra.items() if name == _VECTORS}
    return replace(state, centers=change(state.centers), extra={**state.extra, **starts})
