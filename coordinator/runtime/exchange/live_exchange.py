"""The open exchange: exchange_rules.py decides on each event, the store keeps the decision, then the device is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from coordinator.rounds import exchange_rules
from coordinator.rounds.silence import count_misses, silent_devices
from coordinator.rounds.update_validation import AskedStage
from coordinator.runtime.envelope import Envelope
from coordinator.runtime.exchange.late_updates import LateUpdates
from coordinator.runtime.exchange.reply_recorder import ReplyRecorder
from coordinator.runtime.exchange.task_messages import ExchangeContext, NetworkExchange, PreparedTask
from coordinator.runtime.exchange.task_window import TaskWindow, line_of
from coordinator.runtime.exchange.upload_receiver import Announcement, UploadPolicy, UploadReceiver
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from coordinator.strategies.common.sampling import part_of
from edge_client.errors import Malformed
from edge_client.protocol.task import ClientId, Reply

HEARTBEAT_S = 5.0
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
        goal = min(len(prepared) if wanted is None else wanted, len(prepared) - len(gone))
        self._quorum = _quorum(tasks, context)  # a share of the goal
        silent = silent_devices(context.misses, prepared)
        self._window = TaskWindow(context.config.transfer.task_window)
        self._order = line_of(key, prepared, silent)
        self._state = exchange_rules.open_exchange(
            run=key.run,
            round=key.round,
            number=key.exchange,
            asked=prepared.keys(),
            goal=goal,
            silent=silent,
            quorum=part_of(self._quorum, goal),
            now_s=now_s,
            deadline_s=context.store.exchanges.begin_try(key, context.config.round.deadline_s),
            credits=context.config.transfer.credits,
            budget=context.config.transfer.in_flight_bytes,
            accepted={cid: reply.sha256 for cid, reply in accepted.items()},
            refused=dict.fromkeys(gone, NOT_MEMBER),
        )
        for cid in gone:
            context.store.exchanges.put_refusal(key, cid, REVOKED)
        self._beat_s = now_s
        self._sent: dict[ClientId, str] = {}  # id of the last task message
        self._excused: set[tuple[ClientId, str]] = set()  # failures that a device may have once
        self._events: deque[exchange_rules.Event] = deque()
        self._synced: deque[exchange_rules.Event] = deque()  # updates that came to the disk together

    @property
    def closed(self) -> bool:
        return self._state.closed

    @property
    def count_answers(self) -> int:
        """How many devices have answered, with refusals."""
        return len(self._state.accepted) + len(self._state.refused)

    def takes(self, said: Announcement) -> bool:
        """Whether this announcement is of this exchange."""
        return said.key == self.key

    @property
    def wakes_at_s(self) -> float:
        """When `tick` has something to do."""
        return min(self._state.wakes_at_s, self._beat_s + HEARTBEAT_S)

    def progress(self) -> dict[str, Any]:
        """What the rules show; `unasked` devices are in line for their task and not `open` yet."""
        found, line = self._state.progress(self._context.clock.now_s()), self._window.line
        return found | {"open": sorted({*found["open"]}.difference(line)), "unasked": sorted(line)}

    def begin(self) -> None:
        """Hand out every task that has no stored reply; again after each connection to the broker."""
        self._window.put(cid for cid in self._order if self.wants(cid) and self._may_ask(cid))
        self._hand_out()
        self.tick()

    def resend_task(self, cid: ClientId) -> None:
        """Send the task again in its turn, unless the device has answered."""
        if self.wants(cid) and self._may_ask(cid):
            self._window.put([cid])
            self._hand_out()

    def on_quiet(self) -> None:
        """No message waits: further tasks may follow those of a while ago, unless updates wait for credits."""
        self._window.free(self._context.clock.now_s(), quiet=not self._state.queue)
        self._hand_out()

    def _hand_out(self) -> None:
        """Send the tasks whose turn it is, and grant their blobs."""
        if not self.closed:
            for cid in self._window.take(self._context.clock.now_s()):
                self._send_task(cid)

    def _send_task(self, cid: ClientId) -> None:
        self._context.downloads.grant(cid, self._prepared[cid].blobs)
        left_ms = max(0, int((self._state.closes_at_s - self._context.clock.now_s()) * 1000))
        self._sent[cid] = self._context.sender.send(cid, "task", left_ms=left_ms, **self._prepared[cid].fields)

    def wants(self, cid: ClientId) -> bool:
        """Whether the answer of this device is still wanted."""
        answered = cid in self._state.accepted or cid in self._state.refused
        return cid in self._prepared and not answered and not self.closed

    def tick(self) -> None:
        """Let time pass: deadlines, silent uploads, the heartbeat."""
        now_s = self._context.clock.now_s()
        if now_s >= self._beat_s + HEARTBEAT_S:
            self._beat_s = now_s
            with suppress(OSError):  # on a full disk a restart gives the exchange more time than it had left
                self._context.store.exchanges.heartbeat(self.key, max(0.0, self._state.closes_at_s - now_s))
        self._apply(exchange_rules.Tick())
        self._window.free(now_s, quiet=False)
        self._hand_out()

    def close(self) -> None:
        """Close now instead of at the deadline, by the same rules of the quorum."""
        self._state = replace(self._state, closes_at_s=self._context.clock.now_s())
        self.tick()

    def on_revoked(self, names: Collection[ClientId]) -> None:
        """These devices are not asked any more: neither the goal nor the quorum waits for them."""
        gone = [cid for cid in sorted(names) if self.wants(cid)]
        for cid in gone:
            self._note_refusal(cid, REVOKED)
            self._window.leave(cid)
            self._receiver.uploads.end(cid)
        revoked = self._context.revoked()
        left = self._state.asked - (revoked - self._state.accepted.keys())
        goal = min(self._state.goal, len(left))
        self._state = replace(self._state, goal=goal, quorum=min(self._state.quorum, part_of(self._quorum, goal)))
        self._apply(*(exchange_rules.Refused(cid, NOT_MEMBER) for cid in gone))

    def on_ready(self, said: Announcement) -> None:
        """A device announces an update of this exchange. Raises Malformed with the code of the error answer."""
        if said.cid not in self._prepared:
            raise Malformed("closed", "you were not asked")
        self._receiver.check_offer(said)
        if self._receiver.is_unsynced(said.cid):
            self.sync()
        self._receiver.announce(said)
        self._apply(exchange_rules.Ready(said.cid, said.update.sha256, said.update.size))

    def on_block(self, cid: ClientId, label: str | None, index: int, message: bytes) -> None:
        """Take a block of an open upload; any other block is dropped."""
        if cid not in self._state.uploads:  # its credit went back; what has arrived stays
            self._receiver.uploads.end(cid)
        if self._receiver.on_block(cid, label, index, message):
            self._events.appendleft(exchange_rules.Block(cid, len(message)))
        self._apply()

    def on_nack(self, message: Envelope) -> None:
        """A device refuses the task. `unreachable` is asked once more: the blobs may have come meanwhile.

        A refusal of a task that an earlier process sent belongs to an earlier try of the exchange, and does not count.
        """
        cid, nack = message.cid, message.fields
        ours = nack["re"] == self._sent.get(cid) if "run" not in nack else _key_of(nack) == self.key
        if cid not in self._prepared or not ours or not self._context.sender.has_sent(nack["re"]):
            return
        if nack["code"] == "unreachable" and self._excuse(cid, "unreachable"):
            self.resend_task(cid)
            return
        self._note_refusal(cid, f"{nack['code']}: {nack.get('detail', '')}".removesuffix(": "))
        self._window.leave(cid)
        self._apply(exchange_rules.Refused(cid, nack["code"]))

    @property
    def unsynced_since_s(self) -> float:
        return self._receiver.unsynced_since_s

    def sync(self) -> None:
        """Store what has arrived, and tell the devices."""
        self._receiver.sync()
        self._apply()

    def _apply(self, *events: exchange_rules.Event) -> None:
        """Apply these events and those that their commands add: decide, store, then answer.

        What has arrived counts before time passes or another device's refusal closes the exchange.
        """
        self._events.extend(events)
        while self._synced or self._events:
            if not self._synced and isinstance(self._events[0], exchange_rules.Tick | exchange_rules.Refused):
                self._receiver.sync()
            steps = self._decide()
            if self._store([command for _, _, commands in steps for command in commands], steps[-1][1].refused):
                for before, self._state, commands in steps:
                    for command in commands:
                        self._carry_out(command, before)
        self._hand_out()

    def _decide(
        self,
    ) -> list[tuple[exchange_rules.OpenExchange, exchange_rules.OpenExchange, list[exchange_rules.Command]]]:
        """The state before and after the next event, and its commands; of updates that are synced together for each.

        Those that come behind the one that closes the exchange are left for the next time.
        """
        now_s, state, steps = self._context.clock.now_s(), self._state, []
        while self._synced and not state.closed:
            before, (state, commands) = state, exchange_rules.advance(state, self._synced.popleft(), now_s)
            steps.append((before, state, commands))
        if not steps:
            event = (self._synced or self._events).popleft()
            steps.append((state, *exchange_rules.advance(state, event, now_s)))
        return steps

    def _store(self, commands: Sequence[exchange_rules.Command], refused: Mapping[ClientId, str]) -> bool:
        """Write what commands promise; -> False when accepted replies have no room and their devices have to retry."""
        accepted = [c.cid for c in commands if isinstance(c, exchange_rules.Ack) and c.status == "ok"]
        try:
            self._recorder.accept(accepted)
        except OSError as full:
            for cid in accepted:
                self._receiver.retry(cid, full.strerror)
            return False
        for command in commands:
            if isinstance(command, exchange_rules.Close):
                self._recorder.close(command, self._state.goal, self._state.quorum, refused)
        return True

    def _carry_out(self, command: exchange_rules.Command, before: exchange_rules.OpenExchange) -> None:
        if isinstance(command, exchange_rules.Ack):
            self._window.leave(command.cid)
            self._receiver.ack(command.cid, command.status, sha256=command.sha256)
        elif isinstance(command, exchange_rules.Go):
            self._receiver.begin(command.cid)
        else:
            self._on_closed(command, before)

    def _on_closed(self, command: exchange_rules.Close, before: exchange_rules.OpenExchange) -> None:
        self._receiver.forget_unsynced()
        misses = count_misses(self._context.misses, self._state, self._sent)
        self._context.misses.clear()
        self._context.misses.update(misses)
        if self._late:
            under_way = [cid for cid in (*before.uploads, *before.queue) if cid not in command.keys]
            announced = [self._receiver.announced(cid) for cid in under_way]
            answered = before.accepted.keys() | command.keys
            self.late_updates = LateUpdates(
                self.key, self._prepared, self._context, answered=answered, announced=announced
            )
            self._receiver.uploads.abandon(self._prepared.keys() - self.late_updates.expected)
        else:
            self._receiver.uploads.abandon(filter(self._may_ask, self._prepared))
            left = before.asked - before.accepted.keys() - before.refused.keys() - command.keys
            for cid in filter(self._may_ask, sorted(left)):
                self._context.sender.send(cid, "stop", **self.key._asdict(), why="the exchange is closed")

    def _on_accepted(self, record: StoredReply, reply: Reply) -> None:
        self._recorder.hold(record, reply)
        self._synced.append(exchange_rules.Stored(record.cid, record.sha256))

    def _on_refused(self, cid: ClientId, wrong: Malformed) -> None:
        """Count a refused update as the device's answer; an update with a wrong hash may be sent once more."""
        if wrong.code != "bad_hash" or not self._excuse(cid, "bad_hash"):
            self._note_refusal(cid, str(wrong))
            self._window.leave(cid)
            self._events.append(exchange_rules.Refused(cid, wrong.code))

    def _note_refusal(self, cid: ClientId, reason: str) -> None:
        """Store, for `status`, why this device's answer does not count."""
        if cid not in self._state.accepted and not self.closed:
            self._context.store.exchanges.put_refusal(self.key, cid, reason)

    def _excuse(self, cid: ClientId, failure: str) -> bool:
        """Whether this failure of the device is the first of its kind."""
        first = (cid, failure) not in self._excused
        self._excused.add((cid, failure))
        return first


def _quorum(tasks: NetworkExchange, context: ExchangeContext) -> float:
    """A sum that has begun fails by its own threshold."""
    waits = all(task.needs_quorum for task in tasks.values() if isinstance(task, AskedStage))
    return context.config.round.quorum if waits else 0.0


def _key_of(message: Mapping[str, Any]) -> ExchangeKey:
    return ExchangeKey(message["run"], message.get("round", -1), message.get("exchange", -1))
