"""A test beside the updates of a run that waits for no device: who is asked for it, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from coordinator.rounds.asynchronous.options import Asynchronous, check_asynchronous
from coordinator.rounds.asynchronous.training import Rules, begin_training
from coordinator.runtime.exchange.exchange_driver import open_exchange
from coordinator.runtime.exchange.live_exchange import LiveExchange
from coordinator.runtime.exchange.updates_and_test import UpdatesAndTest
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.strategies.base import State
from coordinator.strategies.registry import make_method
from edge_client.protocol.task import ClientId, Probe
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
    coordinator.dispatcher.exchange.begin(live)
    live.updates.open_round(2, training, rules, {})
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
