"""A test beside the updates of a run that waits for no device: who is asked for it, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.rounds.asynchronous.options import Asynchronous, check_asynchronous
from coordinator.rounds.asynchronous.snapshot import Snapshot
from coordinator.rounds.asynchronous.training import Rules, begin_training
from coordinator.runtime.exchange.exchange_driver import open_exchange
from coordinator.runtime.exchange.live_exchange import LiveExchange
from coordinator.runtime.exchange.updates_and_test import UpdatesAndTest
from coordinator.runtime.exchange.upload_receiver import Announcement
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.strategies.base import State
from coordinator.strategies.registry import make_method
from edge_client.protocol import codecs
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.task import ClientId, Probe, Reply
from tests.support.virtual_federation import BALLAST
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, SAMPLES, WiredCoordinator

TEST = ExchangeKey("run1", 2, 1_000)  # a number that no task has


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[WiredCoordinator]:
    made = WiredCoordinator(tmp_path, VirtualClock(), 0, len(DEVICES))
    with closing(made.store):
        yield made


def begun(coordinator: WiredCoordinator, concurrency: int) -> tuple[UpdatesAndTest, list[ClientId]]:
    """-> a run of which so many devices have a task, and these devices."""
    context, fleet = coordinator.context, dict.fromkeys(DEVICES, SAMPLES)
    rules = Rules(
        strategy=check_asynchronous(make_method("fedavg"), fleet),
        options=Asynchronous(concurrency=concurrency, buffer=3, max_staleness=5),
        schema=context.prepared.program.schema,
        fleet=fleet,
        seed=0,
    )
    start = context.prepared.initial
    training = begin_training(State(centers=start[None].astype(np.float64), extra={"start": start}))
    live = UpdatesAndTest("run1", context, is_online=lambda _: True, newcomers=lambda: False)
    coordinator.dispatcher.exchange.live = live
    live.updates.open_round(2, Snapshot(training), rules, context)
    live.begin()
    return live, sorted(cid for cid, _ in coordinator.said())


def begin_test(coordinator: WiredCoordinator, live: UpdatesAndTest) -> None:
    tasks = {cid: Probe(models=(), want=frozenset({"labels"}), batch=1, seed=0) for cid in DEVICES}
    has_task = live.updates.has_task
    asked = open_exchange(TEST, tasks, coordinator.context)
    live.begin_test(LiveExchange(TEST, tasks, asked, None, coordinator.context, may_ask=lambda who: not has_task(who)))


def heard(coordinator: WiredCoordinator) -> dict[str, list[ClientId]]:
    """Who was sent which kind of message since the last call; "test" is the task of the test."""
    found: dict[str, list[ClientId]] = {}
    for cid, message in coordinator.said():
        asks = message["k"] == "task" and message["exchange"] == TEST.exchange
        found.setdefault("test" if asks else message["k"], []).append(cid)
    return {kind: sorted(cids) for kind, cids in found.items()}


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_device_at_work_is_asked_for_the_test_as_soon_as_its_task_has_expired(
    coordinator: WiredCoordinator, concurrency: int
) -> None:
    live, at_work = begun(coordinator, concurrency)
    assert len(at_work) == concurrency
    clock, deadline_s = coordinator.context.clock, coordinator.config.round.deadline_s
    assert isinstance(clock, VirtualClock)
    clock.time_s += deadline_s / 3  # the test has its whole deadline from here
    begin_test(coordinator, live)
    assert heard(coordinator) == {"test": sorted(set(DEVICES) - set(at_work))}
    clock.time_s += deadline_s * 2 / 3
    live.tick()
    assert heard(coordinator) == {"stop": at_work, "test": at_work}


def test_a_device_at_work_is_asked_for_the_test_as_soon_as_its_update_is_on_disk(coordinator: WiredCoordinator) -> None:
    live, (who,) = begun(coordinator, 1)
    begin_test(coordinator, live)
    coordinator.said()
    coordinator.more = True
    coordinator.announce(who, 0, ExchangeKey("run1", 2, 0))
    assert heard(coordinator) == {}
    live.sync()
    assert heard(coordinator) == {"ack": [who], "test": [who]}


def test_a_device_that_comes_again_is_sent_the_task_that_it_has(coordinator: WiredCoordinator) -> None:
    live, (at_work,) = begun(coordinator, 1)
    begin_test(coordinator, live)
    at_test = min(set(DEVICES) - {at_work})
    heard(coordinator)
    live.resend_task(at_test)
    assert heard(coordinator) == {"test": [at_test]}
    live.resend_task(at_work)
    assert heard(coordinator) == {"task": [at_work]}


def answer(coordinator: WiredCoordinator, cid: ClientId, *, inline: bool = True) -> None:
    """The labels of a device's training samples, for the test."""
    data = codecs.encode_stats(Reply(n=SAMPLES, labels=np.full(4, 10.0)), coordinator.context.prepared.program.schema)
    about = {**TEST._asdict(), "attempt": 0, "n": SAMPLES, "seconds": 1.0}
    coordinator.hear(cid, "rdy", **about, what="stats", update=manifest_of(data, "stats", inline=inline))


def test_a_device_that_has_done_the_test_or_refuses_it_gets_a_task_and_the_others_wait_for_theirs(
    coordinator: WiredCoordinator,
) -> None:
    live, (at_work,) = begun(coordinator, 1)
    begin_test(coordinator, live)
    asked = {cid: message for cid, message in coordinator.said() if message["k"] == "task"}
    coordinator.announce(at_work, 0, ExchangeKey("run1", 2, 0))
    assert heard(coordinator) == {"ack": [at_work], "test": [at_work]}
    first, second, _ = sorted(asked)
    assert live.progress()["updates"]["test"] == {"answered": 0, "wanted": 4}
    answer(coordinator, first)
    (_, ack), (cid, task) = coordinator.said()
    assert (ack["status"], cid, task["k"], task["job"]) == ("ok", first, "task", "fit")
    assert live.progress()["updates"]["test"] == {"answered": 1, "wanted": 4}
    coordinator.hear(second, "nack", re=asked[second]["id"], code="no_data", **TEST._asdict())
    assert heard(coordinator) == {}  # one device trains at a time
    coordinator.hear(first, "nack", re=task["id"], code="no_data")
    assert heard(coordinator) == {"task": [second]}
    assert coordinator.store.exchanges.refusals(TEST.run, TEST.round) == dict.fromkeys((first, second), "no_data")


def test_a_device_that_answers_a_test_although_it_had_no_samples_takes_no_other_devices_place(
    coordinator: WiredCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hostile devices could say both, and have as many others left out of the test."""
    probe = Probe(models=(), want=frozenset({"labels"}), split="test", batch=1, seed=0)
    monkeypatch.setattr(coordinator, "tasks", lambda _: dict.fromkeys(DEVICES, probe))
    coordinator.ask(TEST, None)
    sent = {cid: message["id"] for cid, message in coordinator.said() if message["k"] == "task"}
    for cid in DEVICES[:2]:
        coordinator.hear(cid, "nack", re=sent[cid], code="no_data", **TEST._asdict())
    for cid in DEVICES:
        answer(coordinator, cid)
    assert [(cid, message.get("status")) for cid, message in coordinator.said()] == [(cid, "ok") for cid in DEVICES]


def test_an_answer_to_the_test_by_a_device_at_work_leaves_what_has_come_of_its_update(tmp_path: Path) -> None:
    """A hostile device could end the coordinator so."""
    coordinator = WiredCoordinator(tmp_path, VirtualClock(), BALLAST, len(DEVICES))
    with closing(coordinator.store):
        live, (at_work,) = begun(coordinator, 1)
        begin_test(coordinator, live)
        key = ExchangeKey("run1", 2, 0)
        update, _ = coordinator.update(key, at_work, 0)
        coordinator.announce(at_work, 0, key)
        coordinator.send(key, at_work, 0, list(range(update.total - 1)))
        answer(coordinator, at_work, inline=False)
        coordinator.said()
        coordinator.send(key, at_work, 0, [update.total - 1])
        assert heard(coordinator)["ack"] == [at_work]
        assert coordinator.store.exchanges.replies(key)[at_work].sha256 == update.sha256


def test_what_is_announced_of_neither_the_updates_nor_the_test_is_not_taken(coordinator: WiredCoordinator) -> None:
    live, _ = begun(coordinator, 1)
    update, key = manifest_of(b"update", "delta"), ExchangeKey("run1", 9, 9)
    strange = Announcement(cid="d0", key=key, ident="x", attempt=0, n=SAMPLES, seconds=1.0, update=update)
    assert not live.takes(strange)
    begin_test(coordinator, live)
    assert not live.takes(strange)
    assert live.takes(replace(strange, key=TEST))


def test_time_wakes_it_for_the_updates_or_the_test_whichever_is_first(coordinator: WiredCoordinator) -> None:
    live, _ = begun(coordinator, 1)
    deadline_s = coordinator.config.round.deadline_s
    assert live.wakes_at_s == deadline_s
    begin_test(coordinator, live)
    assert live.wakes_at_s == 5.0  # the test's heartbeat
    assert live.test is not None
    live.test.close()
    assert live.wakes_at_s == deadline_s
    assert "test" not in live.progress()["updates"]


def test_what_waits_for_the_disk_of_either_is_stored_by_one_sync(coordinator: WiredCoordinator) -> None:
    live, (at_work,) = begun(coordinator, 1)
    begin_test(coordinator, live)
    clock, tester = coordinator.context.clock, min(set(DEVICES) - {at_work})
    assert isinstance(clock, VirtualClock)
    coordinator.said()
    coordinator.more = True
    clock.time_s = 2.0
    answer(coordinator, tester)
    assert live.unsynced_since_s == 2.0
    clock.time_s = 3.0
    coordinator.announce(at_work, 0, ExchangeKey("run1", 2, 0))
    assert live.unsynced_since_s == 2.0
    live.sync()
    assert math.isinf(live.unsynced_since_s)
    assert heard(coordinator)["ack"] == sorted([at_work, tester])


def test_at_the_end_of_a_run_neither_task_nor_test_is_wanted(coordinator: WiredCoordinator) -> None:
    live, (at_work,) = begun(coordinator, 1)
    begin_test(coordinator, live)
    coordinator.said()
    live.finish()
    assert heard(coordinator) == {"stop": sorted(DEVICES)}
    assert live.test is not None
    assert live.test.closed
    assert not live.updates.has_task(at_work)


def test_after_a_new_connection_to_the_broker_each_device_is_sent_what_it_has_again(
    coordinator: WiredCoordinator,
) -> None:
    live, (at_work,) = begun(coordinator, 1)
    begin_test(coordinator, live)
    first, *others = sorted(set(DEVICES) - {at_work})
    answer(coordinator, first)
    coordinator.said()
    live.begin()
    assert heard(coordinator) == {"test": others, "task": [at_work]}
    live.close()
    assert live.closed
    assert live.test is not None
    assert not live.test.closed  # it goes on


def test_an_answer_to_neither_is_closed(coordinator: WiredCoordinator) -> None:
    live, (at_work,) = begun(coordinator, 1)
    coordinator.announce(at_work, 0, TEST)
    begin_test(coordinator, live)
    other = min(set(DEVICES) - {at_work})
    coordinator.announce(other, 0, ExchangeKey("run1", 2, 0))
    said = [(cid, m["code"]) for cid, m in coordinator.said() if m["k"] == "err"]
    assert said == [(at_work, "closed"), (other, "closed")]


def test_a_pause_between_two_rounds_is_taken_neither_from_tasks_nor_from_the_test(
    coordinator: WiredCoordinator,
) -> None:
    """No message is heard in it: tasks that were done meanwhile expired, and their devices got none for a deadline."""
    live, at_work = begun(coordinator, 1)
    clock, deadline_s = coordinator.context.clock, coordinator.config.round.deadline_s
    assert isinstance(clock, VirtualClock)
    begin_test(coordinator, live)
    clock.time_s += deadline_s / 3
    live.close()
    clock.time_s += 3 * deadline_s
    state = live.updates.journalled
    for number in (3, 4):  # a replay may end a round at once
        live.postpone_tests()
        live.updates.open_round(number, Snapshot(state.training, state.rounds), state.rules, coordinator.context)
    heard(coordinator)
    live.tick()
    assert heard(coordinator) == {}
    assert live.test is not None
    assert not live.test.closed
    clock.time_s += deadline_s / 2
    live.resend_task(at_work[0])
    ((cid, task),) = coordinator.said()
    assert (cid, task["left_ms"]) == (at_work[0], round(deadline_s / 6 * 1000))
