"""Updates that come after their exchange has closed, kept for methods that can use them.

They are admitted like any other, stored apart, and answered `late` all the same: the round that they were meant for is
over, and stays what it was. The next round of the run is shown them (training_loop.py). Only of the exchange that
closed last: what is older is answered and not taken. One upload per device, within the credits and the bytes of an
exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from coordinator.rounds.update_validation import decode_reply, outliers, update_rms
from coordinator.runtime.sender import RETRY_MS, UPLOAD_SHARD, UPLOAD_WINDOW
from coordinator.runtime.task_messages import ExchangeContext, PreparedTask
from coordinator.runtime.uploads import OpenUploads, have_field
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from edge_client.errors import Malformed
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.message_schemas import ACK_STATUSES, MAX_DETAIL_CHARS
from edge_client.protocol.task import ClientId


class LateUpdates:
    """The devices that a closed exchange did not wait for. `announced` are those whose upload was under way."""

    def __init__(
        self,
        key: ExchangeKey,
        prepared: Mapping[ClientId, PreparedTask],
        context: ExchangeContext,
        *,
        answered: Collection[ClientId],
        announced: Mapping[ClientId, Mapping[str, Any]],
    ) -> None:
        self.key, self._desk = key, context
        self._asked = {
            cid: a for cid, a in prepared.items() if cid not in answered and a.reply_spec.blob_kind == "delta"
        }
        self._uploads = OpenUploads(context.store)
        self._rdy: dict[ClientId, Mapping[str, Any]] = {}  # of the uploads that are open
        for cid, rdy in announced.items():
            self.on_ready(cid, rdy)

    def on_ready(self, cid: ClientId, rdy: Mapping[str, Any]) -> bool:
        """Take in, or ask for, an update; -> False: it is none that we keep, and whoever asked answers it."""
        asked, manifest = self._asked.get(cid), Manifest.from_json(rdy["update"])
        if asked is None or manifest.kind != "delta" or manifest.size > asked.max_size:
            return False
        if manifest.inline is not None:
            self._judge(cid, rdy, manifest.inline)
        elif cid not in self._rdy and self._full(manifest.size):
            self._desk.sender.send(cid, "err", re=rdy["id"], code="busy", retry_ms=RETRY_MS)
        else:
            self._begin(cid, rdy, manifest)
        return True

    def expects(self, cid: ClientId) -> bool:
        """Whether blocks of this device are ours."""
        return cid in self._rdy

    def on_block(self, cid: ClientId, label: str | None, index: int, message: bytes) -> None:
        """A block of an open upload; what was not expected is dropped."""
        if self._uploads.expects(cid, label):
            self._receive(cid, lambda: self._uploads.take(cid, index, message))

    def close(self) -> None:
        """Another exchange has closed: nobody waits for these any more."""
        self._uploads.abandon_all()
        self._rdy.clear()

    def _receive(self, cid: ClientId, step: Callable[[], Path | None]) -> None:
        """One step of an upload; the blob, once it is whole, is judged."""
        try:
            whole = step()
        except Malformed as wrong:
            self._answer(cid, self._rdy.pop(cid), wrong.code if wrong.code in ACK_STATUSES else "late")
        except OSError as full:
            self._answer(
                cid, self._rdy.pop(cid), "retry", detail=str(full.strerror)[:MAX_DETAIL_CHARS], retry_ms=RETRY_MS
            )
        else:
            if whole is not None:
                self._judge(cid, self._rdy.pop(cid), whole.read_bytes())

    def _full(self, size: int) -> bool:
        held = sum(rdy["update"]["size"] for rdy in self._rdy.values())
        config = self._desk.config
        return bool(self._rdy) and (len(self._rdy) >= config.credits or held + size > config.in_flight_bytes)

    def _begin(self, cid: ClientId, rdy: Mapping[str, Any], manifest: Manifest) -> None:
        try:
            have = self._uploads.begin(cid, manifest)
        except (Malformed, OSError) as full:
            self._answer(cid, rdy, "retry", detail=str(full)[:MAX_DETAIL_CHARS], retry_ms=RETRY_MS)
            return
        self._rdy[cid] = rdy
        if have.complete:  # a crash came right after its last block: the device owes none
            self._receive(cid, lambda: self._uploads.finish(cid))
            return
        sha256 = manifest.sha256
        self._desk.sender.send(
            cid, "go", re=rdy["id"], sha256=sha256, shard=UPLOAD_SHARD, window=UPLOAD_WINDOW, have=have_field(have)
        )

    def _judge(self, cid: ClientId, rdy: Mapping[str, Any], data: bytes) -> None:
        question = self._asked[cid].reply_spec
        try:
            reply = decode_reply(question, data, rdy["n"])
            self._check_move(cid, update_rms(question, reply))
            sha256 = self._desk.store.updates(cid).put(data)
            record = StoredReply(cid, sha256, len(data), reply.n, "delta", question.base, rdy["seconds"])
            self._desk.store.late_updates.put(self.key, record)
        except Malformed as wrong:
            self._answer(
                cid,
                rdy,
                wrong.code if wrong.code in ACK_STATUSES else "bad_schema",
                detail=str(wrong)[:MAX_DETAIL_CHARS],
            )
            return
        except OSError as full:
            self._answer(cid, rdy, "retry", detail=str(full.strerror)[:MAX_DETAIL_CHARS], retry_ms=RETRY_MS)
            return
        del self._asked[cid]
        self._answer(cid, rdy, "late")

    def _check_move(self, cid: ClientId, far: tuple[str, float] | None) -> None:
        """Against the scale that the exchange closed with: coming late is no way around it."""
        config, scales = self._desk.config, self._desk.store.exchanges.scales(self.key.run)
        refused, _ = outliers({} if far is None else {cid: far}, scales, ratio=config.max_update_ratio)
        if refused:
            raise Malformed("rejected", refused[cid].removeprefix("rejected: "))

    def _answer(self, cid: ClientId, rdy: Mapping[str, Any], status: str, **more: Any) -> None:  # noqa: ANN401
        about = {"attempt": rdy["attempt"], "sha256": rdy["update"]["sha256"]}
        self._desk.sender.send(cid, "ack", **self.key._asdict(), **about, status=status, **more)
