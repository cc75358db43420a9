"""What is kept of an exchange that has closed, or failed: who is told what, and how it is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.runtime.exchange.exchange_driver import open_exchange
from coordinator.storage.exchange_store import ExchangeKey, ReplayDiverged
from edge_client.errors import NetworkError
from edge_client.protocol.task import Fit
from tests.support.virtual_federation import Federation, Spy
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, WiredCoordinator

KEY = ExchangeKey("run1", 1, 0)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[WiredCoordinator]:
    made = WiredCoordinator(tmp_path, VirtualClock(), 0, len(DEVICES))
    with closing(made.store):
        yield made


def test_an_update_after_closing_is_shown_as_late_and_an_earlier_refusal_keeps_its_reason(
    coordinator: WiredCoordinator,
) -> None:
    coordinator.ask(KEY, None)
    exchange = coordinator.dispatcher.exchange
    tasks = {cid: task for cid, task in coordinator.said() if task["k"] == "task"}
    coordinator.hear("d1", "nack", re=tasks["d1"]["id"], code="no_data", **KEY._asdict())
    assert exchange.live is not None
    exchange.live.close()
    exchange.end()
    coordinator.said()
    for cid in ("d0", "d1"):
        coordinator.announce(cid, 0, KEY)
    assert [(cid, ack["status"]) for cid, ack in coordinator.said()] == [("d0", "late"), ("d1", "late")]
    assert coordinator.store.exchanges.refusals(KEY.run, KEY.round) == {"d0": "late", "d1": "no_data"}


def test_an_exchange_goes_on_with_its_own_tasks_and_with_those_of_a_store_that_kept_no_hash(
    coordinator: WiredCoordinator,
) -> None:
    tasks, store = coordinator.tasks(KEY), coordinator.store.exchanges
    asked = open_exchange(KEY, tasks, coordinator.context)
    assert open_exchange(KEY, tasks, coordinator.context).keys() == asked.keys()
    old = KEY._replace(exchange=1)
    store.open(old, dict.fromkeys(tasks, ""), 60.0)
    assert open_exchange(old, tasks, coordinator.context).keys() == asked.keys()


def test_an_exchange_that_asks_one_device_something_else_does_not_go_on(coordinator: WiredCoordinator) -> None:
    tasks = coordinator.tasks(KEY)
    open_exchange(KEY, tasks, coordinator.context)
    first = tasks["d0"]
    assert isinstance(first, Fit)
    with pytest.raises(ReplayDiverged):
        open_exchange(KEY, {**tasks, "d0": replace(first, seed=99)}, coordinator.context)


def test_an_exchange_that_failed_below_the_quorum_has_a_whole_deadline_when_it_is_repeated(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=2, quorum=1.0, deadline_s=63.0)  # the last heartbeat leaves 3 s of them
    spy = Spy(fed.world.broker)
    fed.start(1)
    fed.start_mute_device("d01")
    with pytest.raises(NetworkError, match="only 1 of 2 devices"):
        fed.finish()
    before = len(spy.said("task", cid="d01"))
    fed.start_coordinator()
    fed.world.run(lambda: len(spy.said("task", cid="d01")) > before)
    assert spy.said("task", cid="d01")[-1]["left_ms"] > 60_000


def test_an_error_below_the_quorum_names_the_silent_devices_and_the_reasons_of_the_others(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=8, quorum=1.0, deadline_s=60.0)
    spy = Spy(fed.world.broker)
    fed.start(1)
    for number in range(1, 8):
        fed.start_mute_device(f"d{number:02d}")
    fed.world.run(lambda: bool(spy.said("task", cid="d01")))
    task = spy.said("task", cid="d01")[0]
    key = {name: task[name] for name in ("run", "round", "exchange")}
    spy.say("d01", "nack", re=task["id"], code="no_data", detail="the folder is empty", **key)
    with pytest.raises(NetworkError) as failed:
        fed.finish()
    assert failed.value.message == (
        "only 1 of 8 devices gave an answer that counts in round 1; no answer from d02, d03, d04, d05, d06 and 1 more; "
        "d01 did not count (no_data: the folder is empty)"
    )


def test_a_round_whose_updates_all_move_too_far_says_what_makes_updates_do_so(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=2, max_update_rms=1e-9)  # no honest update is so small
    fed.start(2)
    with pytest.raises(NetworkError, match="only 0 of 2 devices gave an answer that counts") as failed:
        fed.finish()
    assert failed.value.hint.startswith("a learning rate that is too large does this")
