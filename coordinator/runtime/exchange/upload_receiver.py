"""Receives the announced updates of one exchange: upload, validate, store, acknowledge.

Updates that arrive together are written to disk together: `sync` waits for the disk once for all valid updates since
the last time, and only then are they accepted. The event loop calls it as soon as no message waits.

Live and late updates take the same path. The exchange that asked for an update passes what differs: an additional
check, what follows an accepted update, and what follows a refused one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from coordinator.rounds.update_validation import ReplySpec, decode_reply
from coordinator.runtime.envelope import Envelope
from coordinator.runtime.exchange.task_messages import ExchangeContext, PreparedTask
from coordinator.runtime.exchange.uploads import OpenUploads, have_field
from coordinator.runtime.sender import RETRY_MS, UPLOAD_WINDOW
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from edge_client.errors import Malformed
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.message_schemas import ACK_STATUSES, MAX_DETAIL_CHARS
from edge_client.protocol.task import ClientId, Reply
from edge_client.protocol.topics import UPLOAD_SHARDS, client_shard
from edge_client.transport.blobs import StagedBlob, publish_blobs

log = logging.getLogger(__name__)
MAX_UNSYNCED = 64  # updates, which wait for the disk together
MAX_UNSYNCED_BYTES = 8 * 2**20  # of these; their models are in memory, up to four times as large as their bytes


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that wait for the disk; the system writes at once what several of them wait for."""
    return ThreadPoolExecutor(MAX_UNSYNCED, thread_name_prefix="sync")


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """A device's `rdy`: the update that it offers. `ident` is the id of the message, `n` its claimed sample count."""

    cid: ClientId
    key: ExchangeKey
    ident: str | None
    attempt: int
    n: int
    seconds: float
    update: Manifest

    @classmethod
    def from_message(cls, message: Envelope) -> Announcement:
        """The announcement that a checked `rdy` message makes."""
        rdy = message.fields
        return cls(
            cid=message.cid,
            key=ExchangeKey(rdy["run"], rdy["round"], rdy["exchange"]),
            ident=message.ident,
            attempt=rdy["attempt"],
            n=rdy["n"],
            seconds=rdy["seconds"],
            update=Manifest.from_json(rdy["update"]),
        )

    def ack_fields(self) -> dict[str, Any]:
        """The fields that name this update in an `ack`."""
        return {**self.key._asdict(), "attempt": self.attempt, "sha256": self.update.sha256}


@dataclass(frozen=True, kw_only=True)
class UploadPolicy:
    """What an exchange adds to the common path of its uploads."""

    on_accepted: Callable[[StoredReply, Reply], None]  # the update is on disk; called by `sync`
    on_refused: Callable[[ClientId, Malformed], None]  # the `ack` with the reason is sent
    check: Callable[[ClientId, ReplySpec, Reply], None] = lambda *_: None  # raises Malformed for a reply to refuse


@dataclass(frozen=True, kw_only=True)
class _Valid:
    """A valid update that is not on disk for certain; `blob` is None for one that was there before."""

    record: StoredReply
    reply: Reply
    update: Manifest
    blob: StagedBlob | None


class UploadReceiver:
    """The uploads of one exchange; `uploads` are the open ones."""

    def __init__(
        self,
        prepared: Mapping[ClientId, PreparedTask],
        context: ExchangeContext,
        policy: UploadPolicy,
    ) -> None:
        self.uploads = OpenUploads(context.store)
        self._announced: dict[ClientId, Announcement] = {}
        self._valid: dict[ClientId, _Valid] = {}  # in the order of arrival
        self._new: dict[ClientId, Path] = {}  # the file of each device's last accepted update, if none had it before
        self._valid_since_s, self._clock = 0.0, context.clock
        self._prepared, self._policy = prepared, policy
        self._store, self._sender, self._unable = context.store, context.sender, context.unable
        self.no_room: dict[ClientId, str] = {}  # why an update of these devices could not be stored when it came

    def check_offer(self, said: Announcement) -> None:
        """Raise Malformed, with the code of the error answer, for an update that the device was not asked for."""
        asked, update = self._prepared[said.cid], said.update
        if update.kind != asked.reply_spec.blob_kind:
            raise Malformed("bad_field", f"asked for {asked.reply_spec.blob_kind}, got {update.kind}")
        if update.size > asked.max_size:
            raise Malformed("too_big", f"{update.size} bytes, at most {asked.max_size}")

    def announce(self, said: Announcement) -> None:
        """Remember what a device offers, instead of what it offered before."""
        self._announced[said.cid] = said

    def announced(self, cid: ClientId) -> Announcement:
        return self._announced[cid]

    def begin(self, cid: ClientId) -> None:
        """Take the announced update from its `rdy` if it is inline, else ask the device for the missing blocks."""
        said = self._announced[cid]
        if said.update.inline is not None:
            self.uploads.end(cid)
            self._receive(cid, said.update.inline)
            return
        try:
            have = self.uploads.begin(cid, said.update)
        except (Malformed, OSError) as full:
            self.retry(cid, str(full))
            return
        if have.complete:  # the last process stopped after the last block; the device has nothing left to send
            self._step(cid, lambda: self.uploads.finish(cid))
            return
        self._sender.send(
            cid,
            "go",
            re=said.ident,
            sha256=said.update.sha256,
            shard=client_shard(cid, UPLOAD_SHARDS),
            window=UPLOAD_WINDOW,
            have=have_field(have),
        )

    def on_block(self, cid: ClientId, label: str | None, index: int, message: bytes) -> bool:
        """Take one block; -> whether it brought an open upload further: neither repeated, unreadable nor refused."""
        if not self.uploads.expects(cid, label):
            return False
        before = self.uploads.blocks(cid)
        return self._step(cid, lambda: self.uploads.take(cid, index, message)) and self.uploads.blocks(cid) != before

    def ack(self, cid: ClientId, status: str, **fields: Any) -> None:  # noqa: ANN401 - the message's fields
        """Answer the device's last announcement."""
        self._sender.send(cid, "ack", **(self._announced[cid].ack_fields() | {"status": status} | fields))

    def retry(self, cid: ClientId, reason: str | None) -> None:
        """Tell the device, and once the log, that its update could not be stored and may be announced again later."""
        if not self.no_room:
            pause_s = RETRY_MS // 1000
            log.warning("an update of %s could not be stored: %s; devices try again every %d s", cid, reason, pause_s)
        self.no_room[cid] = str(reason)
        self.ack(cid, "retry", detail=f"storage: {reason}"[:MAX_DETAIL_CHARS], retry_ms=RETRY_MS)

    def _accept(self, valid: _Valid) -> None:
        try:
            self._policy.on_accepted(valid.record, valid.reply)
        except OSError as full:
            self.retry(valid.record.cid, full.strerror)

    def is_unsynced(self, cid: ClientId) -> bool:
        """Whether an update of this device waits for `sync`."""
        return cid in self._valid

    @property
    def unsynced_since_s(self) -> float:
        """Since when a valid update waits for `sync`; infinity where none does."""
        return self._valid_since_s if self._valid else math.inf

    def sync(self) -> None:
        """Write the valid updates to disk, all at once, and accept them. On a full disk their devices try again."""
        valid = self._take_valid()
        blobs = [each.blob for each in valid.values() if each.blob is not None]
        for cid, each in valid.items():
            self._new.pop(cid, None)
            if each.blob is not None and not each.blob.path.exists():
                self._new[cid] = each.blob.path
        try:
            publish_blobs(blobs, _pool().map if len(blobs) > 1 else map)
        except OSError as full:
            for cid, each in valid.items():
                if each.blob is not None:
                    each.blob.discard()
                self.retry(cid, full.strerror)
            return
        for each in valid.values():
            self._accept(each)

    def drop(self, cid: ClientId) -> None:
        """Delete the accepted update of a device: it does not count, and nothing else would ever name it."""
        if new := self._new.pop(cid, None):
            new.unlink(missing_ok=True)

    def forget_unsynced(self) -> None:
        """Drop the updates that wait for `sync`: the exchange has closed, and their devices were told nothing."""
        for each in self._take_valid().values():
            if each.blob is not None:
                each.blob.discard()

    def _take_valid(self) -> dict[ClientId, _Valid]:
        valid, self._valid = self._valid, {}
        for cid, each in valid.items():
            self.uploads.let_go(cid, each.update)
        return valid

    def _step(self, cid: ClientId, step: Callable[[], StagedBlob | None]) -> bool:
        """One step of an upload; a complete blob is validated."""
        whole: StagedBlob | None = None
        try:
            whole = step()
            data = b"" if whole is None else whole.read()
        except Malformed as wrong:
            self._refuse(cid, wrong)
            return False
        except OSError as full:
            if whole is not None:
                whole.discard()
            self.uploads.end(cid)  # else each block on its way has an answer, too
            self.retry(cid, full.strerror)
            return False
        if whole is not None:
            self._receive(cid, data, whole)
        return True

    def _receive(self, cid: ClientId, data: bytes, blob: StagedBlob | None = None) -> None:
        """Validate a complete blob whose hash is right, and let it wait for `sync`. `blob`: its bytes in a file."""
        said, asked = self._announced[cid], self._prepared[cid]
        spec = asked.reply_spec
        try:
            reply = decode_reply(spec, data, said.n)
            self._policy.check(cid, spec, reply)
        except Malformed as wrong:
            if blob is not None:
                blob.discard()
            self._refuse(cid, wrong)
            return
        self._unable.forget(cid, asked.kind)
        try:
            blob = blob or self._store.updates(cid).stage(data)
        except OSError as full:
            self.retry(cid, full.strerror)
            return
        base = spec.base if spec.blob_kind == "delta" else ""
        record = StoredReply(cid, said.update.sha256, len(data), said.n, spec.blob_kind, base, said.seconds)
        self._valid_since_s = self._valid_since_s if self._valid else self._clock.now_s()
        self._valid[cid] = _Valid(record=record, reply=reply, update=said.update, blob=blob)
        self.uploads.keep(cid, said.update)
        size = sum(each.record.size for each in self._valid.values())
        if len(self._valid) >= MAX_UNSYNCED or size >= MAX_UNSYNCED_BYTES:
            self.sync()

    def _refuse(self, cid: ClientId, wrong: Malformed) -> None:
        code = wrong.code if wrong.code in ACK_STATUSES else "bad_schema"
        self.ack(cid, code, detail=str(wrong)[:MAX_DETAIL_CHARS])
        self._policy.on_refused(cid, wrong)
