"""Devices over the network that no round waits for: drives the state machine of rounds/asynchronous/training.py.

It stands where an open exchange stands (live_exchange.py), for one round after another; the tasks and uploads that are
under way at the end of a round go on in the next. Each step of the machine is stored before the machine takes it and
before any device is told: the journal (storage/journal_store.py) decides the order. A round that was interrupted takes
the steps of its journal and goes on from there.

A task has `deadline-s`. A device that refuses a task, or is silent for so long, gets the next one after another such
time, or when it connects again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.rounds.asynchronous import training as machine
from coordinator.rounds.asynchronous.counts import RoundCounts
from coordinator.rounds.asynchronous.training import Rules, Taken, Training
from coordinator.rounds.update_validation import update_moves
from coordinator.runtime.envelope import Envelope
from coordinator.runtime.exchange.reply_recorder import read_reply
from coordinator.runtime.exchange.task_messages import ExchangeContext, PreparedTask, prepare_each
from coordinator.runtime.exchange.upload_receiver import Announcement, UploadPolicy, UploadReceiver
from coordinator.runtime.exchange.uploads import UploadCredits
from coordinator.storage.exchange_store import ExchangeKey, ReplayDiverged, StoredReply
from coordinator.storage.journal_store import END, EXPIRE, HAND, REFUSE, TAKE, OpenedTask, Step
from edge_client.errors import Malformed
from edge_client.protocol.task import ClientId, Reply, Task

BUSY_MS = 2_000  # after which a device without a credit announces its update again
FULL_DISK_S = 5.0  # after which a step that could not be stored is tried again
EXPIRED = "no answer within deadline-s"
STALE = "stale: its center is too many versions further"


@dataclass(kw_only=True)
class SentTask:
    """A task that a device has, until when it has it, and the id of its last message."""

    key: ExchangeKey
    until_s: float
    ident: str = ""
    excused: set[str] = field(default_factory=set)  # failures that it may have once


class LiveUpdates:
    """One run without rounds; `training` is the machine's state and `counts` are those of the round.

    `is_online` says which devices are connected, `newcomers` whether one waits to be let in, which is between rounds.
    """

    late_updates = None  # an update of a task that was stopped is never used

    def __init__(
        self,
        run: str,
        context: ExchangeContext,
        *,
        is_online: Callable[[ClientId], bool],
        newcomers: Callable[[], bool],
    ) -> None:
        self._run, self._is_online, self._newcomers, self._context = run, is_online, newcomers, context
        self._prepared: dict[ClientId, PreparedTask] = {}
        self._sent: dict[ClientId, SentTask] = {}
        self._arrived: dict[ClientId, tuple[StoredReply, Reply]] = {}  # on disk, in the order of their arrival
        self._failed: dict[ClientId, float] = {}  # devices that get no task until then
        self._again_s, self._place, self._round = math.inf, 0, 0
        self.counts, self.refused, self.closed = RoundCounts(), dict[ClientId, str](), True
        policy = UploadPolicy(
            check=lambda _cid, _spec, _reply: None, on_accepted=self._on_accepted, on_refused=self._on_refused
        )
        self._receiver = UploadReceiver(self._prepared, context, policy)
        limits = context.config.transfer
        self._credits = UploadCredits(self._receiver.uploads, limits.credits, limits.in_flight_bytes)
        self._events: deque[Callable[[], None]] = deque()

    # -- a round

    def open_round(self, number: int, training: Training, rules: Rules, rounds: Mapping[ClientId, int]) -> None:
        """Round `number` begins, or goes on after its journal; `rounds` says when each device at work got its task."""
        self._round, self.training, self._rules, self._place = number, training, rules, 0
        self.counts, self.refused, self.closed = RoundCounts(), {}, False
        keys = {who: ExchangeKey(self._run, rounds[who], handed.number) for who, handed in training.at_work.items()}
        self._prepare(keys, {who: machine.task_again(training, rules, who) for who in keys})
        for step in self._context.store.journal.steps(self._run, number):
            self._play(step)
            self._place += 1

    @property
    def rounds(self) -> dict[ClientId, int]:
        """In which round each device at work got its task."""
        return {who: sent.key.round for who, sent in self._sent.items()}

    @property
    def key(self) -> ExchangeKey:
        return ExchangeKey(self._run, self._round, 0)

    def takes(self, said: Announcement) -> bool:
        """Whether this announcement is of a task that its device has."""
        return said.cid in self._sent and self._sent[said.cid].key == said.key

    @property
    def wakes_at_s(self) -> float:
        """When `tick` has something to do."""
        due = (sent.until_s for who, sent in self._sent.items() if who not in self._arrived)
        return min(*self._failed.values(), *due, self._again_s, math.inf)

    def progress(self) -> dict[str, Any]:
        """As that of an exchange, and what tells of a run without rounds: `updates`."""
        busy, now_s = self._receiver.uploads.sizes(), self._context.clock.now_s()
        left_s = min((sent.until_s for sent in self._sent.values()), default=now_s) - now_s
        return {
            "run": self._run,
            "round": self._round,
            "exchange": 0,
            "asked": len(self._sent),
            "wanted": machine.round_target(self._rules),
            "quorum": 0,
            "closed": self.closed,
            "left_s": round(max(0.0, left_s), 1),
            "answered": sorted(self.training.buffered),
            "uploading": sorted(busy),
            "waiting": [],
            "refused": sorted(self._failed),
            "open": sorted(self._sent.keys() - busy.keys()),
            "updates": {
                **self.counts.record(self.training.versions),
                "devices": len(self._rules.fleet),
                "concurrency": self._rules.options.concurrency,
            },
        }

    def begin(self) -> None:
        """Send every task again, and hand out more: in a new process, a new round, after each connection."""
        for who in self._sent:
            self._grant(who)
            self.resend_task(who)
        self.tick()

    def resend_task(self, cid: ClientId) -> None:
        """A device is here: send its task again; one without a task may get one."""
        if cid in self._arrived or self.closed:
            return
        sent = self._sent.get(cid)
        if sent is None:
            self._failed.pop(cid, None)
            self._step()
            return
        left_ms = max(0, int((sent.until_s - self._context.clock.now_s()) * 1000))
        sent.ident = self._context.sender.send(cid, "task", left_ms=left_ms, **self._prepared[cid].fields)

    def tick(self) -> None:
        """Let time pass: tasks without an answer are taken back."""
        self._receiver.sync()
        now_s, self._again_s = self._context.clock.now_s(), math.inf
        self._failed = {who: until_s for who, until_s in self._failed.items() if until_s > now_s}
        for who in [who for who, sent in self._sent.items() if sent.until_s <= now_s and who not in self._arrived]:
            self._end(EXPIRE, who, EXPIRED)
        self._step()

    def close(self) -> None:
        """End the round now, with the updates that it has."""
        if not self.closed and self._store(
            lambda: self._context.store.journal.end_round(self._run, self._round, self._place)
        ):
            self.closed = True

    def finish(self) -> None:
        """The run is over: what is under way is not wanted any more."""
        self._receiver.forget_unsynced()
        self._receiver.uploads.abandon(self._sent)
        self._context.store.journal.stop({who: sent.key for who, sent in self._sent.items()}, "late")
        for who in list(self._sent):
            self._tell_stop(who)
        self._sent.clear()

    # -- what devices send

    def on_ready(self, said: Announcement) -> None:
        """A device announces the update of its task. Raises Malformed with the code of the error answer."""
        asked, update, now_s = self._prepared[said.cid], said.update, self._context.clock.now_s()
        if update.kind != asked.reply_spec.blob_kind:
            raise Malformed("bad_field", f"asked for {asked.reply_spec.blob_kind}, got {update.kind}")
        if update.size > asked.max_size:
            raise Malformed("too_big", f"{update.size} bytes, at most {asked.max_size}")
        if self._receiver.is_unsynced(said.cid) or said.cid in self._arrived:
            self.sync()
            return
        if update.inline is None and self._credits.is_full(said.cid, update.size, now_s):
            self._context.sender.send(said.cid, "err", re=said.ident, code="busy", retry_ms=BUSY_MS)
            return
        self._credits.heard(said.cid, now_s)
        self._receiver.announce(said)
        self._receiver.begin(said.cid)
        self._step()

    def on_block(self, cid: ClientId, label: str | None, index: int, message: bytes) -> None:
        """Take a block of an open upload; any other block is dropped."""
        if self._receiver.on_block(cid, label, index, message):
            self._credits.heard(cid, self._context.clock.now_s())
        self._step()

    def on_nack(self, message: Envelope) -> None:
        """A device refuses its task; `unreachable` is asked once more, as in an exchange."""
        cid, nack = message.cid, message.fields
        sent = self._sent.get(cid)
        if sent is None or nack["re"] != sent.ident or cid in self._arrived:
            return
        if nack["code"] == "unreachable" and self._excuse(cid, "unreachable"):
            self.resend_task(cid)
            return
        self._end(REFUSE, cid, f"{nack['code']}: {nack.get('detail', '')}".removesuffix(": "))
        self._step()

    @property
    def unsynced_since_s(self) -> float:
        return self._receiver.unsynced_since_s

    def sync(self) -> None:
        """Store what has arrived, tell the devices, and give free ones tasks."""
        self._receiver.sync()
        self._step()

    def _on_accepted(self, record: StoredReply, reply: Reply) -> None:
        self._arrived[record.cid] = (record, reply)

    def _on_refused(self, cid: ClientId, wrong: Malformed) -> None:
        if wrong.code != "bad_hash" or not self._excuse(cid, "bad_hash"):
            self._events.append(lambda: self._end(REFUSE, cid, str(wrong)))

    def _excuse(self, cid: ClientId, failure: str) -> bool:
        """Whether this failure of the task is the first of its kind."""
        excused = self._sent[cid].excused
        first = failure not in excused
        excused.add(failure)
        return first

    # -- steps of the machine, each stored before it is taken

    def _step(self) -> None:
        """Take what has happened, then give free devices tasks."""
        while self._events and not self.closed:
            self._events.popleft()()
        while self._arrived and not self.closed and self._take_arrived():
            pass
        if not self.closed:
            self._hand_out()

    def _take_arrived(self) -> bool:
        """Take as many updates as the round still wants at most; -> False where the disk has no room."""
        for gone in self._arrived.keys() - self._sent.keys():  # its task was stopped meanwhile
            del self._arrived[gone]
            self._receiver.ack(gone, "late")
        wanted = machine.round_target(self._rules) - len(self.counts.staleness)
        batch = dict(list(self._arrived.items())[:wanted])
        for cid in batch:
            del self._arrived[cid]
        records = {self._sent[cid].key: record for cid, (record, _) in batch.items()}
        journal = self._context.store.journal
        if not self._store(lambda: journal.take(self._run, self._round, self._place, records), len(batch)):
            for cid in batch:
                self._receiver.retry(cid, "no room")
            return False
        for cid, (record, reply) in batch.items():
            self._receiver.ack(cid, "ok")
            self._take(cid, reply, record.n)
        return True

    def _take(self, cid: ClientId, reply: Reply, n: int, *, live: bool = True) -> None:
        """A reply whose step is stored: the machine takes it."""
        sent, spec = self._sent.pop(cid, None), self._prepared[cid].reply_spec
        if reply.update is not None:
            reply = replace(reply, n=spec.samples_that_count(n))  # as in a replay: with the fleet of this round
        self.training, taken = machine.take(self.training, self._rules, cid, reply, update_moves(spec, reply))
        if taken.task is not None:
            number = self.training.at_work[cid].number
            self._open({cid: ExchangeKey(self._run, self._round, number)}, {cid: taken.task}, live=live)
        elif taken.what == "counted":
            self.counts.staleness.append(taken.staleness)
        elif sent is not None:  # else its task was stopped by an update that came with it
            self.counts.stale += 1
        self._note(taken, live=live)
        self.closed = self.closed or len(self.counts.staleness) >= machine.round_target(self._rules)

    def _note(self, taken: Taken, *, live: bool) -> None:
        """What a new version brings with it: outliers that do not count, and tasks that are too old now."""
        self.refused |= taken.refused
        self.counts.stale += len(taken.stopped)
        stopped = {who: self._sent[who].key for who in taken.stopped if who in self._sent}
        if stopped:
            with suppress(OSError):  # shown to people; the device is told, or hears "late"
                self._context.store.journal.stop(stopped, STALE)
        self.refused |= dict.fromkeys(stopped, STALE)
        for who in stopped:
            if live:
                self._receiver.uploads.end(who)
                self._tell_stop(who)
            del self._sent[who]

    def _hand_out(self) -> None:
        """Give free devices tasks. Where no device is at work and a new one waits, the round ends for it."""
        if len(self.training.at_work) >= self._rules.options.concurrency:
            return
        if not any(map(self.may_get, self._rules.fleet)):
            if not self.training.at_work and self._newcomers():
                self.close()
            return
        training, tasks, made = machine.hand_out(self.training, self._rules, self._round, self.may_get)
        if not tasks and not made:
            return
        keys = {who: ExchangeKey(self._run, self._round, training.at_work[who].number) for who in tasks}
        prepared = prepare_each(keys, tasks, self._context)
        opened = [self._opened(who, keys[who], prepared[who]) for who in prepared]
        journal = self._context.store.journal
        if self._store(lambda: journal.hand(self._run, self._round, self._place, opened)):
            self._handed(training, made, keys, prepared, live=True)

    def may_get(self, who: ClientId) -> bool:
        """Whether a device is here, has no task, and has not failed lately."""
        return who not in self._failed and who not in self._sent and self._is_online(who)

    def _handed(
        self,
        training: Training,
        made: Sequence[Taken],
        keys: Mapping[ClientId, ExchangeKey],
        prepared: Mapping[ClientId, PreparedTask],
        *,
        live: bool,
    ) -> None:
        self.training = training
        for taken in made:
            self._note(taken, live=live)
        self._put(keys, prepared)
        if live:
            self._send(keys)

    def _open(self, keys: Mapping[ClientId, ExchangeKey], tasks: Mapping[ClientId, Task], *, live: bool) -> None:
        """Tasks that follow from a step which is stored: they are stored once, and sent."""
        prepared = self._prepare(keys, tasks)
        store = self._context.store
        new = [self._opened(who, keys[who], prepared[who]) for who in keys if not store.exchanges.exists(keys[who])]
        if new:
            store.journal.open(new)
        if live:
            self._send(keys)

    def _end(self, what: str, cid: ClientId, why: str) -> None:
        """A device's task ends without a reply that counts."""
        sent = self._sent.get(cid)
        journal = self._context.store.journal
        if sent is None:
            return
        step = Step(what, [cid], (sent.key.round, sent.key.exchange))
        if not self._store(lambda: journal.end(self._run, self._round, self._place, step, why)):
            return
        self._receiver.uploads.end(cid)
        if what == EXPIRE:
            self._tell_stop(cid)
        self._ended(what, cid)
        self._failed[cid] = self._context.clock.now_s() + self._context.config.round.deadline_s

    def _ended(self, what: str, cid: ClientId) -> None:
        self._sent.pop(cid, None)
        self.training = machine.release(self.training, cid)
        if what == EXPIRE:
            self.counts.expired += 1
            self.refused[cid] = EXPIRED

    def _store(self, write: Callable[[], None], steps: int = 1) -> bool:
        """Write steps of the journal; -> False on a full disk, where they are tried again later."""
        try:
            write()
        except OSError:
            self._again_s = self._context.clock.now_s() + FULL_DISK_S
            return False
        self._place += steps
        return True

    # -- a step of the journal

    def _play(self, step: Step) -> None:
        """Take a step again that is stored. Raises ReplayDiverged where it has other tasks."""
        what, devices, task = step
        if what == HAND:
            training, tasks, made = machine.hand_out(
                self.training, self._rules, self._round, frozenset(devices).__contains__
            )
            keys = {who: ExchangeKey(self._run, self._round, training.at_work[who].number) for who in tasks}
            prepared = prepare_each(keys, tasks, self._context)
            for who, key in keys.items():
                if self._context.store.exchanges.task_hashes(key) != {who: prepared[who].sha256}:
                    raise ReplayDiverged(key)
            if keys.keys() != set(devices):
                raise ReplayDiverged(self.key)
            self._handed(training, made, keys, prepared, live=False)
        elif what == TAKE:
            cid, key = devices[0], ExchangeKey(self._run, *task)
            stored = self._context.store.exchanges.replies(key)[cid]
            reply = read_reply(self._prepared[cid], stored, self._context.store)
            self._take(cid, reply, stored.n, live=False)
        elif what == END:
            self.closed = True
        else:
            self._ended(what, devices[0])

    # -- tasks

    def _prepare(
        self, keys: Mapping[ClientId, ExchangeKey], tasks: Mapping[ClientId, Task]
    ) -> dict[ClientId, PreparedTask]:
        prepared = prepare_each(keys, tasks, self._context)
        self._put(keys, prepared)
        return prepared

    def _put(self, keys: Mapping[ClientId, ExchangeKey], prepared: Mapping[ClientId, PreparedTask]) -> None:
        until_s = self._context.clock.now_s() + self._context.config.round.deadline_s
        self._prepared.update(prepared)
        for who, key in keys.items():
            if who not in self._sent or self._sent[who].key != key:
                self._sent[who] = SentTask(key=key, until_s=until_s)

    def _send(self, keys: Mapping[ClientId, ExchangeKey]) -> None:
        for who in keys:
            self._grant(who)
            if not self.closed:
                self.resend_task(who)

    def _grant(self, who: ClientId) -> None:
        self._context.downloads.grant(who, self._prepared[who].blobs)

    def _tell_stop(self, who: ClientId) -> None:
        self._context.sender.send(who, "stop", **self._sent[who].key._asdict(), why="another device has its turn")

    @staticmethod
    def _opened(who: ClientId, key: ExchangeKey, prepared: PreparedTask) -> OpenedTask:
        return OpenedTask(key, who, prepared.sha256, {manifest.sha256 for manifest in prepared.blobs})
