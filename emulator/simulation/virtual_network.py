"""Devices in one process and a network in virtual time, behind the same `ask` that the server offers a strategy.

`coordinator.rounds.exchange_rules` decides which replies count and when an exchange closes, as on the server. Devices
take virtual seconds by their profile, may be away or drop out, and run the client's own training code. A device that is
away receives its task, and reports that it has finished, when it is back; a transfer under way still arrives.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from coordinator.rounds import exchange_rules
from coordinator.rounds.over_selection import needs_all
from coordinator.rounds.update_validation import (
    MAX_UPDATE_RATIO,
    MAX_UPDATE_RMS,
    ReplySpec,
    delta_base,
    outliers,
    update_moves,
    validate_reply,
)
from coordinator.strategies.base import Exchange, Fleet, Replies, StoredReplies, learned, notify_reply
from edge_client.data.dataset import DeviceData
from edge_client.errors import ConfigError, Malformed, UsageError
from edge_client.protocol.program import Program
from edge_client.protocol.secure.masks import packed_size
from edge_client.protocol.summed_task import SummedFit, SummedProbe
from edge_client.protocol.task import Array, ClientId, Fit, Flat, OwnModel, Probe, Reply, Task
from edge_client.training.fit_probe import fit_result, make_job, run_probe
from edge_client.training.learner import Learner, TrainedModel, TrainingJob
from edge_client.training.summed import evaluation_words
from emulator.simulation import checkpoint
from emulator.simulation.attacks import Attack, no_attack
from emulator.simulation.codec_channel import CodecChannel
from emulator.simulation.device_profiles import DeviceProfile
from emulator.simulation.drawn_devices import DrawnDevices
from emulator.simulation.probes_together import run_probes
from emulator.simulation.spill import SpilledModels
from emulator.simulation.summed_devices import SummedDevices, emulated_secret

Record = Mapping[str, Any]
WORDS = "words"  # the slot of a device's words among those of an exchange
INLINE_BYTES = 2_048  # a smaller reply travels inside its message, without a credit


def round_through_f32_delta(task: Fit, vector: Flat) -> Flat:
    """What the server decodes when a device sends `vector` in codec f32: base + float32(vector - base)."""
    base = task.start if isinstance(task.start, np.ndarray) else task.anchor
    base32 = np.zeros(vector.shape, np.float32) if base is None else base.astype(np.float32)
    return base32 + (vector.astype(np.float32) - base32)


def no_rounding(task: Fit, vector: Flat) -> Flat:  # noqa: ARG001 - as f32_delta
    """No rounding, for runs in float64."""
    return vector


@dataclass(kw_only=True)
class EmulatedDevices:
    """Emulated devices that share one learner; each has its own data, models by slot, and posterior [M, n]."""

    learner: Learner
    local: Mapping[ClientId, DeviceData]
    wire: Callable[[Fit, Flat], Flat] = round_through_f32_delta
    own: MutableMapping[tuple[ClientId, str], Flat] = field(default_factory=SpilledModels)
    posterior: dict[ClientId, Array] = field(default_factory=dict)  # what the round's last probe left
    asks_own: bool = field(default=False, init=False)  # whether some task has named a device's own model
    forgotten: bool = field(default=False, init=False)  # whether those of a resumed run were not kept
    sums: SummedDevices = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.sums = SummedDevices(own=self.own, posterior=self.posterior)

    @property
    def program(self) -> Program:
        return self.learner.program

    @property
    def fleet(self) -> Fleet:
        if isinstance(self.local, DrawnDevices):
            return self.local.fleet
        return {c: len(self.local[c].train) for c in sorted(self.local)}

    def open_round(self) -> None:
        """Discard the posteriors that the probes of the last round left for its fits.

        Of devices that are drawn, also the models of their own that no task will name.
        """
        if isinstance(self.local, DrawnDevices) and not self.asks_own:
            self.own.clear()
        self.posterior.clear()
        self.sums.open_round()

    def answer(self, who: ClientId, task: Task) -> Reply:
        """Carry the task out as the real client does. Raises Malformed with the code of a refusal."""
        ((_, outcome),) = self._each({who: task})
        if isinstance(outcome, Malformed):
            raise outcome
        return outcome

    def answers(self, tasks: Exchange) -> Mapping[ClientId, Reply | str]:
        """Each device's reply, or the code of its refusal."""
        found = dict(self.each_answer(tasks))
        return {who: found[who] for who in tasks}

    def each_answer(self, tasks: Exchange) -> Iterator[tuple[ClientId, Reply | str]]:
        """`answers` one at a time, in any order: the words of a device for a sum are made when it is its turn."""
        return ((who, o.code if isinstance(o, Malformed) else o) for who, o in self._each(tasks))

    def _each(self, tasks: Exchange) -> Iterator[tuple[ClientId, Reply | Malformed]]:
        sums = {who: task for who, task in tasks.items() if isinstance(task, SummedFit)}
        yield from self.sums.answers(self.learner, self.local, sums, self._outcomes)
        rest = {who: task for who, task in tasks.items() if who not in sums}
        found = self._outcomes(rest)
        yield from ((who, found[who]) for who in rest)

    def _outcomes(self, tasks: Exchange) -> dict[ClientId, Reply | Malformed]:
        """The learner gets all fits at once, so that it may batch them over devices."""
        found: dict[ClientId, Reply | Malformed] = {}
        jobs: dict[ClientId, TrainingJob] = {}
        probes = {who: task for who, task in tasks.items() if isinstance(task, Probe)}
        found |= run_probes(self.learner, probes, lambda learner, who: self._probed(learner, who, probes[who]))
        for who, task in tasks.items():
            if isinstance(task, SummedProbe):
                drawn = emulated_secret(zlib.crc32(who.encode()))  # the tasks of all devices have one seed
                how: dict[str, Any] = {"own": partial(self._own, who), "drawn": drawn}
                found[who] = _result_or_refusal(partial(evaluation_words, self.learner, task, self.local[who], **how))
            elif isinstance(task, Probe):
                continue
            elif isinstance(mine := _result_or_refusal(partial(self._job, who, task)), TrainingJob):
                jobs[who] = mine
            else:
                found[who] = mine
        for (who, mine), trained in zip(jobs.items(), self.learner.train(list(jobs.values())), strict=True):
            found[who] = _result_or_refusal(partial(self._fitted, who, mine.task, trained))
        return found

    def _job(self, who: ClientId, task: Fit) -> TrainingJob:
        own, posterior = self._own(who, task.slot), self.posterior.get(who)
        fixed = self.learner.fixed_batch
        return make_job(self.program, task, self.local[who].train, own=own, posterior=posterior, fixed_batch=fixed)

    def _fitted(self, who: ClientId, task: Fit, trained: TrainedModel) -> Reply:
        fitted, n = fit_result(task, trained), len(self.local[who].train)
        self.own[who, task.slot] = fitted.vector
        if not task.upload:
            return Reply(n=n, losses=np.array([fitted.loss]))
        return Reply(n=n, update=self.wire(task, fitted.vector))

    def _probed(self, learner: Learner, who: ClientId, task: Probe) -> Reply | Malformed:
        keep = partial(self.posterior.__setitem__, who)
        return _result_or_refusal(
            lambda: run_probe(learner, task, self.local[who], own=partial(self._own, who), keep=keep)
        )

    def keep(self, folder: Path) -> None:
        checkpoint.save_models(folder, "own", self.own)

    def recall(self, folder: Path) -> None:
        checkpoint.load_models(folder, self.local.keys(), self.own)

    def fetched(self, who: ClientId, task: Task) -> list[Flat]:
        """The models that the device downloads for a task: each once, and no `init` where it has a model of its own."""
        self._note(task)
        if isinstance(task, Probe):
            own = [m.init for m in task.models if isinstance(m, OwnModel) and self._own(who, m.slot) is None]
            named = [*own, *(m for m in task.models if not isinstance(m, OwnModel))]
        else:
            has = isinstance(task.start, str) and self._own(who, task.slot) is not None
            start = None if isinstance(task.start, str) else task.start
            named = [start, None if has else task.init, task.anchor, task.linear]
        if isinstance(task, SummedFit):
            named = [*named, *task.centers] if len(task.centers) > 1 else named
        return list({id(v): v for v in named if v is not None}.values())

    def _note(self, task: Task) -> None:
        """A checkpoint has the own models once a task has named one. A method names one in its first round or never."""
        if isinstance(task, SummedFit):
            self.asks_own = True
        elif isinstance(task, Fit):
            self.asks_own |= isinstance(task.start, str) or task.buffers == "own"
        else:
            self.asks_own |= task.buffers == "own" or any(isinstance(model, OwnModel) for model in task.models)
        if self.asks_own and self.forgotten:
            raise ConfigError("the checkpoint lacks the devices' own models", hint="run again without --resume")

    def _own(self, who: ClientId, slot: str) -> Flat | None:
        return self.own.get((who, slot))


T = TypeVar("T")


def _result_or_refusal(do: Callable[[], T]) -> T | Malformed:
    """The value of `do`, or the refusal that it raises."""
    try:
        return do()
    except Malformed as refusal:
        return refusal


class VirtualNetwork:
    """Delivers exchanges to the devices in virtual time. `ask` is the driver of a round's generator of exchanges.

    `seed` draws when devices are away and which tasks they drop. Updates travel over `channel` and pass the server's
    checks; `refused` maps a device whose update failed a check to the reason. `wanted` replies close an exchange that
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
        self.wanted: int | None = None
        self._round, self._number = 0, itertools.count()
        self.now_s = self.opened_s = 0.0
        self.bytes_down = self.bytes_up = self.local_steps = self.asked = self.answered = 0

    def open_round(self, number: int) -> None:
        """Count exchanges, bytes, local steps, tasks asked and answered, and seconds from here."""
        self._round, self._number, self.opened_s = number, itertools.count(), self.now_s
        self._devices.open_round()
        self.bytes_down = self.bytes_up = self.local_steps = self.asked = self.answered = 0
        self.refused = {}

    def to_json(self, folder: Path) -> Record:
        """The state between rounds as JSON types; the codec's residuals are written into `folder`."""
        return {"now_s": self.now_s, "scales": self._scales, "since": self.wire.keep(folder)}

    def recall(self, facts: Record, folder: Path) -> None:
        self.now_s = self.opened_s = float(facts["now_s"])
        self._scales = {str(key): float(value) for key, value in facts["scales"].items()}
        self.wire.recall(folder, facts["since"])

    def ask(self, exchange: Exchange) -> Replies:
        """Play one exchange through the round's state machine; the replies that it closed with, sorted by client.

        Raises UsageError for a task of a device that the fleet has not.
        """
        if strange := sorted(str(who) for who in exchange if who not in self._samples):
            hint = f"ask devices of `fleet`, which `round` receives, as {min(self._samples)!r}"
            raise UsageError(f"the method asks {strange[0]!r}, which is no device of this run", hint=hint)
        opened = exchange_rules.open_exchange(
            run="simulation",
            round=self._round,
            number=next(self._number),
            asked=exchange,
            quorum=1,
            now_s=self.now_s,
            deadline_s=self._deadline_s,
            goal=None if needs_all(exchange) else self.wanted,
        )
        replies = _VirtualExchange(self, exchange, opened).until_closed()
        self.asked, self.answered = self.asked + len(exchange), self.answered + len(replies)
        return learned(exchange, replies)

    def ask_beside(self, exchange: Exchange) -> Replies:
        """`ask`, but beside the training: it takes none of the run's time."""
        before_s = self.now_s
        replies = self.ask(exchange)
        self.now_s = before_s
        return replies

    def send(self, who: ClientId, task: Task, opened: exchange_rules.OpenExchange) -> float:
        """Deliver a task once the device is reachable; -> when the device finishes, infinity if it never does."""
        begins_s, profile = self.reachable_s(who, self.now_s), self._profiles[who]
        if begins_s >= opened.closes_at_s:
            return math.inf
        size = 4 * sum(v.size for v in self._devices.fetched(who, task))
        self.bytes_down += size
        part = profile.silent_after(who, opened.round, opened.number, seed=self._seed)
        if part is not None:
            self.local_steps += int(part * task.steps) if isinstance(task, Fit) else 0
            return math.inf
        return begins_s + profile.down_s(size) + profile.work_s(task, self._samples[who])

    def reachable_s(self, who: ClientId, at_s: float) -> float:
        """The first moment from `at_s` on at which the device is reachable."""
        return self._profiles[who].reachable_s(who, at_s, seed=self._seed)

    def upload_ends_s(self, who: ClientId, size: int) -> float:
        """Let a device send `size` bytes as soon as it is reachable; -> when they will have arrived."""
        self.bytes_up += size
        return self.reachable_s(who, self.now_s) + self._profiles[who].up_s(size)

    def run_tasks(self, tasks: Exchange, words: SpilledModels) -> Mapping[ClientId, AdmittedReply | str]:
        """The devices' replies as the server decodes them, or the codes of refusals by the device or by the server.

        The words of a sum are put into `words`, and are not in the reply.
        """
        self.local_steps += sum(task.steps for task in tasks.values() if isinstance(task, Fit))
        return {who: self._sent(who, tasks[who], said, words) for who, said in self._devices.each_answer(tasks)}

    def accepted_devices(self, keys: frozenset[ClientId], sent: Mapping[ClientId, AdmittedReply]) -> list[ClientId]:
        """The devices whose replies an exchange closes with, sorted; devices with outlier updates are left out."""
        moves = {who: sent[who].moves for who in keys}
        refused, self._scales = outliers(moves, self._scales, ratio=self._ratio)
        self.refused |= refused
        return sorted(keys - refused.keys())

    def _sent(self, who: ClientId, task: Task, said: Reply | str, words: SpilledModels) -> AdmittedReply | str:
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
            reply, size = self.wire.send(who, task, self._lie(who, task, said), self._round)
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


@dataclass(frozen=True, kw_only=True)
class AdmittedReply:
    """A reply that passed the checks: its size in bytes, its digest, and how far it moves."""

    reply: Reply
    size: int
    digest: str
    moves: Mapping[str, float]


class _VirtualExchange:
    """One exchange in virtual time: a heap of due events, and the commands of the state machine."""

    def __init__(self, network: VirtualNetwork, exchange: Exchange, opened: exchange_rules.OpenExchange) -> None:
        self._network, self._exchange, self._state = network, exchange, opened
        self._due: list[
            tuple[float, int, exchange_rules.Event | ClientId]
        ] = []  # a client id: that device reports that it has finished
        self._order = itertools.count()  # events that are due at the same time happen in the order of planning
        self._answers: dict[ClientId, AdmittedReply] = {}
        self._uploading: set[ClientId] = set()
        self._keys: list[ClientId] | None = None
        self._words = SpilledModels()
        ends_s = {who: network.send(who, exchange[who], opened) for who in sorted(exchange)}
        # A device that is still training when the exchange closes does not answer.
        in_time = {who: s for who, s in ends_s.items() if s < opened.closes_at_s}
        for who, end_s in in_time.items():
            self._plan(network.reachable_s(who, end_s), who)
        self._worked = network.run_tasks({who: exchange[who] for who in in_time}, self._words)
        self._happens(exchange_rules.Tick())  # an exchange without tasks closes at once

    def until_closed(self) -> Replies:
        while self._keys is None:
            if not self._due or self._state.wakes_at_s <= self._due[0][0]:
                self._network.now_s = self._state.wakes_at_s
                self._happens(exchange_rules.Tick())
            else:
                self._network.now_s, _, event = heapq.heappop(self._due)
                if told := self._finished(event) if isinstance(event, str) else event:
                    self._happens(told)
        replies = {c: self._answers[c].reply for c in self._keys}
        if not len(self._words):
            return replies
        return StoredReplies(replies, lambda c: replace(replies[c], words=self._words.get((c, WORDS))), {})

    def _plan(self, at_s: float, event: exchange_rules.Event | ClientId) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), event))

    def _finished(self, who: ClientId) -> exchange_rules.Event | None:
        """The event that the device reports; None where the reply is small and was sent with the report."""
        answer = self._worked[who]
        if isinstance(answer, str):
            return exchange_rules.Refused(who, answer)
        self._answers[who] = answer
        if answer.size > self._network.inline_bytes:
            return exchange_rules.Ready(who, answer.digest, answer.size)
        self._plan(self._network.upload_ends_s(who, answer.size), exchange_rules.Stored(who, answer.digest))
        return None

    def _happens(self, event: exchange_rules.Event) -> None:
        self._state, commands = exchange_rules.advance(self._state, event, self._network.now_s)
        for command in commands:
            if isinstance(command, exchange_rules.Go) and command.cid not in self._uploading:
                self._uploading.add(command.cid)
                ends_s = self._network.upload_ends_s(command.cid, self._answers[command.cid].size)
                self._plan(ends_s, exchange_rules.Stored(command.cid, command.sha256))
            elif isinstance(command, exchange_rules.Ack) and command.status == "ok":
                self._network.wire.mark_counted(command.cid)
                notify_reply(self._exchange, command.cid, self._answers[command.cid].reply)
            elif isinstance(command, exchange_rules.Close):
                self._keys = self._network.accepted_devices(command.keys, self._answers)


def _digest(reply: Reply) -> str:
    sent = reply.update if reply.words is None else reply.words
    data = b"" if sent is None else np.ascontiguousarray(sent).tobytes()
    return hashlib.sha256(data).hexdigest()
