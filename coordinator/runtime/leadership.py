"""Which coordinator leads a federation: the one with the highest epoch."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.runtime.envelope import Envelope
from coordinator.runtime.presence import FleetPresence
from coordinator.runtime.sender import CoordinatorSender, Dial
from edge_client.errors import Malformed, ProtocolError
from edge_client.protocol import messages
from edge_client.protocol.task import ClientId
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Connected, Message
from edge_client.transport.clock import Clock

RECORD_WAIT_S = 1.0  # how long the retained record of an earlier coordinator may take to arrive


class Superseded(ProtocolError):
    """Another coordinator leads this federation."""

    def __init__(self, epoch: int) -> None:
        super().__init__(
            f"another coordinator leads this federation (ours is epoch {epoch})",
            hint="only one coordinator may serve a federation; start this one again to take over",
        )


class Leadership:
    """Raises Superseded when another coordinator leads."""

    def __init__(self, sender: CoordinatorSender, fleet: FleetPresence) -> None:
        self._sender, self._fleet = sender, fleet
        self._disowned_by: set[ClientId] = set()

    def on_record(self, record: Envelope) -> None:
        """The retained record of the leader: a higher epoch supersedes this process, a lower one is overwritten."""
        if record.fields["boot"] == self._sender.boot:
            return
        if record.fields["epoch"] >= self._sender.epoch:
            raise Superseded(self._sender.epoch)
        self._sender.publish_record(online=True)

    def on_old_epoch(self, nack: Envelope) -> None:
        """A device has heard a later coordinator. One device could lie; half of the connected devices are believed."""
        if self._sender.has_sent(nack.fields["re"]):
            self._disowned_by.add(nack.cid)
        if self._disowned_by and 2 * len(self._disowned_by) >= len(self._fleet.online()):
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
