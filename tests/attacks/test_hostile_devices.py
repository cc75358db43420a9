"""Tries what a device with a valid name can do to a coordinator: forged, borrowed, repeated and endless requests."""

from __future__ import annotations

import hashlib
import tracemalloc
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.runtime.leadership import DISOWNED_S, Superseded
from coordinator.storage.exchange_store import ExchangeKey
from edge_client.protocol import blocks, messages
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.topics import routing_label
from edge_client.transport.base import Message
from tests.support.virtual_federation import BALLAST, BLOCK, TOPICS
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, LIMIT, SAMPLES, WiredCoordinator

KEY = ExchangeKey("run1", 1, 0)
ME, VICTIM = "d0", "d1"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[WiredCoordinator]:
    """It has sent a task to every device; `said` begins empty."""
    made = WiredCoordinator(tmp_path, VirtualClock(), BALLAST, 4)
    made.ask(KEY, None)
    made.said()
    yield made
    made.store.close()


def rdy(here: WiredCoordinator, cid: str, update: Manifest, **changes: Any) -> None:  # noqa: ANN401 - the message's fields
    fields = {**KEY._asdict(), "attempt": 0, "n": 40, "what": "delta", "seconds": 1.0}
    here.hear(cid, "rdy", **(fields | changes), update=update)


def partials(here: WiredCoordinator, cid: str) -> list[Path]:
    return list((here.store.folder / "updates" / cid / "partial").glob("*"))


def deliver(here: WiredCoordinator, cid: str) -> None:
    here.announce(cid, 0, KEY)
    here.send(KEY, cid, 0, list(range(10)))


def answers(here: WiredCoordinator) -> list[tuple[str, str]]:
    """(device, status or code or kind) of what was said."""
    return [(cid, message.get("status") or message.get("code") or message["k"]) for cid, message in here.said()]


def test_another_devices_stored_update_answers_for_nobody_else(coordinator: WiredCoordinator) -> None:
    deliver(coordinator, VICTIM)
    theirs, _ = coordinator.update(KEY, VICTIM, 0)
    coordinator.said()
    rdy(coordinator, ME, theirs)
    ((cid, go),) = coordinator.said()
    assert (cid, go["k"], go.get("have")) == (ME, "go", None)
    assert ME not in coordinator.store.exchanges.replies(KEY)


def test_whatever_was_not_granted_is_not_yours_in_the_same_words_whether_it_exists_or_not(
    coordinator: WiredCoordinator,
) -> None:
    deliver(coordinator, VICTIM)
    coordinator.said()
    theirs = coordinator.update(KEY, VICTIM, 0)[0].sha256
    nobodys = hashlib.sha256(b"nothing").hexdigest()
    state = coordinator.store.blobs.put(b"a state of the method")
    for sha256 in (theirs, nobodys, state):
        coordinator.hear(ME, "get", sha256=sha256, block=BLOCK, at=[[0, 1]])
    said = [(m["code"], m["detail"]) for _, m in coordinator.said()]
    assert said == [("not_yours", "not_yours: no such blob for you")] * 3


def test_blocks_without_a_credit_are_dropped_and_cost_no_disk(coordinator: WiredCoordinator) -> None:
    coordinator.send(KEY, ME, 0, [0, 1, 2])
    for cid in ("stranger", "coordinator", "x" * 64):
        coordinator.send(KEY, ME, 0, [0])
        coordinator.dispatcher.dispatch(Message(TOPICS.upload(0, cid, "0" * 16, 0), b"x" * 5_000))
    assert partials(coordinator, ME) == []
    assert not (coordinator.store.folder / "updates" / "stranger").exists()
    assert coordinator.said() == []


def test_replaced_uploads_keep_no_blocks_on_disk(coordinator: WiredCoordinator, tmp_path: Path) -> None:
    for attempt in range(20):
        coordinator.announce(ME, attempt, KEY)
        coordinator.send(KEY, ME, attempt, [0])
        assert len(partials(coordinator, ME)) == 1
    coordinator.announce("d2", 1, KEY)
    coordinator.send(KEY, "d2", 1, [0])
    coordinator.store.close()
    again = WiredCoordinator(tmp_path, VirtualClock(), BALLAST, 4)  # the process was killed; the exchange goes on
    again.store.drop_stale_partials()
    again.ask(KEY, None)
    assert len(partials(again, ME)) == len(partials(again, "d2")) == 1
    deliver(again, VICTIM)
    live = again.dispatcher.exchange.live
    assert live is not None
    live.close()
    assert partials(again, ME) == partials(again, "d2") == []
    assert list(again.store.exchanges.replies(KEY)) == [VICTIM]
    again.store.close()


def test_blocks_of_closed_exchanges_are_gone_after_a_start(coordinator: WiredCoordinator) -> None:
    folder = coordinator.store.folder / "updates"
    for cid in (ME, "left-long-ago"):
        (folder / cid / "partial").mkdir(parents=True)
        (folder / cid / "partial" / f"{'0' * 64}.4096").write_bytes(b"\0" * 5_000)
    coordinator.store.drop_stale_partials()
    assert [path.parts[-3] for path in folder.glob("*/partial/*")] == [ME]  # asked by the open exchange
    coordinator.store.exchanges.close(KEY, [])
    coordinator.store.drop_stale_partials()
    assert list(folder.glob("*/partial/*")) == []


def hostile_blocks(manifest: Manifest, data: bytes) -> dict[str, tuple[int, bytes]]:
    """name -> (index in the topic, message)"""
    good = blocks.pack_block(data[:BLOCK], 0, manifest.total)
    head = blocks.HEADER.pack(1, 0, 0, 0, 2**32 - 1, 0)
    flags = good[:1] + b"\1" + good[2:]
    crc = zlib.crc32(flags[16:], zlib.crc32(flags[:12])).to_bytes(4, "little")
    return {
        "index beyond the blob": (manifest.total, good),
        "index at the end of the alphabet": (65_535, good),
        "total of four billion": (0, head + data[:BLOCK]),
        "another total": (0, blocks.pack_block(data[:BLOCK], 0, manifest.total + 1)),
        "another index": (1, good),
        "too long": (0, good + b"\0"),
        "too short": (0, good[:-1]),
        "header only": (0, good[:16]),
        "nothing": (0, b""),
        "a megabyte and more": (0, bytes(2 << 20)),
        "flags set, with a right checksum": (0, flags[:12] + crc + flags[16:]),
        "another version": (0, b"\2" + good[1:]),
    }


def test_blocks_that_lie_are_dropped_and_sixteen_of_them_end_the_upload(coordinator: WiredCoordinator) -> None:
    manifest, data = coordinator.update(KEY, ME, 0)
    coordinator.announce(ME, 0, KEY)
    coordinator.said()
    lies = list(hostile_blocks(manifest, data).values())
    for index, message in lies:
        coordinator.block(ME, manifest, index, message)
    assert coordinator.said() == []
    assert partials(coordinator, ME)[0].stat().st_size == 0
    for index, message in lies[: 16 - len(lies)]:
        coordinator.block(ME, manifest, index, message)
    assert answers(coordinator) == [(ME, "bad_hash")]
    assert partials(coordinator, ME) == []
    deliver(coordinator, ME)  # once more is allowed
    assert answers(coordinator)[-1] == (ME, "ok")


def test_ten_thousand_copies_of_a_block_cost_neither_a_checksum_nor_the_disk(
    coordinator: WiredCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.announce(ME, 0, KEY)
    coordinator.send(KEY, ME, 0, [0])

    def refuse(*_: object) -> None:
        raise AssertionError("a copy was looked at")

    manifest, data = coordinator.update(KEY, ME, 0)
    packed = blocks.pack_block(data[:BLOCK], 0, manifest.total)
    monkeypatch.setattr("coordinator.runtime.exchange.uploads.unpack_block", refuse)
    monkeypatch.setattr("edge_client.transport.blobs._write_at", refuse)
    topic = TOPICS.upload(0, ME, routing_label(manifest.sha256), 0)
    for _ in range(10_000):
        coordinator.dispatcher.dispatch(Message(topic, packed))
    monkeypatch.undo()
    coordinator.send(KEY, ME, 0, list(range(1, 10)))
    assert answers(coordinator)[-1] == (ME, "ok")


def test_right_blocks_of_a_wrong_blob_are_bad_hash_leave_nothing_and_are_final_the_second_time(
    coordinator: WiredCoordinator,
) -> None:
    manifest, data = coordinator.update(KEY, ME, 0)
    said = []
    for _ in range(2):
        coordinator.announce(ME, 0, KEY)
        for index in range(manifest.total):
            body = bytes(len(data[slice(*blocks.body_range(manifest, index))]))
            coordinator.block(ME, manifest, index, blocks.pack_block(body, index, manifest.total))
        said += [answer for answer in answers(coordinator) if answer != (ME, "go")]
        assert partials(coordinator, ME) == []
    assert said == [(ME, "bad_hash")] * 2
    assert ME not in coordinator.store.exchanges.replies(KEY)
    for cid in DEVICES[1:]:  # the exchange does not wait for it
        deliver(coordinator, cid)
    assert coordinator.store.exchanges.closed_with(KEY) == list(DEVICES[1:])


def test_sizes_that_no_update_has_open_no_file(coordinator: WiredCoordinator) -> None:
    manifest, _ = coordinator.update(KEY, ME, 0)
    for size in (manifest.size * 200, 1 << 30):
        rdy(coordinator, ME, replace(manifest, size=size, block=1 << 20))
    assert answers(coordinator) == [(ME, "too_big")] * 2
    raw = messages.write_message(
        "rdy", ident="x", t_ms=0, **KEY._asdict(), attempt=0, n=1, what="delta", update=manifest, seconds=0
    )
    for text in (b"4611686018427387904", b"9007199254740991", b"-1", b"0", b"1e9", b"true"):
        forged = raw.replace(b'"size":%d' % manifest.size, b'"size":' + text)
        assert forged != raw
        coordinator.dispatcher.dispatch(Message(TOPICS.request(ME), forged))
    assert {code for _, code in answers(coordinator)} <= {"bad_json", "bad_field", "too_big"}
    assert partials(coordinator, ME) == []


def test_answers_to_what_was_never_asked_change_nothing(coordinator: WiredCoordinator) -> None:
    for key in (KEY._replace(run="r2"), KEY._replace(round=2), KEY._replace(exchange=7), KEY._replace(round=2**32 - 1)):
        coordinator.announce(ME, 0, key._replace(exchange=0) if key.exchange > 3 else key)
    assert {code for _, code in answers(coordinator)} <= {"closed", "go"}
    for index in range(3):
        coordinator.hear(ME, "nack", re="x", code="no_data", run="r2", round=index, exchange=0)
    assert coordinator.store.exchanges.closed_with(KEY) is None


def test_a_nack_in_a_loop_costs_one_answer_and_one_row(coordinator: WiredCoordinator) -> None:
    for _ in range(30):
        coordinator.hear(ME, "nack", re=f"c{coordinator.sender.epoch}-1", code="no_data", **KEY._asdict())
    assert len(coordinator.said()) <= 1
    assert coordinator.store.database.rows("select cid, reason from refusals") == [(ME, "no_data")]
    for cid in DEVICES[1:]:
        deliver(coordinator, cid)
    assert coordinator.store.exchanges.closed_with(KEY) == list(DEVICES[1:])


def test_one_device_cannot_make_it_believe_that_another_coordinator_leads(coordinator: WiredCoordinator) -> None:
    for _ in range(3):
        coordinator.hear(
            ME, "nack", re=f"c{coordinator.sender.epoch}-1", code="old_epoch", detail="epoch 1; 9 was seen"
        )
        coordinator.hear(VICTIM, "nack", re="c0-1", code="old_epoch")  # about another device's message
    with pytest.raises(Superseded):
        coordinator.hear(VICTIM, "nack", re=f"c{coordinator.sender.epoch}-2", code="old_epoch")


def test_one_device_is_not_believed_even_where_no_other_is_online(coordinator: WiredCoordinator) -> None:
    for cid in DEVICES[1:]:
        coordinator.hear(cid, "st", s="lost", bd=1)
    coordinator.hear(ME, "nack", re=f"c{coordinator.sender.epoch}-1", code="old_epoch")
    coordinator.hear("stranger", "st", s="on", bd=1, caps={"engine": "onnx", "n": SAMPLES})
    coordinator.hear("stranger", "nack", re=f"c{coordinator.sender.epoch}-1", code="old_epoch")


def test_what_a_device_said_of_another_coordinator_expires(tmp_path: Path) -> None:
    clock = VirtualClock()
    here = WiredCoordinator(tmp_path, clock, BALLAST, 4)
    old = {"re": f"c{here.sender.epoch}-1", "code": "old_epoch"}
    here.hear(ME, "nack", **old)
    clock.time_s += DISOWNED_S
    here.hear(VICTIM, "nack", **old)
    clock.time_s += DISOWNED_S - 1
    with pytest.raises(Superseded):
        here.hear(ME, "nack", **old)
    here.store.close()


def test_a_flood_of_requests_is_told_so_once_and_others_are_served(coordinator: WiredCoordinator) -> None:
    sha256 = coordinator.context.prepared.manifest.sha256
    for _ in range(2_000):
        coordinator.hear(ME, "get", sha256=sha256, block=4_096 * 2, at=[[0, 1]])
    told = [code for _, code in answers(coordinator)]
    assert told.count("rate") == 1
    assert len(told) <= 41
    deliver(coordinator, VICTIM)
    assert answers(coordinator)[-1] == (VICTIM, "ok")


def test_thousands_of_unknown_devices_cost_counters_and_a_few_answers(coordinator: WiredCoordinator) -> None:
    def flood(begin: int, count: int) -> None:
        for number in range(begin, begin + count):
            cid = f"unknown-{number}"
            state = b'{"v":1,"k":"st","id":"x","t":0,"s":"on","bd":1,"caps":{"engine":"onnx","n":9}}'
            coordinator.dispatcher.dispatch(Message(TOPICS.state(cid), state))
            coordinator.dispatcher.dispatch(
                Message(TOPICS.state(cid), b'{"v":1,"k":"st","id":"x","t":0,"s":"lost","bd":1}')
            )
            coordinator.dispatcher.dispatch(Message(TOPICS.request(cid), b'{"v":1,"k":"rebirth"}'))
            coordinator.dispatcher.dispatch(Message(TOPICS.upload(0, cid, "0" * 16, 0), b"block"))

    flood(0, LIMIT)
    coordinator.said()
    tracemalloc.start()
    flood(LIMIT, 200)
    before, _ = tracemalloc.get_traced_memory()
    flood(LIMIT + 200, 2_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 50_000
    assert len(coordinator.dispatcher.fleet.devices) == LIMIT
    assert len(coordinator.said()) <= 40  # the pace of all strangers together
    assert len([*coordinator.store.events.lines()]) <= LIMIT + 1  # and once that the fleet is full


def test_what_is_kept_of_devices_that_left_for_good_is_bounded_by_the_fleets_limit(tmp_path: Path) -> None:
    clock = VirtualClock()
    here = WiredCoordinator(tmp_path, clock, BALLAST, 4)
    dispatcher = here.dispatcher
    for generation in range(4):
        clock.time_s += 25 * 3600
        for number in range(LIMIT):
            cid = f"leaving-{generation}-{number}"
            here.hear(cid, "st", s="on", bd=1, caps={"engine": "onnx", "n": 9})
            here.hear(cid, "get", sha256="0" * 64, block=4096, at=[[0, 1]])
            here.hear(cid, "served", center=0, sha256="0" * 64, n=9, metrics={})
            here.hear(cid, "st", s="off", bd=1)
        assert len(dispatcher.fleet.devices) == LIMIT
        assert len(dispatcher._buckets) <= 2 * LIMIT
        assert len(dispatcher.catalog._buckets) <= 2 * LIMIT
    assert sum(cid.startswith("leaving-3-") for cid in dispatcher.fleet.devices) >= LIMIT - len(DEVICES)
    here.store.close()


@pytest.mark.parametrize(
    "topic",
    [
        *("fc/v1/test/rq/", "fc/v1/test/rq/+", "fc/v1/test/rq/#", "fc/v1/test/rq/é", "fc/v1/test/rq/d0/../d1"),
        *(
            "fc/v1/test/rq/d0\0",
            "fc/v1/test/rq/\u202ed0",
            "fc/v1/test/rq/d0\n",
            "fc/v1/other/rq/d0",
            "fc/v2/test/rq/d0",
        ),
        *("fc/v1/test/in/0/d0/../../x/0", "fc/v1/test/in/00/d0/0123456789abcdef/0", "fc/v1/test/in/0/d0/x/0"),
        *("fc/v1/test/in/0/d0/0123456789abcdef/65536", "fc/v1/test/in/0/d0/0123456789abcdef/-1", "$SYS/broker", ""),
        *("fc/v1/test/rq/coordinator.0", "fc/v1/test/rq/" + "a" * 65, "fc/v1/test/" + "x/" * 5_000),
    ],
    ids=ascii,
)
def test_topics_that_no_device_has_are_counted_and_nothing_more(coordinator: WiredCoordinator, topic: str) -> None:
    manifest, _ = coordinator.update(KEY, ME, 0)
    fields = {**KEY._asdict(), "attempt": 0, "n": 40, "what": "delta", "update": manifest, "seconds": 1.0}
    coordinator.dispatcher.dispatch(Message(topic, messages.write_message("rdy", ident="x", t_ms=0, **fields)))
    assert coordinator.said() == []
    assert coordinator.dispatcher.unreadable == 1


def test_blocks_of_one_result_do_not_count_for_what_was_said_of_another(tmp_path: Path) -> None:
    """It loses its only credit, announces another result with another number of samples, and sends on of the first."""
    clock = VirtualClock()
    here = WiredCoordinator(tmp_path, clock, BALLAST, 1)
    here.ask(KEY, None)
    here.announce(ME, 0, KEY)
    here.send(KEY, ME, 0, [0, 1])
    clock.time_s += 31.0
    here.announce(VICTIM, 0, KEY)
    assert here.dispatcher.exchange.live is not None
    here.dispatcher.exchange.live.tick()
    here.announce(ME, 1, KEY)
    here.send(KEY, ME, 0, list(range(2, 10)))
    assert ME not in here.store.exchanges.replies(KEY)
    here.store.close()


def test_an_accepted_update_that_is_sent_again_for_another_task_stays_on_the_disk(
    coordinator: WiredCoordinator,
) -> None:
    for cid in DEVICES:
        deliver(coordinator, cid)
    manifest, data = coordinator.update(KEY, ME, 0)
    later = KEY._replace(exchange=1)
    coordinator.ask(later, None)
    coordinator.said()
    rdy(coordinator, ME, manifest, exchange=1)
    for index in range(manifest.total):
        body = data[slice(*blocks.body_range(manifest, index))]
        coordinator.block(ME, manifest, index, blocks.pack_block(body, index, manifest.total))
    assert answers(coordinator) == [(ME, "go"), (ME, "bad_codec")]
    assert coordinator.store.updates(ME).has(manifest.sha256)
