"""A coordinator as the server wires it, without its event loop: bytes go in by `dispatch`, `said` returns the answers.

Its folder outlives it. Four devices are enrolled and online; a test opens as many exchanges of fits as it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coordinator.artifacts.signed_program import prepare_program
from coordinator.identity.signing_key import open_signing_key
from coordinator.runtime.block_server import BlockServer
from coordinator.runtime.dispatcher import Dispatcher
from coordinator.runtime.exchange.live_exchange import LiveExchange
from coordinator.runtime.exchange.task_messages import ExchangeContext, prepare_tasks
from coordinator.runtime.presence import FleetPresence
from coordinator.runtime.sender import CoordinatorSender
from coordinator.storage.event_log import EventLog
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.strategies.base import Exchange
from edge_client.protocol import blocks, codecs, messages
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.task import Array, Fit
from edge_client.protocol.topics import routing_label
from edge_client.transport.base import Message
from tests.support.memory_broker import MemoryBroker
from tests.support.virtual_federation import BLOCK, TOPICS, DoomedStore, config, seed_program
from tests.support.virtual_time import VirtualClock

DEVICES = ("d0", "d1", "d2", "d3")
SAMPLES = 40
LIMIT = 100  # of known devices


class WiredCoordinator:
    """What one process holds in memory. The folder outlives it."""

    def __init__(
        self, folder: Path, clock: VirtualClock, ballast: int, free: int, *, task_window: int = len(DEVICES)
    ) -> None:
        self.more = False  # whether messages wait, so that an update waits for `sync`
        plan: dict[str, Any] = {"quorum": 0.0, "below_quorum": "continue", "deadline_s": 300.0}
        self.config = config(folder, **plan, credits=free, block=BLOCK, task_window=task_window)
        self.store = DoomedStore(folder / "store")
        seed_program(self.store, ballast=ballast)
        self.ear = MemoryBroker()
        spy = self.ear.client("spy")
        spy.connect()
        spy.subscribe("fc/v1/#")
        self.spy = spy
        transport = self.ear.client("coordinator")
        transport.connect()
        epoch = self.store.facts.next_epoch(0)
        self.sender = CoordinatorSender(
            topics=TOPICS, clock=clock, epoch=epoch, boot=f"{epoch:016x}", block=BLOCK, spread_ms=0, transport=transport
        )
        downloads = BlockServer(self.store.blobs, self.sender)
        self.dispatcher = Dispatcher(
            clock=clock,
            store=self.store,
            sender=self.sender,
            downloads=downloads,
            fleet=FleetPresence(LIMIT),
            event_log=EventLog(folder / "metrics.jsonl", self.store.events, lambda _: None, clock.unix_ms),
        )
        if not self.store.states.enrolled():
            self.store.states.enrol(dict.fromkeys(DEVICES, (SAMPLES, "onnx")))
        self.context = ExchangeContext(
            config=self.config,
            clock=clock,
            store=self.store,
            sender=self.sender,
            downloads=downloads,
            prepared=prepare_program(self.config, self.store, open_signing_key(folder), ()),
            members=self.store.states.enrolled(),
            misses={},
            unable=self.dispatcher.exchange.unable,
        )
        for cid in DEVICES:
            self.hear(cid, "st", s="on", bd=1, caps={"engine": "onnx", "n": SAMPLES})

    def tasks(self, key: ExchangeKey) -> Exchange:
        """A fit for every device, from a start of this exchange's own."""
        start = self.context.prepared.initial + np.float32(key.exchange)
        return {cid: Fit(start=start, steps=1, lr=0.1, batch=8, seed=key.exchange) for cid in DEVICES}

    def ask(self, key: ExchangeKey, wanted: int | None, *, late: bool = False) -> None:
        """Open an exchange as `run_exchange` does, without waiting for its replies."""
        tasks = self.tasks(key)
        asked = prepare_tasks(key, tasks, self.context)
        if not self.store.exchanges.exists(key):
            self.store.exchanges.open(key, {c: a.sha256 for c, a in asked.items()}, self.config.round.deadline_s)
        if self.store.exchanges.closed_with(key) is None:
            live = LiveExchange(key, tasks, asked, wanted, self.context, late=late)
            self.dispatcher.exchange.live = live
            live.begin()

    def hear(self, cid: str, kind: str, **fields: Any) -> None:  # noqa: ANN401 - the message's fields
        """One control message of a device."""
        topic = TOPICS.state(cid) if kind == "st" else TOPICS.request(cid)
        said = Message(topic, messages.write_message(kind, ident=f"{cid}-1", t_ms=0, **fields))
        self.dispatcher.dispatch(said, more=self.more)

    def said(self) -> list[tuple[str, dict[str, Any]]]:
        """(device, message) since the last call."""
        out = []
        while (event := self.spy.receive(0.0)) is not None:
            if isinstance(event, Message) and (route := TOPICS.parse(event.topic)).kind == "t":
                out.append((str(route.cid), messages.read_message(event.payload, "t")))
        return out

    # -- devices

    def announce(self, cid: str, attempt: int, key: ExchangeKey) -> None:
        """Send the `rdy` of a device; another `attempt` is another result for the same task."""
        manifest, _ = self.update(key, cid, attempt)
        about = {**key._asdict(), "attempt": attempt, "n": SAMPLES - attempt}
        self.hear(cid, "rdy", **about, what="delta", update=manifest, seconds=1.0)

    def send(self, key: ExchangeKey, cid: str, attempt: int, indices: list[int], *, flip: bool = False) -> None:
        """Send blocks of that result, damaged if `flip`."""
        manifest, data = self.update(key, cid, attempt)
        for index in indices:
            if index < manifest.total:
                body = data[slice(*blocks.body_range(manifest, index))]
                packed = bytearray(blocks.pack_block(body, index, manifest.total))
                packed[-1] ^= flip
                self.block(cid, manifest, index, bytes(packed))

    def block(self, cid: str, manifest: Manifest, index: int, message: bytes) -> None:
        """Send any bytes as a block of this blob."""
        said = Message(TOPICS.upload(0, cid, routing_label(manifest.sha256), index), message)
        self.dispatcher.dispatch(said, more=self.more)

    def update(self, key: ExchangeKey, cid: str, attempt: int) -> tuple[Manifest, bytes]:
        """A result as it is encoded for the wire, with its manifest."""
        schema, live = self.context.prepared.program.schema, self.base(key)
        base = manifest_of(codecs.encode_vector(live, schema, codec="f32", kind="model"), "model").sha256
        data = codecs.encode_vector(self.delta(cid, attempt), schema, codec="f32", kind="delta", base=base)
        return manifest_of(data, "delta", block=BLOCK, inline=True), data

    def base(self, key: ExchangeKey) -> Array:
        """Where the fits of an exchange start."""
        start: Array = self.context.prepared.initial + np.float32(key.exchange)
        return start

    def delta(self, cid: str, attempt: int) -> Array:
        """The update of a device; all updates have one norm, so that none is an outlier."""
        place = np.arange(self.context.prepared.program.schema.size)
        signs: Array = np.where(place % (2 + 2 * DEVICES.index(cid) + attempt) == 0, -1.0, 1.0).astype(np.float32)
        return signs
