"""Blocks are sent in turn: those under way hold no more bytes than the budget, and every device is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.runtime.arrival_marks import ASSUMED_ARRIVAL_S, MAX_HOLD_S, MAX_UNPROVEN, ArrivalMarks
from coordinator.runtime.block_server import BlockServer
from coordinator.runtime.envelope import Envelope
from coordinator.runtime.sender import CoordinatorSender
from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.protocol.blocks import HEADER, Manifest, manifest_of
from edge_client.protocol.topics import Topics
from edge_client.protocol.transfer import INITIAL_WINDOW
from edge_client.runtime.downloader import Downloader
from edge_client.transport.base import Message
from edge_client.transport.blobs import BlobFolder
from tests.support.memory_broker import MemoryBroker
from tests.support.virtual_time import VirtualClock

BLOCK = 4096
DATA = bytes(range(256)) * 64  # 4 blocks
TOPICS = Topics("test")


class BlockServerSetup:
    """A block server with a budget of eight blocks, and everything that it says."""

    def __init__(self, folder: Path, *, budget: float = 8 * BLOCK, data: bytes = DATA) -> None:
        broker = MemoryBroker()
        self.marks: dict[str, int] = {}
        self.blocks: list[Message] = []  # that `said` has told
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
        blobs.put(data)
        self.manifest: Manifest = manifest_of(data, "model", block=BLOCK)
        self.downloads = BlockServer(blobs, sender, budget)
        self.downloads.share([self.manifest])

    def ask(self, cid: str, *at: list[int], mark: int | None = 0) -> None:
        """By default as a device that has seen no block; None: one that knows no marks."""
        request: dict[str, Any] = {"id": f"r-{cid}", "sha256": self.manifest.sha256, "block": BLOCK, "at": list(at)}
        self.downloads.answer(Envelope(cid=cid, fields=request if mark is None else request | {"mark": mark}))

    def mark(self, cid: str) -> int:
        """Of the last block that was sent to this device."""
        return self.marks[cid]

    def said(self) -> list[tuple[str, str]]:
        """(device, "block" or the code of an error), in order; each once."""
        out = []
        while (event := self._heard.receive(0.0)) is not None:
            if isinstance(event, Message):
                route = TOPICS.parse(event.topic)
                if route.kind == "b":
                    self.marks[str(route.cid)] = HEADER.unpack_from(event.payload)[2]
                    self.blocks.append(event)
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
    desk.ask("b", [0, 1], mark=desk.mark("b"))  # its blocks have arrived, and it waits behind the others
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


def test_a_device_that_shows_the_mark_of_its_blocks_never_waits(desk: BlockServerSetup) -> None:
    desk.ask("a", [0, 4])
    for _ in range(50):
        assert desk.said() == [("a", "block")] * 4
        desk.ask("a", [0, 4], mark=desk.mark("a"))


def test_blocks_that_are_never_proven_cost_a_wait_that_doubles_up_to_an_hour() -> None:
    marks, now_s, waits = ArrivalMarks(), 0.0, list[float]()
    for _ in range(11):
        while marks.may_send("a", now_s):
            marks.sent("a", 1, now_s)
        began_s = now_s
        while not marks.may_send("a", now_s):
            now_s += ASSUMED_ARRIVAL_S
        waits.append(now_s - began_s)
    assert waits == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, MAX_HOLD_S, MAX_HOLD_S]
    assert marks.under_way == 2 * 11
    marks.expire(now_s)
    assert marks.under_way == 0


@pytest.mark.parametrize("mark", [None, 0], ids=["of an older version", "of one that saw nothing"])
def test_a_device_that_proves_nothing_is_sent_two_answers_and_told_busy(
    desk: BlockServerSetup, mark: int | None
) -> None:
    for _ in range(2):
        desk.ask("a", [0, 4], mark=mark)
    with pytest.raises(Malformed, match="busy"):
        desk.ask("a", [0, 4], mark=mark)
    assert desk.said() == [("a", "block")] * 8
    assert (desk.marks["a"] == 0) == (mark is None)


def test_the_owners_of_a_client_that_knows_no_marks_are_told_to_update_it(
    desk: BlockServerSetup, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rounds took longer and longer without a reason that an owner could read."""
    for _ in range(2):
        desk.ask("a", [0, 4], mark=None)
    for _ in range(2):
        with pytest.raises(Malformed, match="install the coordinator's version on the device"):
            desk.ask("a", [0, 4], mark=None)
    (told,) = caplog.messages
    assert told.startswith("a is sent models ever more slowly: its client is too old")


def test_a_wrong_mark_proves_nothing_and_a_right_one_proves_what_was_sent_before_it(desk: BlockServerSetup) -> None:
    desk.ask("a", [0, 4])
    desk.said()
    first = desk.mark("a")
    desk.ask("a", [0, 4], mark=first % 65_535 + 1)
    desk.said()
    with pytest.raises(Malformed, match="busy"):
        desk.ask("a", [0, 1], mark=first % 65_535 + 1)
    desk.ask("a", [0, 1], mark=desk.mark("a"))
    assert desk.said() == [("a", "block")]


def test_a_device_whose_fetches_are_interrupted_is_served_the_next_one_at_once_and_keeps_what_comes_late(
    tmp_path: Path,
) -> None:
    """Each board began to fetch a release between two tasks; its blocks came late, and the next center after 10 s.

    The blocks were dropped, so that a board whose tasks followed each other sooner never had the release.
    """

    data = b"".join(bytes([number]) * BLOCK for number in range(INITIAL_WINDOW * (MAX_UNPROVEN + 2)))
    desk = BlockServerSetup(tmp_path / "desk", data=data)

    def ask(_: Manifest, at: list[list[int]], mark: int) -> str:
        desk.ask("a", *at, mark=mark)
        return "r-a"

    folder = BlobFolder(tmp_path / "device")
    device = Downloader(folder, ask)
    for fetch in range(MAX_UNPROVEN + 2):
        device.start([desk.manifest])
        device.step(0.0)
        device.pause()  # a task has come
        assert desk.said() == [("a", "block")] * INITIAL_WINDOW, fetch
        for block in desk.blocks[-INITIAL_WINDOW:]:
            route = TOPICS.parse(block.topic)
            device.on_block(str(route.label), int(route.index or 0), block.payload)
    device.start([desk.manifest])
    assert device.step(0.0) is None
    assert folder.read(desk.manifest.sha256) == data
