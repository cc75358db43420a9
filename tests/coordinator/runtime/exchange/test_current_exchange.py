"""Which of the open exchange and the late updates of the one before a message is for, and what is left to the store."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.runtime.exchange.exchange_driver import open_exchange, replies_of, run_exchange
from coordinator.runtime.exchange.live_exchange import LiveExchange
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from edge_client.protocol.blocks import Manifest, manifest_of
from tests.support.counted_connection import CountedConnection
from tests.support.virtual_federation import BALLAST
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, SAMPLES, WiredCoordinator

FIRST, SECOND = ExchangeKey("run1", 1, 0), ExchangeKey("run1", 1, 1)


def test_what_an_announcement_costs_that_no_exchange_takes_does_not_grow_with_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read all tasks, replies and refusals of its exchange: 0.13 s with 10,000 devices, 20 times a second."""
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=CountedConnection))
    made, steps = WiredCoordinator(tmp_path, VirtualClock(), 0, len(DEVICES)), list[int]()
    with closing(made.store):
        for key, more in ((FIRST, 0), (SECOND, 1_000)):
            others = [f"e{number}" for number in range(more)]
            made.store.exchanges.open(key, dict.fromkeys([*DEVICES, *others], ""), 60.0)
            made.store.exchanges.put_replies(
                key, [StoredReply(cid, "ab" * 32, 1, 1, "delta", "zero", 1.0) for cid in others]
            )
            made.store.exchanges.close(key, others)
            CountedConnection.steps = 0
            made.announce("d0", 0, key)
            steps.append(CountedConnection.steps)
        assert [message["status"] for _, message in made.said() if message["k"] == "ack"] == ["late", "late"]
    assert steps[1] < 2 * steps[0]


class LateCoordinator(WiredCoordinator):
    """Its exchanges keep updates that come after closing."""

    def __init__(self, folder: Path, credits: int = 4, *, ballast: int = BALLAST) -> None:  # noqa: A002 - the protocol's word
        self.clock = VirtualClock()
        super().__init__(folder, self.clock, ballast, credits)

    def open(self, key: ExchangeKey) -> LiveExchange:
        tasks = self.tasks(key)
        live = LiveExchange(key, tasks, open_exchange(key, tasks, self.context), None, self.context, late=True)
        self.dispatcher.exchange.live = live
        live.begin()
        return live

    def close(self) -> None:
        live = self.dispatcher.exchange.live
        assert live is not None
        live.close()
        self.dispatcher.exchange.end()

    def blocks_of(self, cid: str, key: ExchangeKey = FIRST) -> Manifest:
        return replace(self.update(key, cid, 0)[0], inline=None)

    def offer(self, cid: str, update: Manifest, key: ExchangeKey = FIRST) -> None:
        about = {**key._asdict(), "attempt": 0, "n": SAMPLES, "seconds": 1.0}
        self.hear(cid, "rdy", **about, what=update.kind, update=update)

    def told(self) -> list[tuple[str, str, str]]:
        return [(cid, m["k"], m.get("status", m.get("code", ""))) for cid, m in self.said() if m["k"] != "task"]


@pytest.fixture
def late(tmp_path: Path) -> Iterator[LateCoordinator]:
    """d0 has answered the first exchange, d1 has sent two blocks; the second exchange is open."""
    made = LateCoordinator(tmp_path)
    with closing(made.store):
        made.open(FIRST)
        for cid, indices in (("d0", range(9)), ("d1", range(2))):
            made.offer(cid, made.blocks_of(cid))
            made.send(FIRST, cid, 0, list(indices))
        made.close()
        made.open(SECOND)
        made.said()
        yield made


def kept(late: LateCoordinator) -> list[str]:
    return [cid for cid in DEVICES if late.store.late_updates.find(FIRST, cid) is not None]


def test_an_upload_that_was_under_way_goes_on_and_is_kept_beside_the_open_exchange(late: LateCoordinator) -> None:
    exchange, last = late.dispatcher.exchange, late.blocks_of("d1").total
    late.more = True
    late.send(FIRST, "d1", 0, list(range(2, last)))
    assert (late.told(), exchange.unsynced_since_s) == ([], 0.0)
    late.clock.time_s += 3.0
    late.offer("d2", late.blocks_of("d2", SECOND), SECOND)
    late.send(SECOND, "d2", 0, list(range(last)))
    assert exchange.unsynced_since_s == 0.0  # since the earlier of both
    exchange.sync()
    assert sorted(late.told()) == [("d1", "ack", "ok"), ("d2", "ack", "ok"), ("d2", "go", "")]
    assert math.isinf(exchange.unsynced_since_s)
    assert kept(late) == ["d1"]
    assert list(late.store.exchanges.replies(SECOND)) == ["d2"]
    late.more = False
    late.offer("d1", late.blocks_of("d1"))
    late.offer("d1", replace(late.update(FIRST, "d1", 1)[0], inline=None))
    assert late.told() == [("d1", "ack", "dup"), ("d1", "ack", "superseded")]


def test_a_device_with_a_late_upload_may_upload_for_the_open_exchange_afterwards(late: LateCoordinator) -> None:
    late.send(FIRST, "d1", 0, list(range(2, 9)))
    late.offer("d1", late.blocks_of("d1", SECOND), SECOND)
    late.send(SECOND, "d1", 0, list(range(9)))
    assert late.told() == [("d1", "ack", "ok"), ("d1", "go", ""), ("d1", "ack", "ok")]


@pytest.mark.parametrize("meanwhile", ["the exchange ends", "its device begins another upload"])
@pytest.mark.parametrize("ballast", [0, BALLAST], ids=["inline", "blocks"])
def test_a_late_update_that_waits_for_the_disk_is_not_deleted_with_what_is_left_of_uploads(
    tmp_path: Path, meanwhile: str, ballast: int
) -> None:
    """No update that waited with it was stored: `retry`, "storage: No such file or directory"."""
    late = LateCoordinator(tmp_path, ballast=ballast)
    with closing(late.store):
        late.open(FIRST)
        late.close()
        late.ask(SECOND, None)  # keeps no late updates, as a test
        late.more = True
        late.announce("d1", 0, FIRST)
        late.send(FIRST, "d1", 0, list(range(9)))
        if meanwhile == "the exchange ends":
            assert late.dispatcher.exchange.live is not None
            late.dispatcher.exchange.live.close()
        else:
            late.offer("d1", late.blocks_of("d1", SECOND), SECOND)
        late.dispatcher.exchange.sync()
        assert ("d1", "ack", "ok") in late.told()
        assert kept(late) == ["d1"]
        assert meanwhile == "its device begins another upload" or late.store.uploading == {}


@pytest.mark.parametrize("wrong", ["kind", "size"])
def test_a_late_update_of_another_kind_or_size_than_asked_is_late_and_not_kept(
    late: LateCoordinator, wrong: str
) -> None:
    right = late.blocks_of("d3")
    update = manifest_of(b"x", "stats") if wrong == "kind" else replace(right, size=64 * 2**20)
    late.offer("d3", update)
    assert late.told() == [("d3", "ack", "late")]
    assert late.store.exchanges.refusals(FIRST.run, FIRST.round)["d3"] == "late"
    late.offer("d3", right)
    assert late.told() == [("d3", "go", "")]


def test_late_uploads_share_the_credits_and_those_that_were_under_way_come_first(tmp_path: Path) -> None:
    late = LateCoordinator(tmp_path, credits=1)
    late.open(FIRST)
    for cid in ("d0", "d1", "d2"):
        late.offer(cid, late.blocks_of(cid))  # d0 uploads, the others wait
    late.close()
    assert late.told() == [("d0", "go", ""), ("d0", "go", ""), ("d1", "err", "busy"), ("d2", "err", "busy")]
    late.offer("d0", late.blocks_of("d0"))
    assert late.told() == [("d0", "go", "")]
    late.store.close()


def test_the_late_uploads_of_an_exchange_end_when_the_next_one_closes(late: LateCoordinator) -> None:
    late.send(SECOND, "d1", 0, [0])  # of no open upload
    late.close()
    late.send(FIRST, "d1", 0, list(range(2, 9)))
    late.offer("d1", late.blocks_of("d1"))
    assert late.told() == [("d1", "ack", "late")]
    assert kept(late) == []
    late.offer("d1", late.blocks_of("d1", SECOND), SECOND)
    ((_, go),) = late.said()
    assert (go["k"], go.get("have")) == ("go", None)


def test_a_late_update_that_waits_for_the_disk_is_kept_when_the_next_exchange_closes(late: LateCoordinator) -> None:
    late.more = True
    late.send(FIRST, "d1", 0, list(range(2, 9)))
    assert (late.told(), kept(late)) == ([], [])
    late.close()
    assert ("d1", "ack", "ok") in late.told()
    assert kept(late) == ["d1"]


def test_an_answer_to_an_exchange_that_nobody_was_asked_in_is_closed_and_one_of_an_earlier_process_busy(
    tmp_path: Path,
) -> None:
    made = LateCoordinator(tmp_path)
    tasks = made.tasks(FIRST)
    open_exchange(FIRST, tasks, made.context)  # stored, but not begun again
    for key in (FIRST, SECOND):
        made.offer("d0", made.blocks_of("d0"), key)
    assert made.told() == [("d0", "err", "busy"), ("d0", "err", "closed")]
    made.dispatcher.exchange.on_quiet()
    made.dispatcher.exchange.on_connected("d0")
    made.dispatcher.exchange.on_block("d0", None, 0, b"")
    made.dispatcher.exchange.end()
    assert math.isinf(made.dispatcher.exchange.unsynced_since_s)
    assert made.dispatcher.exchange.live is None
    made.store.close()


def test_a_device_that_connects_again_is_sent_its_task_of_the_open_exchange(late: LateCoordinator) -> None:
    late.hear("d3", "st", s="on", bd=2, caps={"engine": "onnx", "n": SAMPLES})
    ((cid, task),) = [(cid, m) for cid, m in late.said() if m["k"] == "task"]
    assert (cid, task["exchange"]) == ("d3", 1)


def test_the_replies_of_a_closed_exchange_are_those_it_closed_with_and_tell_their_samples(
    late: LateCoordinator,
) -> None:
    late.send(FIRST, "d1", 0, list(range(2, 9)))  # late: it does not count here
    tasks = late.tasks(FIRST)
    asked = open_exchange(FIRST, tasks, late.context)

    def never(_: Any) -> None:  # noqa: ANN401 - an exchange
        raise AssertionError("a closed exchange asks no device")

    for replies in (replies_of(FIRST, asked, late.store), run_exchange(FIRST, tasks, None, late.context, never)):
        assert list(replies) == ["d0"]
        update = replies["d0"].update
        assert update is not None
        np.testing.assert_array_equal(update, late.base(FIRST) + late.delta("d0", 0))
