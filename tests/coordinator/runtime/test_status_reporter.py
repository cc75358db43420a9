"""What the coordinator tells of itself does not keep it from its devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from coordinator.runtime.announcer import StateAnnouncer
from coordinator.runtime.status_reporter import MAX_PAUSE_S, PAUSE, StatusReporter
from coordinator.storage.status import SILENT_AFTER_S, STATUS_FILE, StatusWriter
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import WiredCoordinator

STEP_S, LONG_S = 0.01, 600.0


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

    reporter = StatusReporter(
        StatusWriter(tmp_path),
        announcer=StateAnnouncer(coordinator.sender),
        store=coordinator.store,
        sender=coordinator.sender,
        dispatcher=coordinator.dispatcher,
        is_paused=lambda: False,
        observe=observe,
    )
    reporter.write("asking")
    while clock.time_s < LONG_S:
        reporter.tick(clock.now_s())
        clock.time_s += STEP_S
    between = [late - early - took_s for early, late in pairwise(ends[1:])]
    assert min(between) >= min(MAX_PAUSE_S, PAUSE * took_s) - STEP_S
    assert max(between) + took_s < SILENT_AFTER_S  # `status` does not take it for dead
    assert json.loads((tmp_path / STATUS_FILE).read_text())["connected"] == len(coordinator.dispatcher.fleet.devices)
    coordinator.store.close()
