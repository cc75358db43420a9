"""One exchange from its task to its replies: exchange_rules.py decides, the store writes, then the devices are told.

`run_exchange` is the `ask` of a method's driver. It replays an exchange that is already closed, continues one that a
crash left open, and opens a new one; all three give the same replies. It sends through the link and waits through
`pump`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.rounds import exchange_rules
from coordinator.rounds.update_validation import decode_reply, outliers, update_rms
from coordinator.runtime.late_updates import LateUpdates
from coordinator.runtime.sender import RETRY_MS, UPLOAD_SHARD, UPLOAD_WINDOW
from coordinator.runtime.task_messages import ExchangeContext, PreparedTask, prepare_tasks
from coordinator.runtime.uploads import OpenUploads, have_field
from coordinator.storage.exchange_store import ExchangeKey, ReplayDiverged, StoredReply
from coordinator.strategies.base import Exchange, Replies, notify_reply
from edge_client.errors import Malformed, NetworkError
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.message_schemas import ACK_STATUSES, MAX_DETAIL_CHARS
from edge_client.protocol.task import ClientId, Reply

HEARTBEAT_S = 5.0

RunUntilClosed = Callable[["LiveExchange"], None]


def run_exchange(
    key: ExchangeKey,
    tasks: Exchange,
    wanted: int | None,
    context: ExchangeContext,
    pump: RunUntilClosed,
    *,
    late: bool = False,
) -> Replies:
    """Ask these tasks and wait for the replies, `wanted` of them at most; None: all that come before the deadline.

    `pump` runs the event loop until the exchange is closed. `late`: what comes after that is kept, too.
    """
    asked = prepare_tasks(key, tasks, context)
    hashes = {cid: a.sha256 for cid, a in asked.items()}
    if not context.store.exchanges.exists(key):
        context.store.exchanges.open(key, hashes, context.config.deadline_s)
    elif not _same_question(context.store.exchanges.task_hashes(key), hashes):
        raise ReplayDiverged(key)
    replies: dict[ClientId, Reply] = {}
    if context.store.exchanges.closed_with(key) is None:
        live = LiveExchange(key, tasks, asked, wanted, context, late=late)
        live.begin()
        pump(live)
        replies = live.replies
    stored = context.store.exchanges.replies(key)
    closed = context.store.exchanges.closed_with(key) or []
    return _StoredReplies(closed, lambda cid: replies.get(cid) or _read_again(asked[cid], stored[cid], context))


def _same_question(stored: Mapping[ClientId, str], asked: Mapping[ClientId, str]) -> bool:
    """Whether a replay asks what was asked; of what a version before this one asked, only whom."""
    return stored.keys() == asked.keys() and all(known in ("", asked[cid]) for cid, known in stored.items())


class _StoredReplies(Mapping[ClientId, Reply]):
    """The replies of these devices; models are read from disk when they are looked at, and not kept."""

    def __init__(self, cids: Collection[ClientId], read: Callable[[ClientId], Reply]) -> None:
        self._cids, self._read = dict.fromkeys(cids), read

    def __getitem__(self, cid: ClientId) -> Reply:
        if cid not in self._cids:
            raise KeyError(cid)
        return self._read(cid)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._cids)

    def __len__(self) -> int:
        return len(self._cids)


def _read_again(prepared: PreparedTask, stored: StoredReply, context: ExchangeContext) -> Reply:
    return decode_reply(prepared.reply_spec, context.store.updates(stored.cid).read(stored.sha256), stored.n)


class LiveExchange:
    """The exchange that is open now. Its methods are called by the event loop, one event at a time."""

    def __init__(
        self,
        key: ExchangeKey,
        tasks: Exchange,
        prepared: Mapping[ClientId, PreparedTask],
        wanted: int | None,
        context: ExchangeContext,
        *,
        late: bool = False,
    ) -> None:
        self.key, self.asked, self.desk, self._tasks = key, prepared, context, tasks
        self.late_updates: LateUpdates | None = None  # once it is closed, where late updates are kept
        self._late = late
        self.replies: dict[ClientId, Reply] = {}  # small ones; whole models wait on disk
        now_s, goal = context.clock.now_s(), len(prepared) if wanted is None else min(wanted, len(prepared))
        self._state = exchange_rules.open_exchange(
            run=key.run,
            round=key.round,
            number=key.exchange,
            asked=prepared.keys(),
            goal=goal,
            quorum=math.ceil(round(context.config.quorum * goal, 9)),
            now_s=now_s,
            deadline_s=context.store.exchanges.left_s(key),
            credits=context.config.credits,
            budget=context.config.in_flight_bytes,
            accepted={cid: reply.sha256 for cid, reply in context.store.exchanges.replies(key).items()},
        )
        self._beat_s = now_s
        self._uploads = OpenUploads(context.store)
        self._sent: dict[ClientId, str] = {}  # id of the last task message
        self._rdy: dict[ClientId, Mapping[str, Any]] = {}
        self._checked: dict[ClientId, tuple[StoredReply, Reply]] = {}
        self._moves: dict[ClientId, tuple[str, float] | None] = {}
        self._warned: set[tuple[ClientId, str]] = set()
        self._events: deque[exchange_rules.Event] = deque()

    @property
    def closed(self) -> bool:
        """Whether the replies are final."""
        return self._state.closed

    @property
    def wakes_at_s(self) -> float:
        """When `tick` has something to do."""
        return min(self._state.wakes_at_s, self._beat_s + HEARTBEAT_S)

    def progress(self) -> dict[str, Any]:
        """For people: who does what. What has no answer and no upload is training, or not there."""
        state = self._state
        quiet = state.asked - state.accepted.keys() - state.refused.keys() - state.uploads.keys() - state.queue.keys()
        return {
            **self.key._asdict(),
            "asked": len(state.asked),
            "wanted": state.goal,
            "quorum": state.quorum,
            "closed": state.closed,
            "left_s": round(max(0.0, state.closes_at_s - self.desk.clock.now_s()), 1),
            "answered": sorted(state.accepted),
            "uploading": sorted(state.uploads),
            "waiting": sorted(state.queue),
            "refused": sorted(state.refused),
            "open": sorted(quiet),
        }

    def begin(self) -> None:
        """Grant the blobs and send every task that has no stored reply; also after the broker forgot everything."""
        for cid, asked in self.asked.items():
            self.desk.downloads.grant(cid, asked.blobs)
        for cid in self.asked:
            self.resend_task(cid)
        self.tick()

    def resend_task(self, cid: ClientId) -> None:
        """Send the task again, unless the device has answered."""
        if cid not in self.asked or cid in self._state.accepted or cid in self._state.refused or self.closed:
            return
        left_ms = max(0, int((self._state.closes_at_s - self.desk.clock.now_s()) * 1000))
        self._sent[cid] = self.desk.sender.send(cid, "task", left_ms=left_ms, **self.asked[cid].fields)

    def tick(self) -> None:
        """Let time pass: deadlines, silent uploads, the heartbeat."""
        now_s = self.desk.clock.now_s()
        if now_s >= self._beat_s + HEARTBEAT_S:
            self._beat_s = now_s
            with suppress(OSError):  # on a full disk a restart gives the exchange more time than it had left
                self.desk.store.exchanges.heartbeat(self.key, max(0.0, self._state.closes_at_s - now_s))
        self._apply(exchange_rules.Tick())

    def close(self) -> None:
        """Now instead of at the deadline: with whoever has answered, by the same rules of the quorum."""
        self._state = replace(self._state, closes_at_s=self.desk.clock.now_s())
        self.tick()

    def on_ready(self, cid: ClientId, rdy: Mapping[str, Any]) -> None:
        """A device has a result of this exchange. Raises Malformed with the code of the error answer."""
        asked = self.asked.get(cid)
        if asked is None:
            raise Malformed("closed", "you were not asked")
        manifest = Manifest.from_json(rdy["update"])
        if manifest.kind != asked.reply_spec.blob_kind:
            raise Malformed("bad_field", f"asked for {asked.reply_spec.blob_kind}, got {manifest.kind}")
        if manifest.size > asked.max_size:
            raise Malformed("too_big", f"{manifest.size} bytes, at most {asked.max_size}")
        self._rdy[cid] = rdy
        self._apply(exchange_rules.Ready(cid, manifest.sha256, manifest.size))

    def on_block(self, cid: ClientId, label: str | None, index: int, message: bytes) -> None:
        """A block of an upload. What was not expected is dropped."""
        if cid not in self._state.uploads:  # its credit went back; what has arrived stays
            self._uploads.end(cid)
        if not self._uploads.expects(cid, label):
            return
        self._receive(cid, lambda: self._uploads.take(cid, index, message))
        self._drain()

    def on_nack(self, cid: ClientId, nack: Mapping[str, Any]) -> None:
        """A device will not answer. `unreachable` is asked once more: the blobs may have come meanwhile."""
        ours = nack["re"] == self._sent.get(cid) if "run" not in nack else _key_of(nack) == self.key
        if cid not in self.asked or not ours:
            return
        if nack["code"] == "unreachable" and self._first(cid, "unreachable"):
            self.resend_task(cid)
            return
        self._note(cid, f"{nack['code']}: {nack.get('detail', '')}".removesuffix(": "))
        retry_ms = nack.get("retry_ms")
        self._apply(exchange_rules.Refused(cid, nack["code"], None if retry_ms is None else retry_ms / 1000))

    # -- decide, store, act

    def _apply(self, event: exchange_rules.Event) -> None:
        self._events.append(event)
        self._drain()

    def _drain(self) -> None:
        """Every event to its end; carrying out a command may add more events."""
        while self._events:
            after, commands = exchange_rules.advance(self._state, self._events.popleft(), self.desk.clock.now_s())
            if not all(self._kept(command) for command in commands):
                continue
            before, self._state = self._state, after
            for command in commands:
                self._carry_out(command, before)

    def _kept(self, command: exchange_rules.Command) -> bool:
        """Whether it is on disk. A reply for which there is no room has not come; its device says it again later."""
        try:
            self._store(command)
        except OSError as full:
            if not isinstance(command, exchange_rules.Ack):
                raise
            self._retry(command.cid, full.strerror)
            return False
        return True

    def _store(self, command: exchange_rules.Command) -> None:
        """What must be on disk before anybody hears of it."""
        if isinstance(command, exchange_rules.Ack) and command.status == "ok":
            record, reply = self._checked.pop(command.cid)
            self.desk.store.exchanges.put_reply(self.key, record)
            self._moves[command.cid] = update_rms(self.asked[command.cid].reply_spec, reply)
            notify_reply(self._tasks, command.cid, reply)
            if reply.update is None:
                self.replies[command.cid] = reply
        elif isinstance(command, exchange_rules.Close):
            if not command.enough and self.desk.config.below_quorum == "stop":
                # A restarted coordinator gives the exchange a whole deadline.
                self.desk.store.exchanges.heartbeat(self.key, self.desk.config.deadline_s)
                few = f"only {len(command.keys)} of {self._state.goal} devices gave an answer that counts"
                raise NetworkError(
                    f"{few} in round {self.key.round}",
                    hint="`fedcenters-coordinator status` says who refused and why; start again to repeat the exchange,"
                    ' lower `quorum`, or set below-quorum = "continue"',
                )
            self._close(command.keys)

    def _close(self, keys: Collection[ClientId]) -> None:
        """With everybody's reply but those that are out of line with the others; both are stored together."""
        store = self.desk.store.exchanges
        unknown = {cid: store.replies(self.key)[cid] for cid in keys if cid not in self._moves}  # a crash forgot them
        for cid, stored in unknown.items():
            asked = self.asked[cid]
            self._moves[cid] = update_rms(asked.reply_spec, _read_again(asked, stored, self.desk))
        moves = {cid: far for cid in keys if (far := self._moves[cid]) is not None}
        ratio = self.desk.config.max_update_ratio
        refused, scales = outliers(moves, store.scales(self.key.run), ratio=ratio)
        store.close(self.key, set(keys) - refused.keys(), refused=refused, scales=scales)

    def _carry_out(self, command: exchange_rules.Command, before: exchange_rules.OpenExchange) -> None:
        if isinstance(command, exchange_rules.Ack):
            self._ack(command.cid, command.status, sha256=command.sha256)
        elif isinstance(command, exchange_rules.Busy):
            rdy = self._rdy[command.cid]
            self.desk.sender.send(command.cid, "err", re=rdy["id"], code="busy", retry_ms=int(command.retry_s * 1000))
        elif isinstance(command, exchange_rules.Go):
            self._go(command.cid)
        elif self._late:
            self._uploads.end_all()
            announced = {cid: self._rdy[cid] for cid in (*before.uploads, *before.queue) if cid not in command.keys}
            self.late_updates = LateUpdates(
                self.key, self.asked, self.desk, answered=before.accepted.keys() | command.keys, announced=announced
            )
        else:
            self._uploads.abandon_all()
            for cid in sorted(before.asked - before.accepted.keys() - before.refused.keys() - command.keys):
                self.desk.sender.send(cid, "stop", **self.key._asdict(), why="the exchange is closed")

    def _go(self, cid: ClientId) -> None:
        """A credit: take the blob from the announcement itself, or ask for its blocks."""
        rdy = self._rdy[cid]
        manifest = Manifest.from_json(rdy["update"])
        if manifest.inline is not None:
            self._judge(cid, manifest.inline)
            return
        try:
            have = self._uploads.begin(cid, manifest)
        except (Malformed, OSError) as full:
            self._retry(cid, str(full))
            return
        if have.complete:  # a crash came right after its last block: the device owes none
            self._receive(cid, lambda: self._uploads.finish(cid))
            return
        self.desk.sender.send(
            cid,
            "go",
            re=rdy["id"],
            sha256=manifest.sha256,
            shard=UPLOAD_SHARD,
            window=UPLOAD_WINDOW,
            have=have_field(have),
        )

    def _receive(self, cid: ClientId, step: Callable[[], Path | None]) -> None:
        """One step of an upload; the blob, once it is whole, is judged."""
        try:
            whole = step()
        except Malformed as wrong:
            self._refuse(cid, wrong)
        except OSError as full:
            self._retry(cid, full.strerror)
        else:
            self._events.append(exchange_rules.Block(cid))
            if whole is not None:
                self._judge(cid, whole.read_bytes())

    def _judge(self, cid: ClientId, data: bytes) -> None:
        """A whole blob with the right hash: acceptable, or refused for good?"""
        rdy, question = self._rdy[cid], self.asked[cid].reply_spec
        folder = self.desk.store.updates(cid)
        try:
            reply = decode_reply(question, data, rdy["n"])
        except Malformed as wrong:
            folder.drop(rdy["update"]["sha256"])
            self._refuse(cid, wrong)
            return
        try:
            sha256 = folder.put(data)
        except OSError as full:
            self._retry(cid, full.strerror)
            return
        base = question.base if question.blob_kind == "delta" else ""
        record = StoredReply(cid, sha256, len(data), rdy["n"], question.blob_kind, base, rdy["seconds"])
        self._checked[cid] = (record, reply)
        self._events.append(exchange_rules.Stored(cid, sha256))

    def _refuse(self, cid: ClientId, wrong: Malformed) -> None:
        """Tell why. A wrong hash may be sent once more; everything else counts as this device's answer."""
        code = wrong.code if wrong.code in ACK_STATUSES else "bad_schema"
        self._ack(cid, code, detail=str(wrong)[:MAX_DETAIL_CHARS])
        if code != "bad_hash" or not self._first(cid, "bad_hash"):
            self._note(cid, str(wrong))
            self._events.append(exchange_rules.Refused(cid, code))

    def _note(self, cid: ClientId, reason: str) -> None:
        """For people: why this device's answer does not count."""
        if cid not in self._state.accepted and not self.closed:
            self.desk.store.exchanges.put_refusal(self.key, cid, reason)

    def _retry(self, cid: ClientId, why: str | None) -> None:
        self._ack(cid, "retry", detail=f"storage: {why}"[:MAX_DETAIL_CHARS], retry_ms=RETRY_MS)

    def _first(self, cid: ClientId, what: str) -> bool:
        first = (cid, what) not in self._warned
        self._warned.add((cid, what))
        return first

    def _ack(self, cid: ClientId, status: str, *, sha256: str | None = None, **more: Any) -> None:  # noqa: ANN401
        rdy = self._rdy[cid]
        about = {"attempt": rdy["attempt"], "sha256": sha256 or rdy["update"]["sha256"]}
        self.desk.sender.send(cid, "ack", **self.key._asdict(), **about, status=status, **more)


def _key_of(message: Mapping[str, Any]) -> ExchangeKey:
    return ExchangeKey(message["run"], message.get("round", -1), message.get("exchange", -1))
