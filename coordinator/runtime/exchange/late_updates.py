"""Updates that come after their exchange has closed, kept for methods that can use them.

A late update is validated like any other, stored apart, and answered `ok`, because the device's next update has to add
the residual of this one. The round that it was meant for keeps its result; the next round of the run is given the late
updates (training_loop.py). Only updates of the exchange that closed last, of those that ask for updates, are taken: one
per device, within the credits and the bytes of an exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from coordinator.rounds.update_validation import ReplySpec, outliers, update_moves
from coordinator.runtime.exchange.task_messages import ExchangeContext, PreparedTask
from coordinator.runtime.exchange.upload_receiver import Announcement, UploadPolicy, UploadReceiver
from coordinator.runtime.exchange.uploads import NO_CREDIT, UploadCredits
from coordinator.runtime.sender import RETRY_MS
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from edge_client.errors import Malformed
from edge_client.protocol.task import ClientId, Reply


class LateUpdates:
    """The devices that a closed exchange did not wait for. `announced` are those whose upload was under way."""

    def __init__(
        self,
        key: ExchangeKey,
        prepared: Mapping[ClientId, PreparedTask],
        context: ExchangeContext,
        *,
        answered: Collection[ClientId],
        announced: Iterable[Announcement],
    ) -> None:
        self.key, self._context = key, context
        self._prepared = {
            cid: asked
            for cid, asked in prepared.items()
            if cid not in answered and asked.reply_spec.blob_kind == "delta"
        }
        policy = UploadPolicy(check=self._check_move, on_accepted=self._keep, on_refused=lambda _cid, _wrong: None)
        self._receiver = UploadReceiver(self._prepared, context, policy)
        self._credits = UploadCredits.of(self._receiver.uploads, context.config)
        for said in announced:
            self.on_ready(said)

    @property
    def expected(self) -> Collection[ClientId]:
        """The devices whose update would be taken; what has come of it stays on disk."""
        return self._prepared.keys()

    def on_ready(self, said: Announcement) -> bool:
        """Take an update, or ask for its blocks; -> False for an update that is not kept, which the caller answers."""
        if self._receiver.is_unsynced(said.cid):
            self.sync()
        cid, asked = said.cid, self._prepared.get(said.cid)
        now_s = self._context.clock.now_s()
        if asked is None or said.update.kind != "delta" or said.update.size > asked.max_size:
            return False
        if said.update.inline is None and self._credits.is_full(cid, said.update.size, now_s):
            self._context.sender.send(cid, "err", re=said.ident, code="busy", detail=NO_CREDIT, retry_ms=RETRY_MS)
        else:
            self._credits.give(cid, said.update, now_s)
            self._receiver.announce(said)
            self._receiver.begin(cid)
        return True

    def expects(self, cid: ClientId, label: str | None) -> bool:
        """Whether a block with this label belongs to an upload that is open here."""
        return self._receiver.uploads.expects(cid, label)

    def on_block(self, cid: ClientId, label: str | None, index: int, message: bytes) -> None:
        """Take a block of an open upload; any other block is dropped."""
        if self._receiver.on_block(cid, label, index, message):
            self._credits.heard(cid, len(message), self._context.clock.now_s())

    @property
    def unsynced_since_s(self) -> float:
        return self._receiver.unsynced_since_s

    def sync(self) -> None:
        """Store what has arrived, and tell the devices."""
        self._receiver.sync()

    def close(self) -> None:
        """Another exchange has closed: drop the uploads that are still open."""
        self.sync()
        self._receiver.uploads.abandon(self._prepared)

    def _check_move(self, cid: ClientId, spec: ReplySpec, reply: Reply) -> None:
        """Compare the update's norm with the scale that the exchange closed with, as for an update in time."""
        moves, scales = {cid: update_moves(spec, reply)}, self._context.store.exchanges.scales(self.key.run)
        ratio = self._context.config.update.max_ratio
        refused, _ = outliers(moves, scales, ratio=ratio)
        if refused:
            raise Malformed("rejected", refused[cid].removeprefix("rejected: "))

    def _keep(self, record: StoredReply, _reply: Reply) -> None:
        self._context.store.late_updates.put(self.key, record)
        del self._prepared[record.cid]
        self._receiver.ack(record.cid, "ok")
