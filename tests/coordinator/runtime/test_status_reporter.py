"""What the coordinator tells of itself does not keep it from its devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import format_run_event
from coordinator.runtime.announcer import StateAnnouncer
from coordinator.runtime.status_reporter import MAX_PAUSE_S, PAUSE, StatusReporter
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.status import SILENT_AFTER_S, STATUS_FILE, StatusWriter
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, WiredCoordinator

KEY = ExchangeKey("run1", 1, 0)
STEP_S, LONG_S = 0.01, 600.0


def reporter_of(coordinator: WiredCoordinator, folder: Path, **watchers: Any) -> StatusReporter:  # noqa: ANN401
    return StatusReporter(
        StatusWriter(folder),
        clock=coordinator.sender.clock,
        announcer=StateAnnouncer(coordinator.sender),
        store=coordinator.store,
        sender=coordinator.sender,
        dispatcher=coordinator.dispatcher,
        is_paused=lambda: False,
        **watchers,
    )


@pytest.mark.parametrize("took_s", [0.0, 0.05, 0.6, 3.0])
def test_however_long_reports_take_they_take_a_tenth_of_the_time_or_come_every_eight_seconds(
    tmp_path: Path, took_s: float
) -> None:
    clock = VirtualClock()
    coordinator = WiredCoordinator(tmp_path, clock, 0, 1)
    ends: list[float] = []

    def observe(_: Mapping[str, Any]) -> None:
        clock.time_s += took_s
        ends.append(clock.time_s)

    reporter = reporter_of(coordinator, tmp_path, observe=observe)
    reporter.write("asking")
    while clock.time_s < LONG_S:
        reporter.tick()
        clock.time_s += STEP_S
    between = [late - early - took_s for early, late in pairwise(ends[1:])]
    assert min(between) >= min(MAX_PAUSE_S, PAUSE * took_s) - STEP_S
    assert max(between) + took_s < SILENT_AFTER_S  # `status` does not take it for dead
    assert json.loads((tmp_path / STATUS_FILE).read_text())["connected"] == len(coordinator.dispatcher.fleet.devices)
    coordinator.store.close()


def test_a_round_says_whom_it_waits_for_while_nothing_comes_and_ever_more_rarely(tmp_path: Path) -> None:
    clock, told = VirtualClock(), list[tuple[float, str]]()
    coordinator = WiredCoordinator(tmp_path, clock, 0, len(DEVICES))
    coordinator.hear("d2", "st", s="off", bd=1)
    began_s = clock.time_s
    reporter = reporter_of(
        coordinator,
        tmp_path,
        observe=None,
        progress=lambda event: told.append((clock.time_s - began_s, format_run_event(event))),
    )
    coordinator.ask(KEY, None)
    while clock.time_s <= began_s + 150.0:
        reporter.tick()
        clock.time_s += 1.0
        if clock.time_s == began_s + 10.0:
            tasks = {cid: task for cid, task in coordinator.said() if task["k"] == "task"}
            coordinator.hear("d1", "nack", re=tasks["d1"]["id"], code="no_data", **KEY._asdict())
    words = "run1 round 1: 0 of 4 answers, {left} s left; waiting for d0, d2 (not connected), d3"
    assert told == [(40.0, words.format(left=260)), (100.0, words.format(left=200))]
    coordinator.store.close()
