"""What the federation does now, as devices read it in the retained record: who is waited for, which round it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coordinator.artifacts.finished_run import make_strategy
from coordinator.config import CoordinatorConfig
from coordinator.runtime.sender import CoordinatorSender
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.strategies.base import takes_newcomers

INTERVAL_S = 1.0  # the shortest time between two records that differ in a number only
RECORDS_PER_S = 250.0  # of such, to all devices together: each of them receives every record, and checks its signature


class StateAnnouncer:
    """Publishes the record when its state has changed; changes of a number are gathered, the longer the more `devices`.

    While n devices come, each would otherwise receive a record for every second that the others take.
    """

    def __init__(self, sender: CoordinatorSender, devices: Callable[[], int] = lambda: 0) -> None:
        self._sender, self._clock, self._due_s, self._devices = sender, sender.clock, 0.0, devices
        self._wanted: Mapping[str, Any] | None = None

    @property
    def state(self) -> Mapping[str, Any]:
        """The newest state, published or not; empty before the first."""
        return self._wanted or {}

    def set(self, doing: str, newcomers: str, **numbers: Any) -> None:  # noqa: ANN401 - as in PROTOCOL.md, `coord`
        """The federation does this now. `newcomers`: when a device takes part that is not enrolled."""
        before, self._wanted = self.state, {"doing": doing, "newcomers": newcomers, **numbers}
        if any(before.get(name) != self._wanted.get(name) for name in ("doing", "newcomers", "run")):
            self._due_s = 0.0
        self.tick()

    def tick(self) -> None:
        """Publish what is due."""
        now_s = self._clock.now_s()
        if self._wanted != self._sender.state and now_s >= self._due_s:
            self._sender.state, self._due_s = self._wanted, now_s + max(INTERVAL_S, self._devices() / RECORDS_PER_S)
            self._sender.publish_record(online=True)


def training_state(key: ExchangeKey, config: CoordinatorConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a state `train`; `names` are the runs' names by their ids."""
    place = [run.name for run in config.runs].index(names[key.run])
    run = config.runs[place]
    grows = takes_newcomers(make_strategy(run, config)) and key.round < run.rounds
    newcomers = "next-round" if grows else "next-run" if place + 1 < len(config.runs) else "no"
    numbers = {"round": min(key.round, run.rounds), "of": run.rounds}
    return {"newcomers": newcomers, "run": key.run, "name": run.name, **numbers}
