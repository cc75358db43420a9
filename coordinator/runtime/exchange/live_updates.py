"""Devices over the network that no round waits for: their messages, and the steps that follow from them.

It stands where an open exchange stands (live_exchange.py), for one round after another; the tasks and uploads that are
under way at the end of a round go on in the next. What the messages mean for the models, journalled_training.py says;
a device hears of a step after it is stored.

A task has `deadline-s`. A device that refuses a task, or is silent for so long, gets the next one after another such
time, or when it connects again: once in such a time, so that none uses up the run's tasks by refusing and connecting.
One that cannot do its tasks is asked after ever more such times (silence.py), as if each were an exchange.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coordinator.rounds.asynchronous.snapshot import Snapshot
from coordinator.rounds.asynchronous.training import Rules
from coordinator.rounds.silence import LASTING_CODES
from coordinator.runtime.envelope import Envelope
from coordinator.runtime.exchange.journalled_training import EXPIRED, JournalledTraining, Orders
from coordinator.runtime.exchange.live_exchange import REVOKED
from coordinator.runtime.exchange.task_messages import ExchangeContext
from coordinator.runtime.exchange.upload_receiver import Announcement, UploadPolicy, UploadReceiver
from coordinator.runtime.exchange.uploads import NO_CREDIT, UploadCredits
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from coordinator.storage.journal_store import EXPIRE, REFUSE
from edge_client.errors import Malformed
from edge_client.protocol.task import ClientId, Reply

BUSY_MS = 2_000  # after which a device without a credit announces its update again
FULL_DISK_S = 5.0  # after which a step that could not be stored is tried again


@dataclass(kw_only=True)
class SentTask:
    """A task that a device has, until when it has it, and the id of its last message."""

    key: ExchangeKey
    until_s: float
    ident: str = ""
    excused: set[str] = field(default_factory=set)  # failures that it may have once


@dataclass(frozen=True, kw_only=True)
class Presence:
    """Who may get a task: `is_free` says whether a device is connected and not at a test, `at_test` whether any is.

    `newcomers` says whether a device waits to be let in, which is between rounds.
    """

    is_free: Callable[[ClientId], bool]
    at_test: Callable[[], bool]
    newcomers: Callable[[], bool]


class LiveUpdates:
    """The network of one run without rounds; `journalled` is its state."""

    def __init__(self, run: str, context: ExchangeContext, presence: Presence) -> None:
        self.journalled = JournalledTraining(run, context)
        self._run, self._presence, self._context = run, presence, context
        self._sent: dict[ClientId, SentTask] = {}
        self._arrived: dict[ClientId, tuple[StoredReply, Reply]] = {}  # on disk, in the order of their arrival
        self._failed: dict[ClientId, float] = {}  # devices that get no task until then
        self._pardoned: dict[ClientId, float] = {}  # devices whose next connection ends no wait until then
        self._again_s = math.inf
        self._heard_s = context.clock.now_s()  # when the round was last looked at
        policy = UploadPolicy(on_accepted=self._on_accepted, on_refused=self._on_refused)
        self._receiver = UploadReceiver(self.journalled.prepared, context, policy)
        self._credits = UploadCredits.of(self._receiver.uploads, context.config)
        self._events: deque[Callable[[], None]] = deque()

    def open_round(self, number: int, before: Snapshot, rules: Rules, context: ExchangeContext) -> None:
        """As `JournalledTraining.open_round`; a task of this process keeps its time, another has a whole deadline.

        Its time stands still between two rounds, which a pause, or an engine to be compiled for, makes long.
        """
        for task in self._sent.values():
            task.until_s += self.unheard_s
        self._heard_s = context.clock.now_s()  # a round that its journal ends is not looked at
        self._context = context
        self.journalled.open_round(number, before, rules, context)
        tasks, sent = self.journalled.tasks, self._sent
        self._sent = {
            who: sent[who] if who in sent and sent[who].key == key else self._begun(key) for who, key in tasks.items()
        }

    @property
    def unheard_s(self) -> float:
        """For how long no device has been heard, once a round is over."""
        return self._context.clock.now_s() - self._heard_s

    @property
    def closed(self) -> bool:
        return self.journalled.closed

    @property
    def key(self) -> ExchangeKey:
        return ExchangeKey(self._run, self.journalled.round, 0)

    def takes(self, said: Announcement) -> bool:
        """Whether this announcement is of a task that its device has."""
        return said.cid in self._sent and self._sent[said.cid].key == said.key

    def has_task(self, who: ClientId) -> bool:
        return who in self._sent

    def is_free(self, who: ClientId) -> bool:
        """Whether a device is here, has no task and has not failed lately."""
        return who not in self._failed and who not in self._sent and self._presence.is_free(who)

    def may_get(self, who: ClientId) -> bool:
        """Whether a device may get a task: it is free, and did not send its part of the round."""
        return self.is_free(who) and not self.journalled.has_its_part(who)

    @property
    def wakes_at_s(self) -> float:
        """When `tick` has something to do; where the disk had no room, not before the next try."""
        if self._again_s < math.inf:
            return self._again_s
        due = (sent.until_s for who, sent in self._sent.items() if who not in self._arrived)
        return min([math.inf, *self._failed.values(), *due])

    def progress(self) -> dict[str, Any]:
        """As that of an exchange, and what tells of a run without rounds: `updates`."""
        state = self.journalled
        busy, now_s = self._receiver.uploads.sizes(), self._context.clock.now_s()
        left_s = min((sent.until_s for sent in self._sent.values()), default=now_s) - now_s
        return {
            "run": self._run,
            "round": state.round,
            "exchange": 0,
            "asked": len(self._sent),
            "wanted": state.wanted + len(state.counts.staleness),
            "quorum": 0,
            "closed": self.closed,
            "left_s": round(max(0.0, left_s), 1),
            "answered": sorted(state.training.buffered),
            "uploading": sorted(busy),
            "waiting": [],
            "refused": sorted(self._failed),
            "open": sorted(self._sent.keys() - busy.keys()),
            "updates": {
                **state.counts.record(state.training.versions),
                "devices": len(state.rules.fleet),
                "concurrency": state.rules.options.concurrency,
            },
        }

    # -- what happens by itself

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
            now_s = self._context.clock.now_s()
            if cid in self._failed and self._pardoned.get(cid, -math.inf) <= now_s:
                del self._failed[cid]
                self._pardoned[cid] = now_s + self._context.config.round.deadline_s
            self.step()
            return
        left_ms = max(0, int((sent.until_s - self._context.clock.now_s()) * 1000))
        fields = self.journalled.prepared[cid].fields
        sent.ident = self._context.sender.send(cid, "task", left_ms=left_ms, **fields)

    def tick(self) -> None:
        """Let time pass: tasks without an answer, and those of revoked devices, are taken back."""
        self._receiver.sync()
        now_s, self._again_s = self._context.clock.now_s(), math.inf
        for who in [who for who, until_s in self._failed.items() if until_s <= now_s]:
            if self._context.unable.skips(who):
                self._failed[who] = now_s + self._context.config.round.deadline_s
            else:
                del self._failed[who]
        self._pardoned = {who: until_s for who, until_s in self._pardoned.items() if until_s > now_s}
        waited = {who: sent.until_s for who, sent in self._sent.items() if who not in self._arrived}
        for who in sorted(waited.keys() & self._context.revoked()):
            self._end(REFUSE, who, REVOKED)
            del waited[who]
        for who in [who for who, until_s in waited.items() if until_s <= now_s]:
            self._end(EXPIRE, who, EXPIRED)
        self.step()

    def close(self) -> None:
        """End the round now, with the updates that it has."""
        self._heard_s = self._context.clock.now_s()
        if not self.closed and not self.journalled.close():
            self._try_again()

    def finish(self) -> None:
        """The run is over: what is under way is not wanted any more."""
        self._receiver.forget_unsynced()
        self._receiver.uploads.abandon(self._sent)
        for who, key in self.journalled.finish().items():
            self._tell_stop(who, key)
        self._sent.clear()

    # -- what devices send

    def on_ready(self, said: Announcement) -> None:
        """A device announces the update of its task. Raises Malformed with the code of the error answer."""
        self._receiver.check_offer(said)
        update, now_s = said.update, self._context.clock.now_s()
        if self._receiver.is_unsynced(said.cid) or said.cid in self._arrived:
            self.sync()
            return
        if update.inline is None and self._credits.is_full(said.cid, update.size, now_s):
            self._context.sender.send(said.cid, "err", re=said.ident, code="busy", detail=NO_CREDIT, retry_ms=BUSY_MS)
            return
        self._credits.give(said.cid, update, now_s)
        self._receiver.announce(said)
        self._receiver.begin(said.cid)
        self.step()

    def on_block(self, cid: ClientId, label: str | None, index: int, message: bytes) -> None:
        """Take a block of an open upload; any other block is dropped."""
        if self._receiver.on_block(cid, label, index, message):
            self._credits.heard(cid, len(message), self._context.clock.now_s())
        self.step()

    def on_nack(self, message: Envelope) -> None:
        """A device refuses its task; `unreachable` is asked once more, as in an exchange. The caller calls `step`."""
        cid, nack = message.cid, message.fields
        sent = self._sent.get(cid)
        if sent is None or nack["re"] != sent.ident or cid in self._arrived:
            return
        if nack["code"] == "unreachable" and self._excuse(cid, "unreachable"):
            self.resend_task(cid)
            return
        why = f"{nack['code']}: {nack.get('detail', '')}".removesuffix(": ")
        if nack["code"] in LASTING_CODES:
            self._context.unable.note(cid, self.journalled.prepared[cid].kind, why)
        self._end(REFUSE, cid, why)

    @property
    def unsynced_since_s(self) -> float:
        return self._receiver.unsynced_since_s

    def sync(self) -> None:
        """Store what has arrived, tell the devices, and give free ones tasks."""
        self._receiver.sync()
        self.step()

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

    # -- steps, after which devices are told

    def step(self) -> None:
        """Take what has happened, then give free devices tasks."""
        self._heard_s = self._context.clock.now_s()
        while self._events and not self.closed:
            self._events.popleft()()
        while self._arrived and not self.closed and self._take_arrived():
            pass
        if not self.closed:
            self._hand_out()

    def _take_arrived(self) -> bool:
        """Take as many updates as the round still wants at most; -> False where the disk has no room."""
        for gone in [who for who in self._arrived if not self.takes(self._receiver.announced(who))]:
            del self._arrived[gone]  # its task ended meanwhile; it may have another one
            self._receiver.drop(gone)
            self._receiver.ack(gone, "late")
        batch = dict(list(self._arrived.items())[: self.journalled.wanted])
        if not batch:
            return True
        for cid in batch:
            del self._arrived[cid]
        orders = self.journalled.take(batch)
        if orders is None:
            self._try_again()
            for cid in batch:
                self._receiver.retry(cid, "no room")
            return False
        for cid in batch:
            self._receiver.ack(cid, "ok")
            self._sent.pop(cid, None)
        self._carry_out(orders)
        return True

    def _hand_out(self) -> None:
        """Give free devices tasks. Where no device is at work and a new one waits, the round ends for it."""
        state, at_test = self.journalled, self._presence.at_test()
        if len(state.training.at_work) >= state.rules.options.concurrency:
            return
        buffered = state.training.buffered if at_test else ()  # none but these is here, the others come from their test
        if not any(self.may_get(who) for who in state.rules.fleet if who not in buffered):
            if not state.training.at_work and not at_test and self._presence.newcomers():
                self.close()
            return
        orders = state.hand_out(self.may_get)
        if orders is None:
            self._try_again()
        else:
            self._carry_out(orders)

    def _end(self, what: str, cid: ClientId, why: str) -> None:
        """A device's task ends without a reply that counts."""
        sent = self._sent.get(cid)
        if sent is None:
            return
        if not self.journalled.end(what, cid, why):
            self._try_again()
            return
        del self._sent[cid]
        self._receiver.uploads.end(cid)
        if what == EXPIRE:
            self._tell_stop(cid, sent.key)
        self._failed[cid] = self._context.clock.now_s() + self._context.config.round.deadline_s

    def _carry_out(self, orders: Orders) -> None:
        for who, key in orders.stopped.items():
            self._sent.pop(who, None)
            self._receiver.uploads.end(who)
            self._tell_stop(who, key)
        for who in orders.given:
            self._sent[who] = self._begun(self.journalled.tasks[who])
            self._grant(who)
            self.resend_task(who)  # not in a round that is closed; the next one sends it

    def _begun(self, key: ExchangeKey) -> SentTask:
        return SentTask(key=key, until_s=self._context.clock.now_s() + self._context.config.round.deadline_s)

    def _grant(self, who: ClientId) -> None:
        self._context.downloads.grant(who, self.journalled.prepared[who].blobs)

    def _tell_stop(self, who: ClientId, key: ExchangeKey) -> None:
        self._context.sender.send(who, "stop", **key._asdict(), why="another device has its turn")

    def _try_again(self) -> None:
        self._again_s = self._context.clock.now_s() + FULL_DISK_S
