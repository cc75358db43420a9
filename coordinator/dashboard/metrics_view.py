"""What the page shows of a federation: the events of metrics.jsonl and the server's status, reduced to bounded JSON.

`DashboardView.event` and `DashboardView.status` take in what happened and give what a page that knows all before must
still be told, as (kind, data); `DashboardView.snapshot` is all of it. The same events give the same page, live or read
from a file. Bounded: the newest EVENTS events, the rounds that round_history.py keeps, MAX_RUNS runs. No clock, no
thread, no network.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from coordinator.dashboard.device_grid import DEVICE_STATES, device_states, late_devices
from coordinator.dashboard.round_history import RunHistory
from edge_client.protocol.task import ClientId

MAX_EVENTS = 300
MAX_RUNS = 32
MAX_DEVICES = 20_000
Messages = list[tuple[str, Any]]
_NUMBER = {state: number for number, state in enumerate(DEVICE_STATES)}
_QUIET = "round"  # has a table and charts of its own


class DashboardView:
    """One federation. `now` is what goes on; `histories` the runs by name; `devices` the numbers of the devices."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {"phase": "not started", "paused": False, "connected": 0, "exchange": None}
        self.histories: dict[str, RunHistory] = {}
        self.devices: dict[ClientId, int] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.facts: dict[str, Any] = {}  # federation, epoch, model, files
        self._engine: list[str] = []
        self._samples: list[int] = []
        self._state: list[int] = []
        self._refused: dict[ClientId, list[dict[str, Any]]] = {}
        self._late: frozenset[ClientId] = frozenset()
        self._closed: tuple[str, int, int] | None = None

    # -- taking in

    def event(self, event: Mapping[str, Any]) -> Messages:
        """One event of metrics.jsonl."""
        kind = event["event"]
        told: Messages = []
        if kind == "joined":
            told += self._known([event["device"]])
            number = self.devices.get(event["device"])
            if number is not None:
                self._engine[number], self._samples[number] = event["engine"], event["n"]
                told.append(("fleet", {"facts": [[number, event["engine"], event["n"]]]}))
        elif kind == "round":
            told += self._round(event)
        else:
            told += self._other(event)
        if kind != _QUIET:
            told.append(("event", self._noted(_short(event))))
        return told

    def status(self, seen: Mapping[str, Any]) -> Messages:
        """What the server tells of itself (Server.observe)."""
        exchange = seen["exchange"]
        if exchange is not None:
            key = exchange["run"], exchange["round"], exchange["exchange"]
            if exchange["closed"] and key != self._closed:
                self._closed, self._late = key, late_devices(exchange, self._late)
        now = {
            "phase": seen["phase"],
            "paused": seen["paused"],
            "unix_ms": seen["unix_ms"],
            "connected": seen["connected"],
            "bytes": seen["bytes"],
            "exchange": None if exchange is None else self._exchange(exchange, seen["names"]),
        }
        told = self._known(seen["presence"])
        doing = device_states(seen["presence"], exchange, self._late)
        changed: dict[int, list[int]] = {}
        for cid, state in doing.items():
            number, code = self.devices.get(cid), _NUMBER[state]
            if number is not None and self._state[number] != code:
                self._state[number] = code
                changed.setdefault(code, []).append(number)
        if changed:
            told.append(("fleet", {"states": [[code, numbers] for code, numbers in sorted(changed.items())]}))
        if {**now, "unix_ms": 0} != {**self.now, "unix_ms": 0}:
            told.append(("now", now))
        self.now = now
        return told

    def _round(self, event: Mapping[str, Any]) -> Messages:
        told = self._known([*event["assignment"], *event["per_device"]])
        history = self.histories.get(event["run"])
        if history is None:
            if len(self.histories) >= MAX_RUNS:
                return told
            history = self.histories[event["run"]] = RunHistory(event["run"], event["method"], event["of"])
        here = self.devices.keys()
        known = {key: {c: v for c, v in event[key].items() if c in here} for key in ("assignment", "per_device")}
        line = history.add({**event, **known}, self.devices)
        for cid, reason in event.get("refused", {}).items():
            if cid in here:
                past = self._refused.setdefault(cid, [])
                past.append({"run": event["run"], "round": event["round"], "reason": str(reason)[:300]})
                del past[:-20]
        about = {"run": history.name, "method": history.method, "of": history.of}
        return [*told, ("round", {**about, "line": line, "centers": history.centers(len(self.devices))})]

    def _noted(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line as it is shown: devices that join one after another share one."""
        last = self.events[-1] if self.events else {}
        if line["event"] == "joined" == last.get("event"):
            self.events.pop()
            line["devices"] = last.get("devices", 1) + 1
        self.events.append(line)
        return line

    def _other(self, event: Mapping[str, Any]) -> Messages:
        kind = event["event"]
        if kind == "start":
            self.facts |= {"federation": event["federation"], "epoch": event["epoch"]}
        elif kind == "program":
            self.facts["model"] = event["model"]
        elif kind in ("bundle", "done"):
            self.facts[kind] = True
        return [("facts", dict(self.facts))]

    def _known(self, cids: Iterable[ClientId]) -> Messages:
        """Number the devices that are new, as long as there is room."""
        new = [cid for cid in dict.fromkeys(cids) if cid not in self.devices]
        new = sorted(new)[: max(0, MAX_DEVICES - len(self.devices))]
        for cid in new:
            self.devices[cid] = len(self.devices)
            self._engine.append("")
            self._samples.append(0)
            self._state.append(_NUMBER["away"])
        return [("fleet", {"new": new})] if new else []

    def _exchange(self, exchange: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        counts = {group: len(exchange[group]) for group in ("answered", "uploading", "waiting", "refused", "open")}
        same = {key: exchange[key] for key in ("round", "exchange", "asked", "wanted", "quorum", "left_s", "closed")}
        return {**same, **counts, "id": exchange["run"], "run": names.get(exchange["run"], exchange["run"])}

    # -- giving out

    def snapshot(self) -> dict[str, Any]:
        """Everything that a page needs to begin with, as JSON."""
        return {
            "now": self.now,
            "facts": self.facts,
            "states": list(DEVICE_STATES),
            "fleet": {
                "ids": list(self.devices),
                "engine": self._engine,
                "samples": self._samples,
                "state": self._state,
            },
            "runs": [
                {
                    "run": one.name,
                    "method": one.method,
                    "of": one.of,
                    "lines": list(one.lines),
                    "centers": one.centers(len(self.devices)),
                }
                for one in self.histories.values()
            ],
            "events": list(self.events),
        }

    def newest(self, run: str) -> int | None:
        """The last round of a run that is over, or None."""
        lines = self.histories[run].lines if run in self.histories else ()
        return int(lines[-1]["round"]) if lines else None

    def grid(self, run: str) -> dict[str, Any] | None:
        """The picture of a run's assignments, or None."""
        return self.histories[run].grid(list(self.devices)) if run in self.histories else None

    def device(self, cid: str) -> dict[str, Any] | None:
        """All about one device, or None."""
        number = self.devices.get(cid)
        if number is None:
            return None
        return {
            "id": cid,
            "engine": self._engine[number],
            "samples": self._samples[number],
            "state": DEVICE_STATES[self._state[number]],
            "runs": {name: one.of_device(number) for name, one in self.histories.items()},
            "refused": self._refused.get(cid, []),
        }


def replay_events(lines: Iterable[str]) -> DashboardView:
    """The view after these lines of metrics.jsonl."""
    view = DashboardView()
    for line in lines:
        if line.strip():
            view.event(json.loads(line))
    return view


def _short(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event without its long parts: at most 2,000 characters as JSON."""
    kept: dict[str, Any] = {}
    for key, value in event.items():
        kept[key] = value if len(json.dumps(value)) <= 200 else "..."  # noqa: PLR2004 - a line, not a table
    return dict(list(kept.items())[:10])
