"""Whatever a device says arrives here: checked, paced, and passed to the one who can answer it.

The topic says who speaks; nothing in a payload does. A message that breaks a rule is answered with the rule's code and
changes nothing. Devices that never announced themselves cost no memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.nearest.answer import answer_near
from coordinator.runtime.block_server import BlockServer
from coordinator.runtime.late_updates import LateUpdates
from coordinator.runtime.live_exchange import LiveExchange
from coordinator.runtime.presence import FleetPresence, TokenBucket
from coordinator.runtime.sender import CoordinatorSender
from coordinator.runtime.upload_receiver import Announcement
from coordinator.storage.event_log import EventLog
from coordinator.storage.store import Store
from edge_client.errors import Malformed, ProtocolError
from edge_client.protocol import messages
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.message_schemas import ERR_CODES, MAX_DETAIL_CHARS
from edge_client.protocol.nearest.catalog import Catalog
from edge_client.protocol.nearest.router import Router
from edge_client.protocol.task import ClientId, Schema
from edge_client.transport.base import Message
from edge_client.transport.clock import Clock

log = logging.getLogger(__name__)

REQUESTS_PER_S, REQUESTS_BURST = 20.0, 40.0
NEAR_REQUESTS_PER_S, NEAR_REQUESTS_BURST = 0.1, 6.0
RETRY_MS = {"rate": 2_000, "busy": 5_000}


class Superseded(ProtocolError):
    """Another coordinator leads this federation."""

    def __init__(self, epoch: int) -> None:
        super().__init__(
            f"another coordinator leads this federation (ours is epoch {epoch})",
            hint="only one coordinator may serve a federation; start this one again to take over",
        )


@dataclass
class Dispatcher:
    """Takes every message that the coordinator subscribes to; `live`, `late`, `catalog` are set while there is one."""

    clock: Clock
    store: Store
    sender: CoordinatorSender
    downloads: BlockServer
    fleet: FleetPresence
    event_log: EventLog
    live: LiveExchange | None = None
    late: LateUpdates | None = None
    catalog: Catalog | None = None
    catalog_blob: Manifest | None = None
    schema: Schema | None = None
    bytes_up: int = 0
    unreadable: int = 0
    _paces: dict[ClientId, TokenBucket] = field(default_factory=dict)
    _near_paces: dict[ClientId, TokenBucket] = field(default_factory=dict)
    _disowned_by: set[ClientId] = field(default_factory=set)
    _guides: dict[str, Router] = field(default_factory=dict)  # by hash
    _strangers: TokenBucket = field(default_factory=lambda: TokenBucket(REQUESTS_PER_S, REQUESTS_BURST))

    def __post_init__(self) -> None:
        self._enrolled = frozenset(self.store.states.enrolled())  # by an earlier start; they have joined already
        self._handlers: Mapping[str, Callable[[ClientId, Mapping[str, Any]], None]] = {
            "get": self.downloads.answer,
            "rdy": self._on_ready,
            "nack": self._on_nack,
            "near": self._on_near,
            "served": self._on_served,
        }

    def dispatch(self, message: Message) -> None:
        """One message from the broker. Raises Superseded when another coordinator leads."""
        self.bytes_up += len(message.payload)
        try:
            route = self.sender.topics.parse(message.topic)
        except Malformed:
            self.unreadable += 1
            return
        if route.kind == "coord":
            self._on_record(message.payload)
        elif route.cid is None:
            self.unreadable += 1
        elif route.kind == "st":
            self._on_presence(route.cid, message.payload)
        elif route.kind == "rq":
            self._on_request(route.cid, message.payload)
        elif route.kind == "in" and route.index is not None:
            taker = self.late if self.late is not None and self.late.expects(route.cid) else self.live
            if taker is not None:
                taker.on_block(route.cid, route.label, route.index, message.payload)

    def _on_record(self, payload: bytes) -> None:
        """The record of who leads: ours comes back to us; a higher epoch ends us, a lower one is put right."""
        try:
            record = messages.read_message(payload, "coord")
        except Malformed:
            self.unreadable += 1
            return
        if record["boot"] == self.sender.boot:
            return
        if record["epoch"] >= self.sender.epoch:
            raise Superseded(self.sender.epoch)
        self.sender.publish_record(online=True)

    def _on_presence(self, cid: ClientId, payload: bytes) -> None:
        if not payload:  # a retained presence that was deleted
            return
        try:
            heard = messages.read_message(payload, "st")
        except Malformed as wrong:
            self.unreadable += 1
            if wrong.code == "bad_version" and self._strangers.allow(self.clock.now_s()):
                self._on_another_version(cid, payload, wrong)
            return
        new = cid not in self.fleet.devices and cid not in self._enrolled
        if not self.fleet.update(cid, heard):
            return
        device = self.fleet.devices[cid]
        if new:
            self.event_log.write("joined", device=cid, engine=device.engine, n=device.n)
        if device.is_online and self.live is not None:
            self.live.resend_task(cid)

    def _on_request(self, cid: ClientId, payload: bytes) -> None:
        now_s = self.clock.now_s()
        if cid not in self.fleet.devices:
            if self._strangers.allow(now_s):
                self._answer_stranger(cid, payload)
            return
        self.downloads.mark_received(cid)
        pace = self._paces.setdefault(cid, TokenBucket(REQUESTS_PER_S, REQUESTS_BURST))
        if pace.allow(now_s):
            self._answer(cid, payload)
        elif pace.first_refusal():
            self._send_error(cid, payload, Malformed("rate", "too many requests"))

    def _answer(self, cid: ClientId, payload: bytes) -> None:
        try:
            request = messages.read_message(payload, "rq")
            self._handlers[request["k"]](cid, request)
        except Malformed as wrong:
            self._send_error(cid, payload, wrong)

    def _send_error(self, cid: ClientId, payload: bytes, wrong: Malformed) -> None:
        """An `err` that names the request, if it can be read at all."""
        try:
            ident = messages.read_message(payload, "rq")["id"]
        except Malformed:
            ident = None
        code = wrong.code if wrong.code in ERR_CODES else "bad_field"
        retry_ms = RETRY_MS.get(code)
        self.sender.send(cid, "err", re=ident, code=code, detail=str(wrong)[:MAX_DETAIL_CHARS], retry_ms=retry_ms)

    def _on_another_version(self, cid: ClientId, payload: bytes, wrong: Malformed) -> None:
        """It cannot take part; whoever runs it should know why, on either side."""
        log.warning("%s cannot take part: %s", cid, wrong.message)
        self._send_error(cid, payload, wrong)

    def _answer_stranger(self, cid: ClientId, payload: bytes) -> None:
        try:
            messages.read_message(payload, "rq")
        except Malformed as wrong:
            if wrong.code == "bad_version":
                self._on_another_version(cid, payload, wrong)
                return
        if len(self.fleet.devices) >= self.fleet.limit:
            self.sender.send(cid, "err", code="not_member")
        else:
            self.sender.send(cid, "rebirth")

    def _on_ready(self, cid: ClientId, rdy: Mapping[str, Any]) -> None:
        said = Announcement.from_message(rdy)
        key = said.key
        if self.live is not None and key == self.live.key:
            self.live.on_ready(cid, said)
            return
        if self.late is not None and key == self.late.key and self.late.on_ready(cid, said):
            return
        stored = self.store.exchanges.replies(key).get(cid)
        if stored is not None:
            status = "dup" if stored.sha256 == said.update.sha256 else "superseded"
        elif cid in self.store.exchanges.task_hashes(key):
            status = "late"
            if cid not in self.store.exchanges.refusals(key.run, key.round):
                self.store.exchanges.put_refusal(key, cid, "late")
        else:
            raise Malformed("closed", "no such exchange")
        self.sender.send(cid, "ack", **said.ack_fields(), status=status)

    def _on_nack(self, cid: ClientId, nack: Mapping[str, Any]) -> None:
        log.info("%s refuses: %s %s", cid, nack["code"], nack.get("detail", ""))
        if nack["code"] == "old_epoch":
            self._on_old_epoch(cid, nack["re"])
        if self.live is not None:
            self.live.on_nack(cid, nack)

    def _on_old_epoch(self, cid: ClientId, about: str) -> None:
        """A device has heard a later coordinator. One alone could lie, and end us; half of those here cannot."""
        if about.startswith(f"c{self.sender.epoch}-"):
            self._disowned_by.add(cid)
        if self._disowned_by and 2 * len(self._disowned_by) >= len(self.fleet.online()):
            raise Superseded(self.sender.epoch)

    def _on_near(self, cid: ClientId, question: Mapping[str, Any]) -> None:
        pace = self._near_paces.setdefault(cid, TokenBucket(NEAR_REQUESTS_PER_S, NEAR_REQUESTS_BURST))
        if not pace.allow(self.clock.now_s()):
            raise Malformed("rate", "at most 6 a minute")
        if self.catalog is None or self.schema is None:
            raise Malformed("busy", "there is no catalog yet")
        answer = answer_near(self.catalog, question, self.schema, self._guide(self.catalog))
        self.sender.send(cid, "near", re=question["id"], **answer)

    def _guide(self, catalog: Catalog) -> Router | None:
        """What the catalog's run teaches newcomers, read once."""
        if catalog.router is None:
            return None
        sha256 = catalog.router.sha256
        if sha256 not in self._guides:
            self._guides = {sha256: Router.from_bytes(self.store.blobs.read(sha256))}
        return self._guides[sha256]

    def _on_served(self, cid: ClientId, served: Mapping[str, Any]) -> None:
        """How a device does with the file that it was given."""
        if self.catalog is None or served["center"] >= len(self.catalog.centers):
            raise Malformed("bad_field", "no such center")
        files = self.catalog.centers[served["center"]].files
        form = next((f for f, manifest in files.items() if manifest.sha256 == served["sha256"]), None)
        if form is None:
            raise Malformed("bad_field", "that file is not this center's")
        numbers = {"n": served["n"], "metrics": served["metrics"], "sha256": served["sha256"]}
        self.event_log.write("served", device=cid, center=served["center"], format=form, **numbers)
