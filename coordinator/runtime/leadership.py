"""Which coordinator leads a federation: the one with the highest epoch in a record that the federation's key signed.

`take_lead` takes a higher epoch at the start; `Leadership` notices, while this process leads, that another one does.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence

from coordinator.artifacts.client_release import offer_release
from coordinator.config import CoordinatorConfig
from coordinator.identity.signing_key import SigningKey, trusted_keys
from coordinator.runtime.envelope import Envelope
from coordinator.runtime.presence import TokenBucket
from coordinator.runtime.sender import CoordinatorSender, Dial
from coordinator.storage.store import Store
from edge_client.errors import Malformed, ProtocolError
from edge_client.protocol import messages, signing
from edge_client.protocol.task import ClientId
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Connected, Message
from edge_client.transport.clock import Clock

log = logging.getLogger(__name__)

CORRECTIONS_PER_S, CORRECTIONS_BURST = 1.0, 3.0  # records of ours in answer to those of a stranger
DISOWNED_S = 600.0  # how long a device's word that a later coordinator leads counts
MIN_DISOWNING = 2  # devices, where there are so many
EPOCH_LEAP = 10_000  # starts of a coordinator; a device takes a signed epoch up to 1,000,000 above the one it knows
SPREAD_PER_DEVICE_MS = 4  # a broker takes about 300 handshakes a second and core
STRANGER = (
    "ignored the record at the broker: %s. If another coordinator serves federation %s there, give one of the two "
    "another `federation`: each cuts the other's devices off"
)
RECORD_WAIT_S = 1.0  # how long the retained record of an earlier coordinator may take to arrive


class Superseded(ProtocolError):
    """Another coordinator leads this federation."""

    def __init__(self, epoch: int) -> None:
        super().__init__(
            f"another coordinator leads this federation (ours is epoch {epoch})",
            hint="only one coordinator may serve a federation; start this one again to take over",
        )


class Leadership:
    """Raises Superseded when another coordinator leads, by its record or by the word of the enrolled devices."""

    def __init__(self, sender: CoordinatorSender, store: Store) -> None:
        self._sender, self._store = sender, store
        self._disowned_by: dict[ClientId, float] = {}  # when each device last said so, in seconds
        self._corrections = TokenBucket(CORRECTIONS_PER_S, CORRECTIONS_BURST)

    def on_record(self, record: Envelope, *, live: bool) -> None:
        """The retained record of the leader: a higher epoch supersedes this process, a lower one is overwritten.

        So is a record that the federation's key did not sign, at a pace that two coordinators with different keys
        cannot exceed; and, at that pace, our own will that the broker publishes only after the next connection
        (`live`: it was not kept from before).
        """
        sender = self._sender
        if record.fields["boot"] == sender.boot:
            if live and not record.fields["online"] and self._corrections.allow(sender.clock.now_s()):
                sender.publish_record(online=True)
            return
        try:
            federation = sender.topics.federation
            epoch = signing.verify_record(record.fields, sender.trusted, federation, known=sender.epoch)
        except Malformed as wrong:
            if self._corrections.allow(sender.clock.now_s()):
                log.warning(STRANGER, wrong.message, federation)
                sender.publish_record(online=True)
            return
        if epoch >= sender.epoch:
            raise Superseded(sender.epoch)
        sender.publish_record(online=True)

    def on_old_epoch(self, nack: Envelope) -> None:
        """A device has heard a later coordinator. One device could lie, so two and half of the enrolled are believed.

        The only device of a fleet is, because nothing can be done without it.

        What a device said counts for DISOWNED_S. No record at the broker tells how far the later one had come, as after
        its loss and a restored backup: the next start is far above.
        """
        enrolled, now_s = self._store.states.enrolled(), self._sender.clock.now_s()
        if self._sender.has_sent(nack.fields["re"]) and nack.cid in enrolled:
            self._disowned_by[nack.cid] = now_s
        self._disowned_by = {cid: at_s for cid, at_s in self._disowned_by.items() if now_s < at_s + DISOWNED_S}
        if len(self._disowned_by) >= max(1, min(MIN_DISOWNING, len(enrolled)), len(enrolled) / 2):
            self._store.facts.next_epoch(self._sender.epoch + EPOCH_LEAP)
            raise Superseded(self._sender.epoch)


def take_lead(
    config: CoordinatorConfig,
    store: Store,
    key: SigningKey,
    *,
    dial: Dial,
    clock: Clock,
    stopping: Callable[[], bool],
) -> CoordinatorSender:
    """Take a higher epoch than every coordinator before; -> the sender whose messages and will carry it."""
    topics, block = Topics(config.federation), config.transfer.block
    trusted = tuple(bytes.fromhex(public) for public in trusted_keys(config.signing_key_folder))
    seen = _seen_epoch(dial, topics, clock, stopping, trusted=trusted, known=store.facts.epoch)
    store.drop_stale_partials()
    epoch, boot = store.facts.next_epoch(seen), secrets.token_hex(8)
    release = None
    if config.release is not None:  # boards read in the record that there is a newer client, and fetch it
        release = offer_release(config.release, blobs=store.blobs, key=key, federation=config.federation, block=block)
    return CoordinatorSender(
        topics=topics,
        clock=clock,
        epoch=epoch,
        boot=boot,
        block=block,
        spread_ms=SPREAD_PER_DEVICE_MS * len(store.states.enrolled()),
        release=release,
        trusted=trusted,
        signature=key.sign_record(boot, epoch, config.federation),
    )


def _seen_epoch(
    dial: Dial,
    topics: Topics,
    clock: Clock,
    stopping: Callable[[], bool],
    *,
    trusted: Sequence[bytes],
    known: int,
) -> int:
    """The epoch of the retained record, 0 without one that a `trusted` key signed; `known` is the stored epoch.

    It takes a connection of its own, because the will needs the new epoch.
    """
    transport = dial(None)
    transport.connect()
    try:
        until_s = clock.now_s() + RECORD_WAIT_S
        while (left_s := until_s - clock.now_s()) > 0 and not stopping():
            event = transport.receive(left_s)
            if isinstance(event, Connected):
                transport.subscribe(topics.coord())
            elif isinstance(event, Message) and event.topic == topics.coord():
                return _epoch_in(event.payload, trusted, topics.federation, known)
        return 0
    finally:
        transport.close()


def _epoch_in(payload: bytes, trusted: Sequence[bytes], federation: str, known: int) -> int:
    try:
        return signing.verify_record(messages.read_message(payload, "coord"), trusted, federation, known=known)
    except Malformed as wrong:
        log.warning(STRANGER, wrong.message, federation)
        return 0
