"""Builds and sends every message of the coordinator, with its epoch, a fresh id and the time.

Counts the bytes of payload that are sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_client.protocol import blocks, messages
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.topics import UPLOAD_SHARDS, Topics, routing_label
from edge_client.transport.base import Transport, Will
from edge_client.transport.clock import Clock

RETRY_MS = 30_000  # a storage error rarely ends sooner
UPLOAD_WINDOW = 16  # blocks that a device may have open, either way
MAX_DELETIONS = 64  # a deletion waits while more messages are not acknowledged; blocks wait at 256 (block_server.py)
MAX_LEFT_BYTES = 16 << 20  # of topics whose deletion waits; one has up to 64 KiB
SUPPORTED_PROTOCOLS = (1,)
SOURCES = ("mqtt",)

Dial = Callable[[Will | None], Transport]


@dataclass
class CoordinatorSender:
    """One sender per process start: `epoch` orders coordinators, `boot` (16 hex digits) identifies the process."""

    topics: Topics
    clock: Clock
    epoch: int
    boot: str
    block: int
    spread_ms: int
    transport: Transport | None = None
    release: Mapping[str, Any] | None = None  # the client release for boards: version and signed manifest
    trusted: tuple[bytes, ...] = ()  # public keys of which one has signed every record of this federation
    signature: Mapping[str, str] = field(default_factory=dict)  # `key` and `sig` of epoch and boot
    state: Mapping[str, Any] | None = None  # what the federation does now (announcer.py)
    link: int = 0  # how many connections to the broker there were
    bytes_down: int = 0
    _count: int = field(default=0, repr=False)
    _left: dict[str, int] = field(default_factory=dict, repr=False)  # topics of what devices left, and their bytes
    _left_bytes: int = field(default=0, repr=False)

    def open(self, dial: Dial) -> Transport:
        """Make the transport that carries every message; its will says that this coordinator is offline."""
        self.transport = transport = dial(Will(self.topics.coord(), self._record(online=False)))
        return transport

    def subscribe(self) -> None:
        """Subscribe to everything that is meant for this coordinator. Requests and blocks say if they are retained."""
        if self.transport is not None:
            presence, *inbox = self.topics.coordinator_filters(UPLOAD_SHARDS)
            self.transport.subscribe(self.topics.coord(), presence)
            self.transport.subscribe(*inbox, as_published=True)

    def delete_retained(self, topic: str) -> None:
        """Make the broker forget the retained message of a topic."""
        self._publish(topic, b"", retain=True)

    def delete_left(self, topic: str) -> None:
        """The same for what a device has left, once few messages wait for the broker: tasks would wait behind a flood.

        Beyond MAX_LEFT_BYTES of topics the message stays; the broker tells of it again at the next connection.
        """
        size = sys.getsizeof(topic)
        if topic not in self._left and self._left_bytes + size <= MAX_LEFT_BYTES:
            self._left[topic] = size
            self._left_bytes += size
        self.delete_due()

    def delete_due(self) -> None:
        """Delete what devices have left and the broker has room for."""
        while self._left and not self.is_congested(MAX_DELETIONS):
            topic = next(iter(self._left))
            self._left_bytes -= self._left.pop(topic)
            self.delete_retained(topic)

    def send(self, cid: str, kind: str, **fields: Any) -> str:  # noqa: ANN401 - the message's fields
        """One control message to one device; -> its id."""
        self._publish(self.topics.down(cid), self._write(kind, fields))
        return f"c{self.epoch}-{self._count}"

    def has_sent(self, ident: str) -> bool:
        """Whether a message id has this sender's epoch, so that an answer to it is none to an earlier process."""
        return ident.startswith(f"c{self.epoch}-")

    def send_block(self, cid: str, manifest: Manifest, index: int, body: bytes, mark: int) -> None:
        """One block to one device."""
        message = blocks.pack_block(body, index, manifest.total, mark)
        self._publish(self.topics.down_block(cid, routing_label(manifest.sha256), index), message)

    def is_congested(self, limit: int) -> bool:
        """Whether the broker has more than `limit` messages to acknowledge, or cannot be reached."""
        return self.transport is not None and not self.transport.drain(limit, 0.0)

    def publish_record(self, *, online: bool) -> None:
        """Publish the retained record that says which coordinator leads."""
        self._publish(self.topics.coord(), self._record(online=online), retain=True)

    def publish_catalog(self, version: int, catalog: Manifest) -> None:
        """Publish the retained pointer to the catalog of centers."""
        self._publish(self.topics.catalog(), self._write("cat", {"ver": version, "catalog": catalog}), retain=True)

    def _record(self, *, online: bool) -> bytes:
        fields = {
            "boot": self.boot,
            "online": online,
            "proto": list(SUPPORTED_PROTOCOLS),
            "spread_ms": self.spread_ms,
            "block": self.block,
            "window": UPLOAD_WINDOW,
            "src": list(SOURCES),
            "release": self.release,
            "state": self.state if online else None,
            "link": self.link,
            **self.signature,
        }
        return self._write("coord", fields)

    def _write(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._count += 1
        ident = f"c{self.epoch}-{self._count}"
        return messages.write_message(kind, ident=ident, t_ms=self.clock.unix_ms(), epoch=self.epoch, **fields)

    def _publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        if self.transport is not None:
            self.bytes_down += len(payload)
            self.transport.publish(topic, payload, retain=retain)
