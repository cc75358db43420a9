"""A coordinator in the middle of a run that waits for no device, driven message by message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.asynchronous.options import Asynchronous, check_asynchronous
from coordinator.rounds.asynchronous.snapshot import Snapshot
from coordinator.rounds.asynchronous.training import Rules, begin_training
from coordinator.runtime.exchange.updates_and_test import UpdatesAndTest
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.strategies.base import State
from coordinator.strategies.registry import make_method
from edge_client.protocol.blocks import Manifest
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, SAMPLES, WiredCoordinator

DEADLINE_S, ROUND = 300.0, 2


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@dataclass
class UpdatesRun:
    """A coordinator in round 2 of a run that waits for no device; those in `online` are connected."""

    coordinator: WiredCoordinator
    clock: VirtualClock
    options: Asynchronous
    online: set[str] = field(default_factory=lambda: set(DEVICES))
    newcomers: bool = False
    live: UpdatesAndTest = field(init=False)

    def begin(self) -> None:
        made, fleet = self.coordinator, dict.fromkeys(DEVICES, SAMPLES)
        context, start = made.context, made.context.prepared.initial
        self.rules = Rules(
            strategy=check_asynchronous(make_method("fedavg"), fleet),
            options=self.options,
            schema=context.prepared.program.schema,
            fleet=fleet,
            seed=0,
        )
        self.live = UpdatesAndTest(
            "run1", context, is_online=lambda who: who in self.online, newcomers=lambda: self.newcomers
        )
        made.dispatcher.exchange.live = self.live
        training = begin_training(State(centers=start[None].astype(np.float64), extra={"start": start}))
        self.live.updates.open_round(ROUND, Snapshot(training), self.rules, context)
        self.live.begin()

    def next_round(self) -> None:
        state = self.live.updates.journalled
        context = self.coordinator.context
        self.live.updates.open_round(state.round + 1, Snapshot(state.training, state.rounds), self.rules, context)
        self.live.begin()

    def said(self) -> list[tuple[str, dict[str, Any]]]:
        return self.coordinator.said()

    def told(self) -> list[tuple[str, str, str]]:
        """(device, kind, status or code) since the last call."""
        return [(cid, m["k"], m.get("status", m.get("code", ""))) for cid, m in self.said()]

    def tasks(self) -> dict[str, dict[str, Any]]:
        return {cid: message for cid, message in self.said() if message["k"] == "task"}

    def key_of(self, task: dict[str, Any]) -> ExchangeKey:
        return ExchangeKey(task["run"], task["round"], task["exchange"])

    def announce(self, task: dict[str, Any], cid: str) -> None:
        """The update of a task; all tasks of these tests begin at the initial model."""
        manifest, _ = self.coordinator.update(ExchangeKey("run1", ROUND, 0), cid, 0)
        self.offer(task, cid, manifest)

    def offer(self, task: dict[str, Any], cid: str, update: Manifest) -> None:
        about = {**self.key_of(task)._asdict(), "attempt": 0, "n": SAMPLES, "seconds": 1.0}
        self.coordinator.hear(cid, "rdy", **about, what=update.kind, update=update)

    def refuse(self, cid: str, re: str, code: str, **more: Any) -> None:  # noqa: ANN401 - fields
        self.coordinator.hear(cid, "nack", re=re, code=code, **more)

    def steps(self, number: int = ROUND) -> list[str]:
        return [step.what for step in self.coordinator.store.journal.steps("run1", number)]


Begun = Callable[..., UpdatesRun]


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Begun]:
    made: list[WiredCoordinator] = []

    def begin(
        *, ballast: int = 0, free: int = 4, concurrency: int = 2, buffer: int = 4, staleness: int = 5
    ) -> UpdatesRun:
        clock = VirtualClock()
        coordinator = WiredCoordinator(tmp_path, clock, ballast, free)
        made.append(coordinator)
        options = Asynchronous(concurrency=concurrency, buffer=buffer, max_staleness=staleness)
        run = UpdatesRun(coordinator, clock, options)
        run.begin()
        return run

    yield begin
    for each in made:
        each.store.close()
