"""Devices in virtual time that no round waits for: drives the state machine of rounds/asynchronous/training.py.

Devices take virtual seconds by their profiles, as in virtual_network.py, whose devices, channel, checks and counters
these are. A device that is away gets no task; one that leaves while it works reports when it is back. A task without an
answer after `deadline_s` is taken back. What happens at the same moment has all happened before tasks are handed out.
A device that refused a task, or let it expire, gets no other in this round.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from coordinator.rounds.asynchronous import training as machine
from coordinator.rounds.asynchronous.counts import RoundCounts
from coordinator.rounds.asynchronous.snapshot import facts_of, training_of
from coordinator.rounds.asynchronous.training import Rules, Taken, Training
from coordinator.rounds.round_record import AsynchronousRecord
from coordinator.strategies.base import State
from edge_client.protocol.task import ClientId, Fit, Flat, Reply, Task
from emulator.simulation import checkpoint
from emulator.simulation.spill import SpilledModels
from emulator.simulation.virtual_network import AdmittedReply, VirtualNetwork

DONE, ARRIVED, EXPIRED = "done", "arrived", "expired"
Due = tuple[float, int, str, ClientId, int]  # when, in which order, what, the device, the number of its task


@dataclass(kw_only=True)
class TaskUnderWay:
    """A task on its device: its SGD steps, the round that gave it, from when until when it takes.

    `sent` is the reply once it was computed here, at the latest for a checkpoint; `refused` says why it is none. They
    count when the device has finished, so that checkpoints change no number.
    """

    task: Task | None  # None: computed before the run was interrupted, or never
    steps: int
    begins_s: float
    ends_s: float
    sent: AdmittedReply | str | None = None
    round: int = 0  # 0: of an older version's checkpoint
    refused: str = ""


class AsynchronousNetwork:
    """Plays the rounds of one run; what is under way at the end of a round goes on in the next."""

    def __init__(self, network: VirtualNetwork, rules: Rules, *, deadline_s: float) -> None:
        self.network, self.rules, self._deadline_s = network, rules, deadline_s
        self._training: Training | None = None
        self._work: dict[ClientId, TaskUnderWay] = {}
        self._due: list[Due] = []
        self._order = itertools.count()
        self._failed: set[ClientId] = set()
        self._counts, self._round = RoundCounts(), 0

    def needs_round(self, state: State) -> bool:
        """Whether the next round is one that waits for its devices: the method's centers are not apart yet."""
        return self._training is None and self.rules.plan.needs_round(state)

    def play(self, state: State, number: int) -> State:
        """Round `number`, which begins with `state`; it ends when as many updates have come as fill the buffers."""
        training = machine.begin_training(state) if self._training is None else self._training
        self._round, self._failed, self._counts = number, set(), RoundCounts()
        wanted = machine.round_target(self.rules)
        while len(self._counts.staleness) < wanted:
            if self._due_s > self.network.now_s:  # all of this moment has happened
                training = self._hand_out(training)
            next_s = min(self._due_s, self._next_return_s(training))
            if next_s == math.inf:
                break  # no device is at work, and none may be given a task
            self.network.now_s = next_s
            if self._due_s == next_s:
                training = self._happens(training)
        if self.rules.strategy.batch_norm == "local":
            self._compute()  # devices evaluate with statistics of their own, which must not depend on checkpoints
        self._training = training
        return machine.served_state(training, self.rules)

    def record(self) -> AsynchronousRecord:
        """What happened in the last round, and where the centers are."""
        return self._counts.record(self._training.versions if self._training else ())

    @property
    def _due_s(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def _hand_out(self, training: Training) -> Training:
        def may_get(who: ClientId) -> bool:
            return self._is_present(who) and not self._counts.has_its_part(who, training, self.rules)

        after, tasks, made = machine.hand_out(training, self.rules, self._round, may_get)
        for taken in made:
            self._note(taken)
        for who, task in tasks.items():
            self._send(who, task, after.at_work[who].number)
        return after

    def _is_present(self, who: ClientId) -> bool:
        return who not in self._failed and self.network.reachable_s(who, self.network.now_s) <= self.network.now_s

    def _next_return_s(self, training: Training) -> float:
        """When the next device that may be given a task comes back, if there is room for it."""
        if len(training.at_work) >= self.rules.options.concurrency:
            return math.inf
        busy, now_s = training.at_work.keys() | training.buffered | self._failed, self.network.now_s
        returns = (self.network.reachable_s(who, now_s) for who in self.rules.fleet if who not in busy)
        return min((at_s for at_s in returns if at_s > now_s), default=math.inf)

    def _send(self, who: ClientId, task: Task, number: int) -> None:
        now_s = self.network.now_s
        before = self.network.local_steps
        ends_s = self.network.send(who, task, number, now_s + self._deadline_s)
        self.network.local_steps = before  # counted when the work ends
        steps = task.steps if isinstance(task, Fit) else 0
        self._work[who] = TaskUnderWay(task=task, steps=steps, begins_s=now_s, ends_s=ends_s, round=self._round)
        if ends_s < math.inf:
            self._plan(self.network.reachable_s(who, ends_s), DONE, who, number)
        if self._deadline_s < math.inf:
            self._plan(now_s + self._deadline_s, EXPIRED, who, number)

    def _plan(self, at_s: float, what: str, who: ClientId, number: int) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), what, who, number))

    def _happens(self, training: Training) -> Training:
        _, _, what, who, number = heapq.heappop(self._due)
        handed = training.at_work.get(who)
        if handed is None or handed.number != number:
            return training  # its task was stopped
        if what == EXPIRED:
            self._counts.expired += 1
            self._failed.add(who)
            self._ends(who)
            return machine.release(training, who)
        sent = self._reply(who)
        if isinstance(sent, str):
            self.network.refused[who] = self._work[who].refused or sent
            self._failed.add(who)
            self._ends(who)
            return machine.release(training, who)
        if what == DONE:
            self._plan(self.network.upload_ends_s(who, sent.size), ARRIVED, who, number)
            return training
        return self._arrived(training, who, sent)

    def _arrived(self, training: Training, who: ClientId, sent: AdmittedReply) -> Training:
        self._ends(who)
        self.network.answered += 1
        training, taken = machine.take(training, self.rules, who, sent.reply, sent.moves)
        if taken.task is not None:
            self._send(who, taken.task, training.at_work[who].number)
        elif taken.what == "counted":
            self._counts.count(who, taken.staleness)
            self.network.wire.mark_counted(who)
        self._counts.stale += taken.what == "stale"
        self._note(taken)
        return training

    def _note(self, taken: Taken) -> None:
        """The devices whose tasks were stopped are free, and have worked for a while."""
        self.network.refused |= taken.refused
        self._counts.stale += len(taken.stopped)
        for who in taken.stopped:
            self._ends(who)

    def _ends(self, who: ClientId) -> None:
        """The device does not work on its task any more; its steps so far are counted."""
        work = self._work.pop(who)
        self.network.asked += 1
        if math.isfinite(work.ends_s):  # a device that dropped out is not known to have worked
            took_s, so_far_s = work.ends_s - work.begins_s, self.network.now_s - work.begins_s
            self.network.local_steps += work.steps if so_far_s >= took_s else int(so_far_s / took_s * work.steps)

    def _reply(self, who: ClientId) -> AdmittedReply | str:
        """The device's reply. Everything that is at work is computed together, so that engines may batch it."""
        if self._work[who].sent is None:
            self._compute()
        sent = self._work[who].sent
        if sent is None:
            raise ValueError(f"{who} has no reply")
        return sent

    def _compute(self) -> None:
        steps, refused = self.network.local_steps, self.network.refused
        self.network.refused = {}
        todo = {
            who: work.task
            for who, work in sorted(self._work.items())
            if work.task is not None and work.sent is None and work.ends_s < math.inf
        }
        given = {who: self._work[who].round for who in todo}
        for who, sent in self.network.run_tasks(todo, SpilledModels(), given).items():
            self._work[who].sent, self._work[who].refused = sent, self.network.refused.get(who, "")
        self.network.local_steps, self.network.refused = steps, refused

    def to_json(self, folder: Path) -> dict[str, Any]:
        """The state between rounds as JSON types; models and updates are written into `folder`."""
        training = self._training
        if training is None:
            return {}
        self._compute()
        vectors: dict[tuple[ClientId, str], Flat] = {}
        for k, buffer in enumerate(training.buffers):
            vectors |= {(who, f"row-{k}"): entry.row for who, entry in buffer.items()}
        for who, handed in training.at_work.items():
            found = self._work[who].sent
            reply = found.reply if isinstance(found, AdmittedReply) else Reply(n=0)
            parts = {"start": handed.start, "update": reply.update, "losses": reply.losses}
            vectors |= {(who, name): value for name, value in parts.items() if value is not None}
        checkpoint.save_models(folder, "under-way", vectors)
        return {
            **facts_of(training),
            "work": {who: _told(work) for who, work in self._work.items()},
            "due": sorted(self._due),
            "open": self.network.wire.keep_open(folder),
        }

    def recall(self, facts: Mapping[str, Any], state: State, folder: Path) -> None:
        """Go on where `to_json` was called, with the `state` after that round."""
        if not facts:
            return
        found: dict[tuple[ClientId, str], Flat] = {}
        checkpoint.load_models(folder, set(facts["at_work"]).union(*facts["buffers"]), found)
        rows = {(k, who): found[who, f"row-{k}"] for k, buffer in enumerate(facts["buffers"]) for who in buffer}
        starts = {who: found[who, "start"] for who in facts["at_work"] if (who, "start") in found}
        self._training = training_of(facts, state, rows, starts)
        for who, work in facts["work"].items():
            sent = work.pop("sent")
            if isinstance(sent, dict):
                vectors = {name: found.get((who, name)) for name in ("update", "losses")}
                sent = AdmittedReply(reply=Reply(n=sent.pop("n"), **vectors), **sent)
            self._work[who] = TaskUnderWay(task=None, sent=sent, **work)
        self._due = [tuple(due) for due in facts["due"]]  # sorted, and so a heap
        self._order = itertools.count(1 + max((due[1] for due in self._due), default=-1))
        self.network.wire.recall_open(folder, facts["open"])


def _told(work: TaskUnderWay) -> dict[str, Any]:
    """As JSON types, without the task, and without the vectors of its reply."""
    told, sent = {f.name: getattr(work, f.name) for f in fields(work) if f.name != "task"}, work.sent
    if isinstance(sent, AdmittedReply):
        told["sent"] = {"n": sent.reply.n, "size": sent.size, "digest": sent.digest, "moves": sent.moves}
    return told
