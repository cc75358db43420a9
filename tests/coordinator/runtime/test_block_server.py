"""Blocks are sent in turn: those under way hold no more bytes than the budget, and every device is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.runtime.block_server import ASSUMED_ARRIVAL_S, BlockServer
from coordinator.runtime.envelope import Envelope
from coordinator.runtime.sender import CoordinatorSender
from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Message
from edge_client.transport.blobs import BlobFolder
from tests.support.memory_broker import MemoryBroker
from tests.support.virtual_time import VirtualClock

BLOCK = 4096
DATA = bytes(range(256)) * 64  # 4 blocks
TOPICS = Topics("test")


class BlockServerSetup:
    """A block server with a budget of eight blocks, and everything that it says."""

    def __init__(self, folder: Path, *, budget: float = 8 * BLOCK) -> None:
        broker = MemoryBroker()
        self.clock = VirtualClock()
        self._heard = broker.client("spy")
        self._heard.connect()
        self._heard.subscribe("fc/v1/test/dn/#")
        transport = broker.client("us")
        transport.connect()
        sender = CoordinatorSender(
            topics=TOPICS, clock=self.clock, epoch=1, boot="0" * 16, block=BLOCK, spread_ms=0, transport=transport
        )
        blobs = BlobFolder(folder)
        blobs.put(DATA)
        self.manifest: Manifest = manifest_of(DATA, "model", block=BLOCK)
        self.downloads = BlockServer(blobs, sender, budget)
        self.downloads.share([self.manifest])

    def ask(self, cid: str, *at: list[int]) -> None:
        request: dict[str, Any] = {"id": f"r-{cid}", "sha256": self.manifest.sha256, "block": BLOCK, "at": list(at)}
        self.downloads.answer(Envelope(cid=cid, fields=request))

    def said(self) -> list[tuple[str, str]]:
        """(device, "block" or the code of an error), in order; each once."""
        out = []
        while (event := self._heard.receive(0.0)) is not None:
            if isinstance(event, Message):
                route = TOPICS.parse(event.topic)
                word = "block" if route.kind == "b" else messages.read_message(event.payload, "t")["code"]
                out.append((str(route.cid), word))
        return out


@pytest.fixture
def desk(tmp_path: Path) -> BlockServerSetup:
    return BlockServerSetup(tmp_path)


def test_what_fits_into_the_budget_is_sent_at_once(desk: BlockServerSetup) -> None:
    desk.ask("a", [0, 4])
    desk.ask("b", [0, 4])
    assert desk.said() == [("a", "block")] * 4 + [("b", "block")] * 4


def test_beyond_the_budget_devices_are_told_to_wait_and_served_in_their_turn(desk: BlockServerSetup) -> None:
    for cid in "abcd":
        desk.ask(cid, [0, 4])
    assert desk.said()[8:] == [("c", "busy"), ("d", "busy")]
    desk.ask("b", [0, 1])  # its blocks have arrived, and it waits behind the others
    assert desk.said() == [("c", "block")] * 4 + [("b", "busy")]
    desk.clock.time_s += ASSUMED_ARRIVAL_S
    desk.downloads.send_due()
    assert desk.said() == [("d", "block")] * 4 + [("b", "block")]
    assert desk.downloads.wakes_at_s == float("inf")


def test_a_request_larger_than_the_budget_is_served_alone(tmp_path: Path) -> None:
    context = BlockServerSetup(tmp_path, budget=BLOCK)
    context.ask("a", [0, 4])
    context.ask("b", [0, 4])
    assert context.said() == [("a", "block")] * 4 + [("b", "busy")]


def test_asking_again_while_waiting_takes_no_second_turn(desk: BlockServerSetup) -> None:
    for cid in "abcc":
        desk.ask(cid, [0, 4])
    desk.said()
    desk.clock.time_s += ASSUMED_ARRIVAL_S
    desk.downloads.send_due()
    assert desk.said() == [("c", "block")] * 4


def test_a_blob_that_vanished_is_refused_and_one_that_vanishes_while_somebody_waits_costs_nothing(
    desk: BlockServerSetup,
) -> None:
    for cid in "abc":
        desk.ask(cid, [0, 4])
    desk.downloads.blobs.drop(desk.manifest.sha256)
    with pytest.raises(Malformed, match="unknown_blob"):
        desk.ask("d", [0, 1])
    desk.clock.time_s += ASSUMED_ARRIVAL_S
    desk.downloads.send_due()
    assert ("c", "block") not in desk.said()
