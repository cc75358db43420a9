"""Passes announcements, blocks and refusals to the open exchange or to the late updates of the one before."""

from __future__ import annotations

import math
from collections.abc import Collection

from coordinator.rounds.silence import LastingRefusals
from coordinator.runtime.envelope import Envelope
from coordinator.runtime.exchange.late_updates import LateUpdates
from coordinator.runtime.exchange.live_exchange import LiveExchange
from coordinator.runtime.exchange.updates_and_test import UpdatesAndTest
from coordinator.runtime.exchange.upload_receiver import Announcement
from coordinator.runtime.sender import CoordinatorSender
from coordinator.storage.store import Store
from edge_client.errors import Malformed
from edge_client.protocol.task import ClientId

Live = LiveExchange | UpdatesAndTest


class CurrentExchange:
    """`live`: the exchange that is open now, if there is one. The one before may still take late updates."""

    def __init__(self, store: Store, sender: CoordinatorSender) -> None:
        self._store, self._sender = store, sender
        self.live: Live | None = None
        self.unable = LastingRefusals()
        self._late: LateUpdates | None = None

    def end(self) -> None:
        """The open exchange is closed; its late updates, if it keeps them, replace those of the exchange before."""
        late = None if self.live is None else self.live.late_updates
        self.live = None
        if late is not None:
            if self._late is not None:
                self._late.close()
            self._late = late

    @property
    def unsynced_since_s(self) -> float:
        """Since when an update waits for the disk; infinity where none does."""
        return min((part.unsynced_since_s for part in (self.live, self._late) if part is not None), default=math.inf)

    def sync(self) -> None:
        """Store the updates that have arrived, all at once, and tell their devices."""
        for part in (self.live, self._late):
            if part is not None:
                part.sync()

    def on_quiet(self) -> None:
        """No device waits for the coordinator."""
        if self.live is not None:
            self.live.on_quiet()

    def on_connected(self, cid: ClientId) -> None:
        """A device that is new may be able to do more."""
        self.unable.rows.pop(cid, None)
        if self.live is not None:
            self.live.resend_task(cid)

    def on_revoked(self, names: Collection[ClientId]) -> None:
        """These devices are not waited for."""
        if self.live is not None:
            self.live.on_revoked(names)

    def on_block(self, cid: ClientId, label: str | None, index: int, message: bytes) -> None:
        taker = self._late if self._late is not None and self._late.expects(cid, label) else self.live
        if taker is not None:
            taker.on_block(cid, label, index, message)

    def on_nack(self, nack: Envelope) -> None:
        if self.live is not None:
            self.live.on_nack(nack)

    def on_ready(self, rdy: Envelope) -> None:
        """A device announces an update. Raises Malformed("closed") for an exchange that never asked the device."""
        said = Announcement.from_message(rdy)
        if self.live is not None and self.live.takes(said):
            self.live.on_ready(said)
        elif self._late is None or said.key != self._late.key or not self._late.on_ready(said):
            self._answer_closed(said)

    def _answer_closed(self, said: Announcement) -> None:
        """Answer from the store an update that no exchange takes. The answer is final: it counts, or never will.

        Raises Malformed: "closed" for an unknown exchange, "busy" for one that was open when the last process ended.
        """
        exchanges = self._store.exchanges
        stored = exchanges.reply_of(said.key, said.cid)
        sha256 = self._store.late_updates.find(said.key, said.cid) if stored is None else stored.sha256
        if sha256 is not None:
            status = "dup" if sha256 == said.update.sha256 else "superseded"
        elif exchanges.asks(said.key, said.cid):
            if not exchanges.is_closed(said.key):
                raise Malformed("busy", "this exchange has not begun again yet")
            status = "late"
            if not exchanges.is_refused(said.key.run, said.key.round, said.cid):
                exchanges.put_refusal(said.key, said.cid, "late")
        else:
            raise Malformed("closed", "no such exchange")
        self._sender.send(said.cid, "ack", **said.ack_fields(), status=status)
