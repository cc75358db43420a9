"""Every message that a device sends is built here, with a fresh id and the time. No state."""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_client.protocol import blocks, messages
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.topics import Topics, routing_label
from edge_client.transport.base import Transport
from edge_client.transport.clock import Clock

MAX_UNACKNOWLEDGED = 1_024  # messages; to a broker that acknowledges none no more are sent: they fill the memory


class DeviceSender:
    """Sends the messages of one device; `rng` draws the message ids."""

    def __init__(
        self, topics: Topics, cid: str, transport: Transport, *, clock: Clock, rng: np.random.Generator
    ) -> None:
        self.topics, self.cid = topics, cid
        self._transport, self._clock, self._rng = transport, clock, rng

    def send(self, kind: str, **fields: Any) -> str:  # noqa: ANN401 - the message's fields
        """One request or answer to the coordinator; returns its id."""
        ident = self._rng.bytes(8).hex()
        payload = messages.write_message(kind, ident=ident, t_ms=self._clock.unix_ms(), **fields)
        self._publish(self.topics.request(self.cid), payload)
        return ident

    def request_blocks(self, manifest: Manifest, at: list[list[int]], mark: int) -> str:
        """Ask for blocks; `mark` is that of the last block that arrived, 0 without one."""
        return self.send("get", sha256=manifest.sha256, block=manifest.block, at=at, mark=mark)

    def send_presence(self, status: str, birth: int, **fields: Any) -> None:  # noqa: ANN401 - the message's fields
        """The retained record of this device."""
        payload = presence_message(status, birth, ident=self._rng.bytes(8).hex(), t_ms=self._clock.unix_ms(), **fields)
        self._publish(self.topics.state(self.cid), payload, retain=True)

    def send_block(self, manifest: Manifest, shard: int, index: int, body: bytes) -> None:
        topic = self.topics.upload(shard, self.cid, routing_label(manifest.sha256), index)
        self._publish(topic, blocks.pack_block(body, index, manifest.total))

    def _publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        if self._transport.drain(MAX_UNACKNOWLEDGED, 0.0):
            self._transport.publish(topic, payload, retain=retain)


def presence_message(status: str, birth: int, *, ident: str, t_ms: int, **fields: Any) -> bytes:  # noqa: ANN401
    """A presence message; the will is made of it before there is a connection."""
    return messages.write_message("st", ident=ident, t_ms=t_ms, s=status, bd=birth, **fields)
