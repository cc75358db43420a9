"""A network in virtual time before emulated devices, behind the same `ask` that the server offers a strategy.

`coordinator.rounds.exchange_rules` decides which replies count and when an exchange closes, as on the server. Devices
take virtual seconds by their profile, and may be away or drop out. A device that is away receives its task, and
reports that it has finished, when it is back; a transfer under way still arrives.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.rounds.exchange_rules import OpenExchange
from coordinator.rounds.over_selection import beside_fits, goal_of
from coordinator.rounds.update_validation import (
    MAX_UPDATE_RATIO,
    MAX_UPDATE_RMS,
    ReplySpec,
    delta_base,
    outliers,
    update_moves,
    validate_reply,
)
from coordinator.strategies.base import Exchange, Replies, SealedSums, StoredReplies, SumByCenter, learned, notify_reply
from edge_client.errors import ConfigError, Malformed, UsageError
from edge_client.protocol.secure.masks import packed_size
from edge_client.protocol.summed_task import SummedFit, SummedProbe
from edge_client.protocol.task import ClientId, Reply, Task
from emulator.simulation.attacks import Attack, no_attack
from emulator.simulation.codec_channel import CodecChannel
from emulator.simulation.device_profiles import DeviceProfile
from emulator.simulation.emulated_devices import EmulatedDevices
from emulator.simulation.spill import SpilledModels

Record = Mapping[str, Any]
WORDS = "words"  # the slot of a device's words among those of an exchange
INLINE_BYTES = 2_048  # a smaller reply travels inside its message, without a credit


class VirtualNetwork:
    """Delivers exchanges to the devices in virtual time. `ask` is the driver of a round's generator of exchanges.

    `seed` draws when devices are away and which tasks they drop. Updates travel over `channel` and pass the server's
    checks; `refused` maps a device whose update failed a check to the reason, `no_sum` tells why sums were not made, as
    coordinator/runtime/exchange/masked_sums.py does. `wanted` replies close an exchange that
    does not need all; None: those of every device.
    Raises ConfigError where an exchange would never end.
    """

    def __init__(  # noqa: PLR0913 - a network has these settings
        self,
        devices: EmulatedDevices,
        profiles: Mapping[ClientId, DeviceProfile],
        *,
        deadline_s: float = 600.0,
        inline_bytes: int = INLINE_BYTES,
        seed: int = 0,
        channel: CodecChannel | None = None,
        attack: Attack = no_attack,
        max_update_ratio: float = MAX_UPDATE_RATIO,
    ) -> None:
        self._devices, self._profiles, self._deadline_s, self._seed = devices, profiles, deadline_s, seed
        if deadline_s == math.inf and any(p.dropout or not p.availability for p in profiles.values()):
            raise ConfigError(
                "without a deadline, an exchange waits for ever for a device that does not answer",
                hint="set a deadline, or use profiles with dropout = 0 and availability above 0",
            )
        self.inline_bytes, self._samples = inline_bytes, devices.fleet
        self.wire, self._schema = channel or CodecChannel(devices.program.schema), devices.program.schema
        self._positions = devices.program.positions
        self._lie, self._ratio, self._scales = attack, max_update_ratio, dict[str, float]()
        self.refused: dict[ClientId, str] = {}
        self.no_sum: list[str] = []
        self.wanted: int | None = None
        self._round, self._number = 0, itertools.count()
        self.now_s = self.opened_s = 0.0
        self.bytes_down = self.bytes_up = self.local_steps = self.asked = self.answered = 0

    def open_round(self, number: int) -> None:
        """Count exchanges, bytes, local steps, tasks asked and answered, and seconds from here."""
        self._round, self._number, self.opened_s = number, itertools.count(), self.now_s
        self._devices.open_round()
        self.bytes_down = self.bytes_up = self.local_steps = self.asked = self.answered = 0
        self.refused, self.no_sum = {}, []

    def to_json(self, folder: Path) -> Record:
        """The state between rounds as JSON types; the codec's residuals are written into `folder`."""
        return {"now_s": self.now_s, "scales": self._scales, "since": self.wire.keep(folder)}

    def recall(self, facts: Record, folder: Path) -> None:
        self.now_s = self.opened_s = float(facts["now_s"])
        self._scales = {str(key): float(value) for key, value in facts["scales"].items()}
        self.wire.recall(folder, facts["since"])

    def ask(self, exchange: Exchange) -> Replies:
        """Play one exchange by the rules of a server; the replies that it closed with, sorted by client.

        Raises UsageError for a task of a device that the fleet has not.
        """
        if strange := sorted(str(who) for who in exchange if who not in self._samples):
            hint = f"ask devices of `fleet`, which `round` receives, as {min(self._samples)!r}"
            raise UsageError(f"the method asks {strange[0]!r}, which is no device of this run", hint=hint)
        rules = OpenExchange(
            asked=exchange,
            quorum=1,
            now_s=self.now_s,
            deadline_s=self._deadline_s,
            goal=goal_of(exchange, self.wanted),
            beside=beside_fits(exchange),
        )
        replies = _VirtualExchange(self, exchange, rules, next(self._number)).until_closed()
        self.asked, self.answered = self.asked + len(exchange), self.answered + len(replies)
        found = learned(exchange, replies)
        if isinstance(exchange, SumByCenter) and isinstance(found, SealedSums):
            self.no_sum += _missing_sums(exchange, found, replies)
        return found

    def ask_beside(self, exchange: Exchange) -> Replies:
        """`ask`, but beside the training: it takes none of the run's time."""
        before_s = self.now_s
        replies = self.ask(exchange)
        self.now_s = before_s
        return replies

    def send(self, who: ClientId, task: Task, number: int, closes_at_s: float) -> float:
        """Deliver task `number` once the device is reachable; -> when it finishes, infinity if it never does."""
        begins_s, profile = self.reachable_s(who, self.now_s), self._profiles[who]
        if begins_s >= closes_at_s:
            return math.inf
        size = 4 * sum(v.size for v in self._devices.fetched(who, task))
        self.bytes_down += size
        steps, models = self._devices.work(who, task)
        part = profile.silent_after(who, self._round, number, seed=self._seed)
        if part is not None:
            self.local_steps += int(part * steps)
            return math.inf
        works_s = profile.work_s(steps, models, samples=self._samples[who], batch=task.batch)
        return begins_s + profile.down_s(size) + works_s

    def reachable_s(self, who: ClientId, at_s: float) -> float:
        """The first moment from `at_s` on at which the device is reachable."""
        return self._profiles[who].reachable_s(who, at_s, seed=self._seed)

    def upload_ends_s(self, who: ClientId, size: int) -> float:
        """Let a device send `size` bytes as soon as it is reachable; -> when they will have arrived."""
        self.bytes_up += size
        return self.reachable_s(who, self.now_s) + self._profiles[who].up_s(size)

    def run_tasks(
        self, tasks: Exchange, words: SpilledModels, given: Mapping[ClientId, int] | None = None
    ) -> Mapping[ClientId, AdmittedReply | str]:
        """The devices' replies as the server decodes them, or the codes of refusals by the device or by the server.

        The words of a sum are put into `words`, and are not in the reply. `given` is the round in which each device got
        its task, where that is not this round.
        """
        self.local_steps += sum(self._devices.work(who, task)[0] for who, task in tasks.items())
        rounds = dict.fromkeys(tasks, self._round) if given is None else given
        answers = self._devices.each_answer(tasks)
        return {who: self._sent(who, tasks[who], said, words, rounds[who]) for who, said in answers}

    def accepted_devices(self, keys: frozenset[ClientId], sent: Mapping[ClientId, AdmittedReply]) -> list[ClientId]:
        """The devices whose replies an exchange closes with, sorted; devices with outlier updates are left out."""
        moves = {who: sent[who].moves for who in keys}
        refused, self._scales = outliers(moves, self._scales, ratio=self._ratio)
        self.refused |= refused
        return sorted(keys - refused.keys())

    def _sent(
        self,
        who: ClientId,
        task: Task,
        said: Reply | str,
        words: SpilledModels,
        round: int,  # noqa: A002 - the protocol's word
    ) -> AdmittedReply | str:
        if isinstance(said, str):
            self.refused[who] = said
            return said
        if isinstance(task, SummedFit | SummedProbe):
            if said.words is None:
                raise TypeError(f"the answer of {who} has no words")
            words[who, WORDS] = said.words
            size = packed_size(said.words.size, task.scale.bits)
            return AdmittedReply(reply=Reply(n=said.n), size=size, digest=_digest(said), moves={})
        try:
            reply, size = self.wire.send(who, task, self._lie(who, task, said), round)
            question = ReplySpec(
                task=task,
                schema=self._schema,
                samples=self._samples[who],
                codec="f32",
                base="",
                base_vector=delta_base(task)[1],
                max_update_rms=MAX_UPDATE_RMS,
                positions=self._positions,
            )
            reply = validate_reply(question, reply)
        except Malformed as wrong:
            self.refused[who] = str(wrong)
            return wrong.code
        return AdmittedReply(reply=reply, size=size, digest=_digest(reply), moves=update_moves(question, reply))


def _missing_sums(exchange: SumByCenter, made: SealedSums, answered: Collection[ClientId]) -> list[str]:
    """Why groups of an exchange have no sum; none for tasks that tell nothing."""
    if not all(isinstance(task, SummedFit | SummedProbe) for task in exchange.values()):
        return []
    counts = dict.fromkeys((exchange.groups.get(who, 0) for who in sorted(exchange)), 0)
    for who in answered:
        counts[exchange.groups.get(who, 0)] += 1
    return [
        f"{count} devices answered; at least {exchange.least} must"
        for group, count in sorted(counts.items())
        if group not in made.members
    ]


@dataclass(frozen=True, kw_only=True)
class AdmittedReply:
    """A reply that passed the checks: its size in bytes, its digest, and how far it moves."""

    reply: Reply
    size: int
    digest: str
    moves: Mapping[str, float]


class _VirtualExchange:
    """One exchange in virtual time: a heap of what happens when, and the rules that a server keeps to."""

    def __init__(self, network: VirtualNetwork, exchange: Exchange, rules: OpenExchange, number: int) -> None:
        self._network, self._exchange, self._rules = network, exchange, rules
        self._due: list[tuple[float, int, Callable[[ClientId], Collection[ClientId]], ClientId]] = []
        self._order = itertools.count()  # what is due at the same time happens in the order of planning
        self._answers: dict[ClientId, AdmittedReply] = {}
        self._uploading: set[ClientId] = set()
        self._words = SpilledModels()
        ends_s = {who: network.send(who, exchange[who], number, rules.closes_at_s) for who in sorted(exchange)}
        # A device that is still training when the exchange closes does not answer.
        in_time = {who: s for who, s in ends_s.items() if s < rules.closes_at_s}
        for who, end_s in in_time.items():
            self._plan(network.reachable_s(who, end_s), self._finished, who)
        self._worked = network.run_tasks({who: exchange[who] for who in in_time}, self._words)

    def until_closed(self) -> Replies:
        network, rules = self._network, self._rules
        while not rules.is_over(network.now_s):
            if not self._due or rules.wakes_at_s <= self._due[0][0]:
                network.now_s = rules.wakes_at_s
                granted: Collection[ClientId] = rules.tick(network.now_s)
            else:
                network.now_s, _, happens, who = heapq.heappop(self._due)
                granted = happens(who)
            for who in granted:
                self._begin_upload(who)
        keys = network.accepted_devices(frozenset(rules.accepted), self._answers)
        replies = {c: self._answers[c].reply for c in keys}
        if not len(self._words):
            return replies
        return StoredReplies(replies, lambda c: replace(replies[c], words=self._words.get((c, WORDS))), {})

    def _plan(self, at_s: float, happens: Callable[[ClientId], Collection[ClientId]], who: ClientId) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), happens, who))

    def _finished(self, who: ClientId) -> Collection[ClientId]:
        """The device reports -> the devices that may upload; a small reply is sent with the report."""
        answer = self._worked[who]
        if isinstance(answer, str):
            return self._rules.refuse(who, answer, self._network.now_s)
        self._answers[who] = answer
        if answer.size > self._network.inline_bytes:
            return self._rules.offer(who, answer.size, self._network.now_s)
        return [who]

    def _begin_upload(self, who: ClientId) -> None:
        if who not in self._uploading:
            self._uploading.add(who)
            self._plan(self._network.upload_ends_s(who, self._answers[who].size), self._arrived, who)

    def _arrived(self, who: ClientId) -> Collection[ClientId]:
        answer = self._answers[who]
        if answer.reply.update is not None:  # else what was lost is of an earlier update, which came too late
            self._network.wire.mark_counted(who)
        notify_reply(self._exchange, who, answer.reply)
        return self._rules.accept({who: answer.digest}, self._network.now_s)


def _digest(reply: Reply) -> str:
    sent = reply.update if reply.words is None else reply.words
    data = b"" if sent is None else np.ascontiguousarray(sent).tobytes()
    return hashlib.sha256(data).hexdigest()
