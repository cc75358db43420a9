"""A test beside the updates of a run that waits for no device: who is asked for it, and when."""

from __future__ import annotations

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
from edge_client.protocol.task import Probe
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, SAMPLES, WiredCoordinator


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_device_at_work_is_asked_for_the_test_as_soon_as_its_task_has_expired(
    tmp_path: Path, concurrency: int
) -> None:
    clock = VirtualClock()
    coordinator = WiredCoordinator(tmp_path, clock, 0, len(DEVICES))
    context, fleet = coordinator.context, dict.fromkeys(DEVICES, SAMPLES)
    rules = Rules(
        strategy=check_asynchronous(make_method("fedavg"), fleet),
        options=Asynchronous(concurrency=concurrency, buffer=3, max_staleness=5),
        schema=context.prepared.program.schema,
        fleet=fleet,
        seed=0,
    )
    state = State(centers=context.prepared.initial[None].astype(np.float64), extra={"start": context.prepared.initial})
    live = UpdatesAndTest("run1", context, is_online=lambda _: True, newcomers=lambda: False)
    live.updates.open_round(2, begin_training(state), rules, {})
    live.begin()
    at_work = sorted(cid for cid, _ in coordinator.said())
    assert len(at_work) == concurrency

    clock.time_s += 100.0  # the test has its whole deadline from here
    key = ExchangeKey("run1", 2, 1_000)  # a number that no task has
    tasks = {cid: Probe(models=(), want=frozenset({"labels"}), batch=1, seed=0) for cid in DEVICES}
    has_task = live.updates.has_task
    asked = open_exchange(key, tasks, context)
    live.begin_test(LiveExchange(key, tasks, asked, None, context, may_ask=lambda who: not has_task(who)))
    assert sorted(cid for cid, _ in coordinator.said()) == sorted(set(DEVICES) - set(at_work))

    clock.time_s += context.config.round.deadline_s - 100.0
    live.tick()
    said = coordinator.said()
    assert sorted(cid for cid, message in said if message["k"] == "stop") == at_work
    assert sorted(cid for cid, message in said if message["k"] == "task" and message["exchange"] == 1_000) == at_work
    coordinator.store.close()
