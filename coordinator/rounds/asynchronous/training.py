"""Rounds that wait for no device, as a pure state machine: FedBuff (Nguyen et al. 2022) with one buffer per center.

A device that is free gets the newest centers while fewer than `concurrency` devices are at work. Its update goes into
the buffer of its center; a full buffer makes the next version of that center:

    c_k <- c_k + sum_i a_i s(tau_i) (w_i - start_i) / sum_i a_i,      s(tau) = 1 / sqrt(1 + tau)

tau_i counts the versions of its center that were made since the device got it; the coordinator counts, no device is
asked. a_i are the method's weights (n_i or 1). An update without staleness counts as it is, so that a buffer of fresh
updates makes the center of a round, by the same function. An update whose device has left the center that it trained
pulls its new center towards its model. Running statistics are means, not steps: they go to c_k + s (b_i - c_k).

`buffer` is that of the whole fleet. A center's own buffer is full at its devices' share of it, rounded up, and at two
updates or more where the center has two devices; so no center waits for more of its devices than another. A device has
one update in a buffer, and gets no task until that buffer is emptied: alone it can neither fill the buffer nor count
twice in a version. A task of which the center is more than `max_staleness` versions old is stopped.

`hand_out`, `take` and `release` give the state after an event; they read no clock and store nothing. The state follows
from the order of these calls and from the replies, so that a replay in that order has the same bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from coordinator.aggregation.rows import Rows
from coordinator.rounds.asynchronous.options import Asynchronous
from coordinator.rounds.round import round_rng
from coordinator.rounds.update_validation import MAX_UPDATE_RATIO, MIN_UPDATES_FOR_MEDIAN, outliers
from coordinator.strategies.base import Fleet, State
from coordinator.strategies.common.assignment import choose_by_loss
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.momentum import apply_momentum
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.fesem import apply_hysteresis
from coordinator.strategies.plans.asynchronous_plan import AsynchronousPlan
from edge_client.protocol.task import MAX_MODELS, ClientId, Fit, Flat, Probe, Reply, Schema, Task

LEAST_UPDATES = 2  # in the version of a center that has two devices
RECENT = 32  # devices whose last moves are kept: a small buffer has no median of its own


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What does not change with an event. A fleet that grew or shrank is `replace(rules, fleet=...)`."""

    strategy: LocalSgd
    options: Asynchronous
    schema: Schema
    fleet: Fleet
    seed: int
    max_update_ratio: float = MAX_UPDATE_RATIO

    @cached_property
    def plan(self) -> AsynchronousPlan:
        return self.strategy.asynchronous_plan(self.fleet)


@dataclass(frozen=True, kw_only=True)
class Handed:
    """A task that a device has: `center` in its `version` as `start`; a probe has none of them.

    `center` is None for a device without one, which starts at the common model. `number` counts the run's tasks.
    """

    number: int
    seed: int
    center: int | None = None
    version: int = 0
    start: Flat | None = None


@dataclass(frozen=True, kw_only=True)
class Buffered:
    """An update that waits in a buffer, as it moves the center; `staleness` is that of its start.

    `since` counts the run's tasks when it came.
    """

    row: Flat
    n: int
    staleness: int
    moves: Mapping[str, float]
    since: int


@dataclass(frozen=True, kw_only=True)
class Training:
    """The state between two events; `scales` are those of `outliers`.

    `recent` has the moves of the devices whose updates made the newest versions, the last ones last. `given` has the
    newest round, and the devices that got a task in it.
    """

    state: State
    versions: tuple[int, ...]
    buffers: tuple[Mapping[ClientId, Buffered], ...]
    at_work: Mapping[ClientId, Handed] = field(default_factory=dict)
    handed: int = 0
    scales: Mapping[str, float] = field(default_factory=dict)
    recent: Mapping[ClientId, Mapping[str, float]] = field(default_factory=dict)
    given: tuple[int, frozenset[ClientId]] = (0, frozenset())

    @property
    def buffered(self) -> frozenset[ClientId]:
        """The devices that have an update in a buffer."""
        return frozenset(who for buffer in self.buffers for who in buffer)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What became of a reply: "counted", "asked" (losses; `task` is what the device gets next), "stale" or "unknown".

    `made` are centers that have a new version, `stopped` devices whose task is now too old, `refused` devices whose
    update in a buffer was an outlier.
    """

    what: str
    staleness: int = 0
    task: Task | None = None
    made: tuple[int, ...] = ()
    stopped: tuple[ClientId, ...] = ()
    refused: Mapping[ClientId, str] = field(default_factory=dict)


def begin_training(state: State) -> Training:
    """All centers in version 0, empty buffers, no device at work."""
    k = len(state.centers)
    return Training(state=state, versions=(0,) * k, buffers=({},) * k)


def round_target(rules: Rules) -> int:
    """After so many updates a round ends: it is only how a run is counted, and no device notices."""
    return min(rules.options.buffer, len(rules.fleet))


def hand_out(
    training: Training,
    rules: Rules,
    round: int,  # noqa: A002 - the protocol's word
    present: Callable[[ClientId], bool],
) -> tuple[Training, dict[ClientId, Task], list[Taken]]:
    """Give free devices that are `present` a task, by lot; -> also the tasks, and the versions that this made.

    Where no device is at work and none may be given a task, the buffers are emptied as they are: no others come. So
    is one that has waited for too long: the other devices of its center are gone.
    """
    training, made = _emptied(training, rules, since=training.handed - patience(rules))
    training, tasks = _filled(training, rules, round, present)
    if not training.at_work and training.buffered:
        training, more = _emptied(training, rules, since=training.handed)
        training, tasks = _filled(training, rules, round, present)
        made += more
    return training, tasks, made


def take(
    training: Training, rules: Rules, who: ClientId, reply: Reply, moves: Mapping[str, float]
) -> tuple[Training, Taken]:
    """The reply of a device, checked by update_validation.py; `moves` is how far it went (`update_moves`)."""
    handed = training.at_work.get(who)
    if handed is None or who not in rules.fleet:
        return release(training, who), Taken(what="unknown")
    if handed.start is None:
        return _chosen(training, rules, who, handed, reply)
    training = release(training, who)
    staleness = _staleness(training, handed)
    if reply.update is None or staleness > rules.options.max_staleness:
        return training, Taken(what="stale", staleness=staleness)
    k = _center(training, rules, who, handed, reply.update)
    same = k == handed.center
    start = handed.start if same else None
    row = moved_row(training.state.centers[k], reply.update, start, staleness, n_params=rules.schema.n_params)
    entry = Buffered(row=row, n=reply.n, staleness=staleness, moves=moves, since=training.handed)
    buffers = tuple({**b, who: entry} if j == k else b for j, b in enumerate(training.buffers))
    state = replace(training.state, assignment={**training.state.assignment, who: k})
    training = replace(training, buffers=buffers, state=state)
    if len(buffers[k]) < buffer_size(training, rules, k):
        return training, Taken(what="counted", staleness=staleness)
    training, taken = _new_version(training, rules, k)
    return training, replace(taken, what="counted", staleness=staleness)


def release(training: Training, who: ClientId) -> Training:
    """The device has no task any more: it refused it, was silent for too long, or left."""
    if who not in training.at_work:
        return training
    return replace(training, at_work={c: handed for c, handed in training.at_work.items() if c != who})


def task_again(training: Training, rules: Rules, who: ClientId) -> Task:
    """The task that a device has, to be sent again; losses are then asked at the newest centers."""
    handed = training.at_work[who]
    if handed.start is None:
        probe: Probe = rules.strategy.probe_centers(training.state, "loss", seed=handed.seed, least=True)
        return probe
    return _fit_task(rules, who, handed.center, handed.start, seed=handed.seed)


def served_state(training: Training, rules: Rules) -> State:
    """The state as a round leaves it: the only center serves every device."""
    if rules.plan.choose != "only":
        return training.state
    return replace(training.state, assignment=dict.fromkeys(sorted(rules.fleet), 0))


def staleness_weight(staleness: int) -> float:
    """s(tau) = 1 / sqrt(1 + tau), as in the paper."""
    return 1 / math.sqrt(1 + staleness)


def buffer_size(training: Training, rules: Rules, k: int) -> int:
    """So many updates make a new version of center k: its devices' share of `buffer`."""
    if rules.plan.choose == "only":
        return round_target(rules)
    devices = Counter(j for who, j in training.state.assignment.items() if who in rules.fleet)
    mine, buffer = devices[k], round_target(rules)
    return max(1, min(mine, LEAST_UPDATES), -(-buffer * mine // max(1, devices.total())))


def patience(rules: Rules) -> int:
    """While the run gives so many tasks, an update waits in a buffer: about as long as a task may take."""
    return (rules.options.max_staleness + 1) * round_target(rules)


def moved_row(center: Flat, model: Flat, start: Flat | None, staleness: int, *, n_params: int) -> Flat:
    """The update as a row whose mean with others moves the center: c + s (w - start); without staleness w itself.

    Without a `start` in common with the center, and for running statistics: c + s (w - c).
    """
    if staleness == 0:
        return model
    s, pivot = staleness_weight(staleness), (center if start is None else start).astype(np.float64)
    pivot[n_params:] = center[n_params:]
    row: Flat = (center + s * (model - pivot)).astype(model.dtype)
    return row


def _filled(
    training: Training,
    rules: Rules,
    round: int,  # noqa: A002 - as hand_out
    present: Callable[[ClientId], bool],
) -> tuple[Training, dict[ClientId, Task]]:
    free = rules.options.concurrency - len(training.at_work)
    if free <= 0:
        return training, {}
    busy = training.at_work.keys() | training.buffered
    pool: Sequence[ClientId] = [who for who in sorted(rules.fleet) if who not in busy]
    if len(pool) > free:
        lot = np.random.Generator(np.random.PCG64(np.random.SeedSequence([rules.seed, round, training.handed])))
        pool = [pool[i] for i in lot.permutation(len(pool))]
    seeds, tasks, at_work = TaskSeeds.from_rng(round_rng(rules.seed, round)), dict[ClientId, Task](), {}
    had = training.given[1] if training.given[0] == round else frozenset()
    for who in pool:
        if len(tasks) == free:
            break
        if present(who):
            number = training.handed + len(tasks)
            seed = seeds.of(f"{who}/{number}" if who in had else who)  # not the batches of its last task once more
            at_work[who], tasks[who] = _task(training, rules, who, number=number, seed=seed)
    return replace(
        training,
        at_work={**training.at_work, **at_work},
        handed=training.handed + len(tasks),
        given=(round, had.union(tasks)),
    ), tasks


def _task(training: Training, rules: Rules, who: ClientId, *, number: int, seed: int) -> tuple[Handed, Task]:
    """What a free device is asked: a fit, or first its losses where they choose the center.

    They choose it for a device without one, too, which begins at the common start only where a probe has no room for
    all centers (assignment.py says why).
    """
    centers = len(training.state.centers)
    new = rules.plan.choose == "nearest" and who not in training.state.assignment and centers <= MAX_MODELS
    if rules.plan.choose == "loss" or (new and centers > 1):
        probe: Probe = rules.strategy.probe_centers(training.state, "loss", seed=seed, least=True)
        return Handed(number=number, seed=seed), probe
    k = 0 if rules.plan.choose == "only" or new else training.state.assignment.get(who)
    return _fit(training, rules, who, k, number=number, seed=seed)


def _fit(
    training: Training, rules: Rules, who: ClientId, k: int | None, *, number: int, seed: int
) -> tuple[Handed, Fit]:
    start: Flat = training.state.extra["start"] if k is None else training.state.centers[k]
    version = 0 if k is None else training.versions[k]
    handed = Handed(number=number, seed=seed, center=k, version=version, start=start)
    return handed, _fit_task(rules, who, k, start, seed=seed)


def _fit_task(rules: Rules, who: ClientId, k: int | None, start: Flat, *, seed: int) -> Fit:
    if k is None:
        return rules.strategy.fit(start=start, seed=seed)
    pull = rules.plan.pulls.get(who, 0.0)
    return rules.strategy.fit(start=start, seed=seed, anchor=start, mu=pull, center=k)


def _chosen(training: Training, rules: Rules, who: ClientId, handed: Handed, reply: Reply) -> tuple[Training, Taken]:
    """A device told its losses: it trains the newest version of the center that fits it best."""
    lot = np.random.Generator(np.random.PCG64(handed.seed))
    k = choose_by_loss({who: reply}, lot).get(who)
    if k is None:
        return release(training, who), Taken(what="unknown")
    state = replace(training.state, assignment={**training.state.assignment, who: k})
    training = replace(training, state=state)
    now, task = _fit(training, rules, who, k, number=training.handed, seed=handed.seed)
    training = replace(training, at_work={**training.at_work, who: now}, handed=training.handed + 1)
    return training, Taken(what="asked", task=task)


def _staleness(training: Training, handed: Handed) -> int:
    return 0 if handed.center is None else training.versions[handed.center] - handed.version


def _center(training: Training, rules: Rules, who: ClientId, handed: Handed, model: Flat) -> int:
    """The center that the update moves."""
    measure = rules.plan.distances
    if measure is None:
        return handed.center or 0
    d2 = measure(training.state, rules.schema, model)
    before = np.array([training.state.assignment.get(who, -1)])
    return int(apply_hysteresis(d2[None].argmin(axis=1), d2[None], before, rules.plan.hysteresis)[0])


def _emptied(training: Training, rules: Rules, *, since: int) -> tuple[Training, list[Taken]]:
    """Empty the buffers with an update that came when the run had given `since` tasks or fewer."""
    made = []
    for k, buffer in enumerate(training.buffers):
        if any(entry.since <= since for entry in buffer.values()):
            training, taken = _new_version(training, rules, k)
            made.append(taken)
    return training, made


def _new_version(training: Training, rules: Rules, k: int) -> tuple[Training, Taken]:
    """Empty the buffer of center k into its next version; outliers are left out, as at the end of a round.

    The usual move of a buffer with too few updates for a median is that of these and the `recent` ones.
    """
    buffer, state = training.buffers[k], training.state
    moves = {who: entry.moves for who, entry in buffer.items()}
    scales, recent = training.scales, training.recent
    if len(moves) < MIN_UPDATES_FOR_MEDIAN:
        _, scales = outliers({**recent, **moves}, scales, ratio=rules.max_update_ratio)
    refused, scales = outliers(moves, scales, ratio=rules.max_update_ratio)
    kept = sorted(buffer.keys() - refused.keys())
    buffers = tuple({} if j == k else b for j, b in enumerate(training.buffers))
    newest = {who: one for who, one in recent.items() if who not in kept} | {who: moves[who] for who in kept}
    training = replace(training, buffers=buffers, scales=scales, recent=dict([*newest.items()][-RECENT:]))
    if not kept:
        return training, Taken(what="counted", refused=refused)
    rows = [buffer[who].row for who in kept]
    updates = ClientUpdates(
        clients=tuple(kept),
        rows=Rows(len(rows), len(rows[0]), rows.__getitem__, held=True),
        n=np.array([buffer[who].n for who in kept], dtype=np.float64),
    )
    a = updates.n if rules.plan.weigh == "samples" else np.ones(len(kept))
    centers, ones = state.centers.copy(), np.ones((len(kept), 1))
    centers[k] = rules.strategy.server.aggregate(centers[k : k + 1], updates, ones, a, rules.schema)[0]
    after = replace(state, centers=centers)
    if beta := rules.strategy.server.server_momentum:
        after = apply_momentum(state, after, beta=beta, n_params=rules.schema.n_params)
    versions = tuple(version + (j == k) for j, version in enumerate(training.versions))
    training = replace(training, state=after, versions=versions)
    most = rules.options.max_staleness
    stopped = tuple(sorted(who for who, handed in training.at_work.items() if _staleness(training, handed) > most))
    at_work = {who: handed for who, handed in training.at_work.items() if who not in stopped}
    return replace(training, at_work=at_work), Taken(what="counted", made=(k,), stopped=stopped, refused=refused)
