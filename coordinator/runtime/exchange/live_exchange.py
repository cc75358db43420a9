"""The open exchange over the network: exchange_rules.py decides, the store keeps what counts, then devices are told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from coordinator.rounds.exchange_rules import OpenExchange
from coordinator.rounds.over_selection import beside_fits, is_test
from coordinator.rounds.silence import LASTING_CODES, count_misses, silent_devices
from coordinator.rounds.update_validation import AskedStage
from coordinator.runtime.envelope import Envelope
from coordinator.runtime.exchange.late_updates import LateUpdates
from coordinator.runtime.exchange.reply_recorder import ReplyRecorder
from coordinator.runtime.exchange.task_messages import ExchangeContext, NetworkExchange, PreparedTask
from coordinator.runtime.exchange.task_window import TaskWindow, line_of
from coordinator.runtime.exchange.upload_receiver import Announcement, UploadPolicy, UploadReceiver
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from coordinator.strategies.base import PartOfCohort
from coordinator.strategies.common.sampling import part_of
from edge_client.errors import Malformed
from edge_client.protocol.task import ClientId, Reply

HEARTBEAT_S = 5.0
STAGES_BEFORE = ("prekeys", "shares", "add")  # of a sum, before its last one
NOT_ASKED = " (not asked again yet)"  # behind the last refusal of a device that was not asked
NOT_MEMBER, REVOKED = "not_member", "revoked"  # of a device that was turned away: the code, and the reason


class LiveExchange:
    """The exchange that is open now. The event loop calls its methods, one event at a time.

    `replies` holds the accepted replies without a vector. With `late`, `late_updates` takes what comes after closing.
    A device that `may_ask` leaves out is asked later, by `resend_task`, and keeps the upload of its other task. Tasks
    are handed out as fast as the coordinator can serve what they cause (task_window.py).
    """

    def __init__(  # noqa: PLR0913 - an exchange has these
        self,
        key: ExchangeKey,
        tasks: NetworkExchange,
        prepared: Mapping[ClientId, PreparedTask],
        wanted: int | None,
        context: ExchangeContext,
        *,
        late: bool = False,
        may_ask: Callable[[ClientId], bool] = lambda _: True,
    ) -> None:
        self._may_ask = may_ask
        self.key, self._prepared, self._context = key, prepared, context
        self.late_updates: LateUpdates | None = None
        self._late = late
        self._recorder = ReplyRecorder(key, tasks, prepared, context)
        self.replies = self._recorder.replies
        policy = UploadPolicy(on_accepted=self._on_accepted, on_refused=self._on_refused)
        self._receiver = UploadReceiver(prepared, context, policy)
        now_s, accepted = context.clock.now_s(), context.store.exchanges.replies(key)
        gone = (prepared.keys() & context.revoked()) - accepted.keys()
        beside = beside_fits(tasks) if wanted is not None else frozenset[ClientId]()
        most = len(prepared) if wanted is None or _is_of_a_sum(tasks) else wanted
        goal = min(most, len(prepared.keys() - gone - beside))
        self._left_out = set(gone)  # neither the goal nor the quorum waits for them
        self._quorum = partial(_quorum, tasks, context.config.round.quorum, wanted)  # of a goal
        spare, self._pays = _spare(tasks), _pays(tasks)
        silent = silent_devices(context.misses, prepared, spare)
        whys = {cid: context.unable.unable(cid, task.kind) for cid, task in prepared.items()}
        unable = {cid: why for cid, why in whys.items() if why and cid not in gone | accepted.keys()}
        self._window = TaskWindow(context.config.transfer.task_window)
        self._order = line_of(key, prepared, silent)
        self._rules = OpenExchange(
            asked=prepared.keys(),
            goal=goal,
            least=0 if _is_part(tasks, spare) else 1,
            beside=beside,
            silent=silent,
            quorum=self._quorum(goal),
            now_s=now_s,
            deadline_s=context.store.exchanges.begin_try(key, context.config.round.deadline_s),
            credits=context.config.transfer.credits,
            budget=context.config.transfer.in_flight_bytes,
            accepted={cid: reply.sha256 for cid, reply in accepted.items()},
            refused=dict.fromkeys(gone, NOT_MEMBER) | unable,
        )
        for cid in gone:
            context.store.exchanges.put_refusal(key, cid, REVOKED)
        for cid, why in unable.items():
            context.unable.note(cid, prepared[cid].kind, why)
            context.store.exchanges.put_refusal(key, cid, f"{why}{NOT_ASKED}")
        self._beat_s = now_s
        self._sent: dict[ClientId, str] = {}  # id of the last task message
        self._excused: set[tuple[ClientId, str]] = set()  # failures that a device may have once
        self._on_disk: dict[ClientId, tuple[StoredReply, Reply]] = {}  # valid updates, as they came
        self._granted: deque[ClientId] = deque()  # those that may upload

    @property
    def closed(self) -> bool:
        return self._rules.closed

    @property
    def count_answers(self) -> int:
        """How many devices have answered, with refusals."""
        return len(self._rules.accepted) + len(self._rules.refused)

    def takes(self, said: Announcement) -> bool:
        """Whether this announcement is of this exchange."""
        return said.key == self.key

    @property
    def wakes_at_s(self) -> float:
        """When `tick` has something to do."""
        return min(self._rules.wakes_at_s, self._beat_s + HEARTBEAT_S)

    def progress(self) -> dict[str, Any]:
        """What the rules show; `unasked` devices are in line for their task and not `open` yet."""
        found, line = self._rules.progress(self._context.clock.now_s()), self._window.line
        return self.key._asdict() | found | {"open": sorted({*found["open"]}.difference(line)), "unasked": sorted(line)}

    def begin(self) -> None:
        """Hand out every task that has no stored reply; again after each connection to the broker."""
        self._window.put(cid for cid in self._order if self.wants(cid) and self._may_ask(cid))
        self.tick()

    def resend_task(self, cid: ClientId) -> None:
        """Send the task again in its turn, unless the device has answered."""
        if self.wants(cid) and self._may_ask(cid):
            self._window.put([cid])
            self._hand_out()

    def on_quiet(self) -> None:
        """No message waits: further tasks may follow those of a while ago, unless updates wait for credits."""
        self._window.free(self._context.clock.now_s(), quiet=not self._rules.queue)
        self._hand_out()

    def _hand_out(self) -> None:
        """Send the tasks whose turn it is, and grant their blobs."""
        if not self.closed:
            for cid in self._window.take(self._context.clock.now_s()):
                self._send_task(cid)

    def _send_task(self, cid: ClientId) -> None:
        self._context.downloads.grant(cid, self._prepared[cid].blobs)
        left_ms = max(0, int((self._rules.closes_at_s - self._context.clock.now_s()) * 1000))
        self._sent[cid] = self._context.sender.send(cid, "task", left_ms=left_ms, **self._prepared[cid].fields)

    def wants(self, cid: ClientId) -> bool:
        """Whether the answer of this device is still wanted."""
        answered = cid in self._rules.accepted or cid in self._rules.refused
        return cid in self._prepared and not answered and not self.closed

    def tick(self) -> None:
        """Let time pass: deadlines, silent uploads, the heartbeat."""
        now_s = self._context.clock.now_s()
        if now_s >= self._beat_s + HEARTBEAT_S:
            self._beat_s = now_s
            with suppress(OSError):  # on a full disk a restart gives the exchange more time than it had left
                self._context.store.exchanges.heartbeat(self.key, max(0.0, self._rules.closes_at_s - now_s))
        self._receiver.sync()  # what has arrived counts before time passes
        self._count()
        if self._rules.is_over(now_s):
            self._end()
        self._granted += self._rules.tick(now_s)
        self._window.free(now_s, quiet=False)
        self._go_on()

    def postpone(self, seconds: float) -> None:
        """No device was heard for so long, which is taken from no deadline."""
        self._rules.closes_at_s += seconds

    def close(self) -> None:
        """Close now instead of at the deadline, by the same rules of the quorum."""
        self._rules.closes_at_s = self._context.clock.now_s()
        self.tick()

    def on_revoked(self, names: Collection[ClientId]) -> None:
        """These devices are not asked any more."""
        self._receiver.sync()
        self._count()
        gone = [cid for cid in sorted(names) if self.wants(cid)]
        self._leave_out(self._context.revoked() - self._rules.accepted.keys())
        for cid in gone:
            self._receiver.uploads.end(cid)
            self._refuse(cid, NOT_MEMBER, REVOKED)
        self._go_on()

    def _leave_out(self, cids: Collection[ClientId]) -> None:
        """Neither the goal nor the quorum waits for these devices any more."""
        self._left_out.update(cids)
        self._rules.goal = min(self._rules.goal, len(self._rules.asked - self._left_out - self._rules.beside))
        self._rules.quorum = min(self._rules.quorum, self._quorum(self._rules.goal))

    def on_ready(self, said: Announcement) -> None:
        """A device announces an update of this exchange. Raises Malformed with the code of the error answer."""
        if said.cid not in self._prepared:
            raise Malformed("closed", "you were not asked")
        self._receiver.check_offer(said)
        if self._receiver.is_unsynced(said.cid):
            self.sync()
        self._receiver.announce(said)
        if status := self._rules.status(said.cid, said.update.sha256):
            self._answer(said.cid, status)
        else:
            self._granted += self._rules.offer(said.cid, said.update.size, self._context.clock.now_s())
        self._go_on()

    def on_block(self, cid: ClientId, label: str | None, index: int, message: bytes) -> None:
        """Take a block of an open upload; any other block is dropped."""
        if cid not in self._rules.uploads:  # its credit went back; what has arrived stays
            self._receiver.uploads.end(cid)
        if self._receiver.on_block(cid, label, index, message):
            self._rules.heard(cid, len(message), self._context.clock.now_s())
        self._go_on()

    def on_nack(self, message: Envelope) -> None:
        """A device refuses the task. `unreachable` is asked once more: the blobs may have come meanwhile.

        A device without held-out samples is left out of a test. A refusal of a task that an earlier process sent is of
        an earlier try of the exchange, and does not count.
        """
        cid, nack = message.cid, message.fields
        ours = nack["re"] == self._sent.get(cid) if "run" not in nack else _key_of(nack) == self.key
        if cid not in self._prepared or not ours or not self._context.sender.has_sent(nack["re"]):
            return
        if nack["code"] == "unreachable" and self._excuse(cid, "unreachable"):
            self.resend_task(cid)
            return
        why = f"{nack['code']}: {nack.get('detail', '')}".removesuffix(": ")
        if nack["code"] in LASTING_CODES and self.wants(cid):  # not of a task that was sent again
            self._context.unable.note(cid, self._prepared[cid].kind, why)
        if nack["code"] == "no_data" and self.wants(cid) and is_test({cid: self._prepared[cid].reply_spec.task}):
            self._leave_out([cid])
        self._refuse(cid, nack["code"], why)
        self._go_on()

    @property
    def unsynced_since_s(self) -> float:
        return self._receiver.unsynced_since_s

    def sync(self) -> None:
        """Store what has arrived, and tell the devices."""
        self._receiver.sync()
        self._go_on()

    def _go_on(self) -> None:
        """Count what is on disk, end the exchange with the last answer, and let the next devices upload, or train."""
        while True:
            self._count()
            if not self.closed and self._rules.complete:
                self._end()
            if not self._granted:
                break
            cid = self._granted.popleft()
            if cid in self._rules.uploads:  # it may have been turned away since
                self._receiver.begin(cid)
        self._hand_out()

    def _count(self) -> None:
        """Store together which of the updates on disk count, then tell the devices; the goal leaves others late.

        With `late` these are told nothing: the exchange ends, and `late_updates` takes them as uploads under way.
        """
        valid, self._on_disk = self._on_disk, {}
        self._rules.goal += len(again := self._left_out & valid.keys())  # they have samples after all
        self._left_out -= again
        counted = self._rules.countable({cid: record.sha256 for cid, (record, _) in valid.items()})
        try:
            self._recorder.accept([valid[cid] for cid in counted])
        except OSError as full:  # none of them counts yet
            for cid in valid:
                self._receiver.retry(cid, full.strerror)
            return
        accepted = {cid: valid[cid][0].sha256 for cid in counted}
        self._granted += self._rules.accept(accepted, self._context.clock.now_s())
        for cid, (record, _) in valid.items():
            if cid in accepted:
                self._answer(cid, "ok")
                continue
            self._receiver.drop(cid)
            if not self._late or record.what != "delta":
                self._answer(cid, "late")

    def _answer(self, cid: ClientId, status: str) -> None:
        self._window.leave(cid)
        self._receiver.ack(cid, status)

    def _end(self) -> None:
        """Store the closing, then stop the other devices, or let their updates come late."""
        self._recorder.close(self._rules, self._receiver.no_room)
        under_way = [*self._rules.uploads, *self._rules.queue]
        self._rules.close()
        self._receiver.forget_unsynced()
        misses = count_misses(self._context.misses, self._rules, self._sent, pays=self._pays)
        self._context.misses.clear()
        self._context.misses.update(misses)
        accepted = self._rules.accepted.keys()
        if self._late:
            announced = [self._receiver.announced(cid) for cid in under_way]
            self.late_updates = LateUpdates(
                self.key, self._prepared, self._context, answered=accepted, announced=announced
            )
            self._receiver.uploads.abandon(self._prepared.keys() - self.late_updates.expected)
        else:
            self._receiver.uploads.abandon(filter(self._may_ask, self._prepared))
            for cid in filter(self._may_ask, sorted(self._rules.asked - accepted - self._rules.refused.keys())):
                self._context.sender.send(cid, "stop", **self.key._asdict(), why="the exchange is closed")

    def _on_accepted(self, record: StoredReply, reply: Reply) -> None:
        self._on_disk[record.cid] = (record, reply)

    def _on_refused(self, cid: ClientId, wrong: Malformed) -> None:
        """Count a refused update as the device's answer; an update with a wrong hash may be sent once more."""
        if wrong.code != "bad_hash" or not self._excuse(cid, "bad_hash"):
            self._refuse(cid, wrong.code, str(wrong))

    def _refuse(self, cid: ClientId, code: str, reason: str) -> None:
        """The device gives no answer that counts; `reason` is for `status`. What has arrived counts before that."""
        self._receiver.sync()
        self._count()
        if cid not in self._rules.accepted and not self.closed:
            self._context.store.exchanges.put_refusal(self.key, cid, reason)
        self._window.leave(cid)
        self._granted += self._rules.refuse(cid, code, self._context.clock.now_s())

    def _excuse(self, cid: ClientId, failure: str) -> bool:
        """Whether this failure of the device is the first of its kind."""
        first = (cid, failure) not in self._excused
        self._excused.add((cid, failure))
        return first


def _quorum(tasks: NetworkExchange, share: float, wanted: int | None, goal: int) -> int:
    """So many of `goal` answers suffice at the deadline. A sum that has begun fails by its own threshold."""
    if not all(task.needs_quorum for task in tasks.values() if isinstance(task, AskedStage)):
        return 0
    if isinstance(tasks, PartOfCohort):
        return max(0, goal - (tasks.of - part_of(share, tasks.of)))
    return part_of(share, goal if wanted is None else min(goal, wanted))


def _is_of_a_sum(tasks: NetworkExchange) -> bool:
    """Whether the exchange waits for all that it asks, also for more than are wanted: a sum loses none on purpose."""
    return any(isinstance(task, AskedStage) and task.stage != "tell" for task in tasks.values())


def _is_part(tasks: NetworkExchange, spare: int | None) -> bool:
    """Whether the others of the round, or of each sum, are not asked here: then an exchange without answers may end."""
    if isinstance(tasks, PartOfCohort):
        return len(tasks) < tasks.of
    return spare is not None and len(tasks) <= spare


def _spare(tasks: NetworkExchange) -> int | None:
    """How many devices the sums of this exchange may lose, the smallest of them; None where none is lost so."""
    known = (task.spare for task in tasks.values() if isinstance(task, AskedStage) and task.spare is not None)
    return min(known, default=None)


def _pays(tasks: NetworkExchange) -> bool:
    """Whether an answer makes up for a miss: of the stages of a sum one to the last does."""
    return all(task.stage not in STAGES_BEFORE for task in tasks.values() if isinstance(task, AskedStage))


def _key_of(message: Mapping[str, Any]) -> ExchangeKey:
    return ExchangeKey(message["run"], message.get("round", -1), message.get("exchange", -1))
