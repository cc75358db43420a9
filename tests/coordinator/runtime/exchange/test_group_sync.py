"""Updates that arrive together wait for the disk together, and no device is told before they are on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.storage.exchange_store import ExchangeKey
from tests.support.virtual_federation import BALLAST
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, WiredCoordinator

KEY = ExchangeKey("run1", 1, 0)


@pytest.fixture(params=[0, BALLAST], ids=["inline", "blocks"])
def coordinator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WiredCoordinator]:
    made = WiredCoordinator(tmp_path, VirtualClock(), request.param, len(DEVICES))
    made.ask(KEY, None)
    made.said()
    yield made
    made.store.close()


def deliver(coordinator: WiredCoordinator, *cids: str) -> None:
    """These devices' updates arrive, and further messages wait."""
    coordinator.more = True
    for cid in cids:
        coordinator.announce(cid, 0, KEY)
        manifest, _ = coordinator.update(KEY, cid, 0)
        if manifest.inline is None:
            coordinator.send(KEY, cid, 0, list(range(manifest.total)))


def acks(coordinator: WiredCoordinator) -> dict[str, str]:
    return {cid: message["status"] for cid, message in coordinator.said() if message["k"] == "ack"}


def test_they_are_acknowledged_when_they_are_on_disk_and_not_before(coordinator: WiredCoordinator) -> None:
    deliver(coordinator, "d0", "d1", "d2")
    assert acks(coordinator) == {}
    assert not coordinator.store.exchanges.replies(KEY)
    coordinator.dispatcher.exchange.sync()
    assert acks(coordinator) == dict.fromkeys(("d0", "d1", "d2"), "ok")
    assert sorted(coordinator.store.exchanges.replies(KEY)) == ["d0", "d1", "d2"]


def test_one_transaction_stores_all_of_them(coordinator: WiredCoordinator) -> None:
    deliver(coordinator, "d0", "d1", "d2")
    before = coordinator.store.database.writes
    coordinator.dispatcher.exchange.sync()
    assert coordinator.store.database.writes == before + 1


def test_each_blob_is_synced_before_it_gets_its_name_and_its_row(
    coordinator: WiredCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(coordinator, "d0", "d1")
    done: list[str] = []

    def noting(name: str, act: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: object) -> None:
            act(*args)
            done.append(name)

        return noted

    monkeypatch.setattr(os, "fsync", noting("sync", os.fsync))
    monkeypatch.setattr(Path, "replace", noting("rename", Path.replace))
    exchanges = coordinator.store.exchanges
    monkeypatch.setattr(exchanges, "put_replies", noting("rows", exchanges.put_replies))
    coordinator.dispatcher.exchange.sync()
    assert done == ["sync", "sync", "rename", "rename", "sync", "sync", "rows"]


def test_on_a_full_disk_all_of_them_try_again_and_none_counts(
    coordinator: WiredCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(coordinator, "d0", "d1")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        coordinator.dispatcher.exchange.sync()
    assert acks(coordinator) == {"d0": "retry", "d1": "retry"}
    assert not coordinator.store.exchanges.replies(KEY)
    deliver(coordinator, "d0", "d1")
    coordinator.dispatcher.exchange.sync()
    assert acks(coordinator) == {"d0": "ok", "d1": "ok"}


def test_what_has_arrived_counts_when_the_deadline_passes(coordinator: WiredCoordinator) -> None:
    deliver(coordinator, "d0", "d1")
    live = coordinator.dispatcher.exchange.live
    assert live is not None
    live.close()
    assert acks(coordinator) == {"d0": "ok", "d1": "ok"}
    assert coordinator.store.exchanges.closed_with(KEY) == ["d0", "d1"]


@pytest.mark.parametrize("ballast", [0, BALLAST], ids=["inline", "blocks"])
def test_those_behind_the_update_that_closes_the_exchange_are_late_and_not_kept(tmp_path: Path, ballast: int) -> None:
    made = WiredCoordinator(tmp_path, VirtualClock(), ballast, len(DEVICES))
    made.ask(KEY, 2)
    made.said()
    deliver(made, "d0", "d1", "d2")
    made.dispatcher.exchange.sync()
    assert made.store.exchanges.closed_with(KEY) == ["d0", "d1"]
    assert sorted(made.store.exchanges.replies(KEY)) == ["d0", "d1"]
    assert acks(made) == {"d0": "ok", "d1": "ok", "d2": "late"}
    assert {path.parent.name for path in made.store.folder.glob("updates/*/*") if path.is_file()} == {"d0", "d1"}
    made.store.close()


def test_an_update_that_is_late_and_the_same_as_an_earlier_one_is_kept_for_that_one(tmp_path: Path) -> None:
    made = WiredCoordinator(tmp_path, VirtualClock(), 0, len(DEVICES))
    with closing(made.store):
        manifest, data = made.update(KEY, "d1", 0)
        made.store.updates("d1").put(data)
        made.ask(KEY, 1)
        deliver(made, "d0", "d1")
        made.dispatcher.exchange.sync()
        assert acks(made)["d1"] == "late"
        assert made.store.updates("d1").has(manifest.sha256)


def test_an_update_that_is_late_and_the_same_as_a_late_one_of_the_exchange_before_is_kept_for_that_one(
    tmp_path: Path,
) -> None:
    made, following = WiredCoordinator(tmp_path, VirtualClock(), 0, len(DEVICES)), KEY._replace(round=2)
    with closing(made.store):
        made.ask(KEY, 1, late=True)
        deliver(made, "d0")
        made.dispatcher.exchange.sync()
        made.dispatcher.exchange.end()
        made.ask(following, 1)
        made.announce("d0", 0, following)
        manifest, data = made.update(following, "d1", 0)
        in_blocks, again = replace(manifest, inline=None), {"attempt": 0, "n": 40, "what": "delta", "seconds": 1.0}
        made.hear("d1", "rdy", **following._asdict(), **again, update=in_blocks)
        made.send(following, "d1", 0, list(range(in_blocks.total)))
        for _ in range(2):
            made.hear("d1", "rdy", **KEY._asdict(), **again, update=manifest)
        made.dispatcher.exchange.sync()
        assert made.store.late_updates.find(KEY, "d1") == manifest.sha256
        assert made.store.updates("d1").read(manifest.sha256) == data


def test_those_behind_it_try_again_too_where_the_disk_has_no_room_for_what_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They got no answer, and asked again after a minute."""
    made = WiredCoordinator(tmp_path, VirtualClock(), 0, len(DEVICES))
    made.ask(KEY, 1)
    deliver(made, "d0", "d1")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(made.store.exchanges, "put_replies", full)
        made.dispatcher.exchange.sync()
    assert acks(made) == {"d0": "retry", "d1": "retry"}
    made.store.close()


def test_an_update_behind_the_last_one_that_is_wanted_is_kept_where_the_method_takes_late_ones(tmp_path: Path) -> None:
    """It was answered `late`, which is final: a device with blocks sent them no more."""
    made = WiredCoordinator(tmp_path, VirtualClock(), BALLAST, len(DEVICES))
    made.ask(KEY, 1, late=True)
    deliver(made, "d0", "d1")
    made.said()
    exchange = made.dispatcher.exchange
    exchange.sync()
    exchange.end()
    told = [(cid, message.get("status", message["k"])) for cid, message in made.said()]
    assert told == [("d0", "ok"), ("d1", "go")]
    manifest, _ = made.update(KEY, "d1", 0)
    made.send(KEY, "d1", 0, list(range(manifest.total)))
    exchange.sync()
    assert acks(made) == {"d1": "ok"}
    assert made.store.late_updates.find(KEY, "d1") == manifest.sha256
    made.store.close()


def test_an_update_that_waits_for_a_credit_of_another_does_not_count_once_its_device_is_revoked(tmp_path: Path) -> None:
    made, revoked = WiredCoordinator(tmp_path, VirtualClock(), 0, 1), set[str]()
    made.context = replace(made.context, revoked=lambda: frozenset(revoked))
    made.ask(KEY, None)
    deliver(made, "d0", "d1")
    made.said()
    revoked.add("d1")
    made.dispatcher.exchange.on_revoked(revoked)
    made.dispatcher.exchange.sync()
    assert acks(made) == {"d0": "ok"}
    assert sorted(made.store.exchanges.replies(KEY)) == ["d0"]
    made.store.close()


def test_a_device_that_announces_again_is_answered_once_for_each_time(coordinator: WiredCoordinator) -> None:
    deliver(coordinator, "d0")
    coordinator.announce("d0", 1, KEY)
    said = [message["status"] for cid, message in coordinator.said() if message["k"] == "ack" and cid == "d0"]
    assert said == ["ok", "superseded"]
