"""Which coordinator leads a federation: the one with the highest epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection

from coordinator.runtime.envelope import Envelope
from coordinator.runtime.sender import CoordinatorSender, Dial
from edge_client.errors import Malformed, ProtocolError
from edge_client.protocol import messages
from edge_client.protocol.task import ClientId
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Connected, Message
from edge_client.transport.clock import Clock

DISOWNED_S = 600.0  # how long a device's word that a later coordinator leads counts
MIN_DISOWNING = 2  # devices
RECORD_WAIT_S = 1.0  # how long the retained record of an earlier coordinator may take to arrive


class Superseded(ProtocolError):
    """Another coordinator leads this federation."""

    def __init__(self, epoch: int) -> None:
        super().__init__(
            f"another coordinator leads this federation (ours is epoch {epoch})",
            hint="only one coordinator may serve a federation; start this one again to take over",
        )


class Leadership:
    """Raises Superseded when another coordinator leads. `enrolled` returns the devices whose word counts."""

    def __init__(self, sender: CoordinatorSender, enrolled: Callable[[], Collection[ClientId]]) -> None:
        self._sender, self._enrolled = sender, enrolled
        self._disowned_by: dict[ClientId, float] = {}  # when each device last said so, in seconds

    def on_record(self, record: Envelope) -> None:
        """The retained record of the leader: a higher epoch supersedes this process, a lower one is overwritten."""
        if record.fields["boot"] == self._sender.boot:
            return
        if record.fields["epoch"] >= self._sender.epoch:
            raise Superseded(self._sender.epoch)
        self._sender.publish_record(online=True)

    def on_old_epoch(self, nack: Envelope) -> None:
        """A device has heard a later coordinator. One device could lie, so two and half of the enrolled are believed.

        What a device said counts for DISOWNED_S.
        """
        enrolled, now_s = self._enrolled(), self._sender.clock.now_s()
        if self._sender.has_sent(nack.fields["re"]) and nack.cid in enrolled:
            self._disowned_by[nack.cid] = now_s
        self._disowned_by = {cid: at_s for cid, at_s in self._disowned_by.items() if now_s < at_s + DISOWNED_S}
        if len(self._disowned_by) >= max(MIN_DISOWNING, len(enrolled) / 2):
            raise Superseded(self._sender.epoch)


def seen_epoch(dial: Dial, topics: Topics, clock: Clock, stopping: Callable[[], bool]) -> int:
    """The epoch of the retained record, else 0; on a connection of its own, because the will needs the new epoch."""
    transport = dial(None)
    transport.connect()
    try:
        until_s = clock.now_s() + RECORD_WAIT_S
        while (left_s := until_s - clock.now_s()) > 0 and not stopping():
            event = transport.receive(left_s)
            if isinstance(event, Connected):
                transport.subscribe(topics.coord())
            elif isinstance(event, Message) and event.topic == topics.coord():
                return _epoch_in(event.payload)
        return 0
    finally:
        transport.close()


def _epoch_in(payload: bytes) -> int:
    try:
        return int(messages.read_message(payload, "coord")["epoch"])
    except Malformed:
        return 0
