"""Where the dashboard's numbers come from: events of metrics.jsonl and the server's status, reduced to bounded JSON.

`DashboardView.event` and `DashboardView.status` take in a change and return the messages (kind, data) that bring an
open page up to date; `DashboardView.snapshot` is the whole state, with which a page begins. The same events give the
same page, live or replayed from the file. Bounded: MAX_EVENTS events, MAX_RUNS runs, MAX_DEVICES devices, and the
rounds that round_history.py keeps. No clock, no thread, no network.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

from coordinator.dashboard.device_states import DEVICE_STATES, device_states, late_devices
from coordinator.dashboard.round_history import NO_CENTER, RunHistory
from coordinator.rounds.round_record import RoundRecord, upgraded_record
from edge_client.protocol.task import ClientId

MAX_EVENTS = 300
MAX_RUNS = 32
MAX_DEVICES = 20_000
Messages = list[tuple[str, Any]]
_NUMBER = {state: number for number, state in enumerate(DEVICE_STATES)}


class DashboardView:
    """One federation. `now` is its status, `histories` its runs by name, `devices` the index of each device."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {"phase": "not started", "paused": False, "connected": 0, "exchange": None}
        self.histories: dict[str, RunHistory] = {}
        self.devices: dict[ClientId, int] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.facts: dict[str, Any] = {}  # federation, epoch, model, when it began and ended, how long it was off
        self._last_ms = 0  # the time of the newest event
        self._engine: list[str] = []
        self._samples: list[int] = []
        self._state: list[int] = []
        self._heard: list[int] = []  # unix time in seconds; 0: not heard since the coordinator started
        self._refusals: list[int] = []
        self._fetched: list[int] = []  # the center whose file a device took last; NO_CENTER for none
        self._refused: dict[ClientId, list[dict[str, Any]]] = {}
        self._late: frozenset[ClientId] = frozenset()
        self._closed: tuple[str, int, int] | None = None

    # -- input

    def event(self, event: Mapping[str, Any]) -> Messages:
        """Take in one event of metrics.jsonl; -> messages for open pages."""
        kind = event["event"]
        messages: Messages = []
        if kind in ("joined", "offers"):
            messages += self._add_devices([event["device"]])
            messages += self._describe({event["device"]: (event["engine"], event["n"])})
        elif kind == "round":
            messages += self._round(cast("RoundRecord", upgraded_record(event)))
        elif kind == "served":
            messages += self._fetch(event["device"], event["center"])
        else:
            messages += self._update_facts(event)
        self._last_ms = max(self._last_ms, event.get("unix_ms", 0))
        if kind != "round":  # a round has a table and charts instead of a line in the log
            messages.append(("event", self._log(_short(event))))
        return messages

    def status(self, status: Mapping[str, Any]) -> Messages:
        """Take in the server's status (Server.observe); -> messages for open pages."""
        exchange = status["exchange"]
        if exchange is not None:
            key = exchange["run"], exchange["round"], exchange["exchange"]
            if exchange["closed"] and key != self._closed:
                self._closed, self._late = key, late_devices(exchange, self._late)
        now = {
            "phase": status["phase"],
            "paused": status["paused"],
            "unix_ms": status["unix_ms"],
            "connected": status["connected"],
            "bytes": status["bytes"],
            "since_ms": status["since_ms"],
            "exchange": None if exchange is None else self._exchange(exchange, status["names"]),
        }
        messages = self._add_devices(status["presence"])
        messages += self._describe(status["devices"])
        forgotten = dict.fromkeys(self.devices, "away")  # revoked, or it made room for another one
        states = forgotten | device_states(status["presence"], exchange, self._late)
        changed: dict[int, list[int]] = {}
        for cid, state in states.items():
            number, code = self.devices.get(cid), _NUMBER[state]
            if number is not None and self._state[number] != code:
                self._state[number] = code
                changed.setdefault(code, []).append(number)
        if changed:
            messages.append(("fleet", {"states": [[code, numbers] for code, numbers in sorted(changed.items())]}))
        heard = [[self.devices[c], ms // 1000] for c, ms in status["heard"].items() if c in self.devices]
        if newer := [[number, at] for number, at in heard if at != self._heard[number]]:
            for number, at in newer:
                self._heard[number] = at
            messages.append(("fleet", {"heard": newer}))
        if {**now, "unix_ms": 0} != {**self.now, "unix_ms": 0}:
            messages.append(("now", now))
        self.now = now
        return messages

    def _round(self, event: RoundRecord) -> Messages:
        messages = self._add_devices([*event["assignment"], *event["per_device"]])
        history = self.histories.get(event["run"])
        if history is None:
            if len(self.histories) >= MAX_RUNS:
                return messages
            history = self.histories[event["run"]] = RunHistory(event["run"], event["method"], event["of"])
        here = self.devices.keys()
        known = event.copy()
        known["assignment"] = {c: center for c, center in event["assignment"].items() if c in here}
        known["per_device"] = {c: accuracy for c, accuracy in event["per_device"].items() if c in here}
        line = history.add(known, self.devices)
        messages.append(("round", {**self._newest(history), "line": line, "kept": len(history.lines)}))
        return messages + self._refuse({c: why for c, why in event.get("refused", {}).items() if c in here}, event)

    def _newest(self, history: RunHistory) -> dict[str, Any]:
        """What a page knows of a run beside its lines: the newest center, accuracy and loss of each device."""
        about = {"run": history.name, "method": history.method, "of": history.of, "updates": history.updates}
        return about | {"best": history.best} | history.newest(len(self.devices))

    def _refuse(self, refused: Mapping[ClientId, str], event: RoundRecord) -> Messages:
        """Count the replies of a round that did not count, and log them."""
        if not refused:
            return []
        for cid, reason in refused.items():
            self._refusals[self.devices[cid]] += 1
            past = self._refused.setdefault(cid, [])
            past.append({"run": event["run"], "round": event["round"], "reason": str(reason)[:300]})
            del past[:-20]
        counts = [[self.devices[cid], self._refusals[self.devices[cid]]] for cid in refused]
        first, why = next(iter(refused.items()))
        line = {"event": "refused", "run": event["run"], "round": event["round"], "count": len(refused)}
        line |= {"device": first, "reason": str(why)[:200]}
        return [("fleet", {"refusals": counts}), ("event", self._log(line))]

    def _log(self, line: dict[str, Any]) -> dict[str, Any]:
        """Add a line to the log; devices that join one after another share one line."""
        last = self.events[-1] if self.events else {}
        if line["event"] == "joined" == last.get("event"):
            self.events.pop()
            line["devices"] = last.get("devices", 1) + 1
        self.events.append(line)
        return line

    def _update_facts(self, event: Mapping[str, Any]) -> Messages:
        kind = event["event"]
        if kind == "start":
            self.facts |= {"federation": event["federation"], "epoch": event["epoch"]}
            if event.get("rounds", {}) != self.facts.get("rounds", {}):
                self._begin_again(event.get("rounds", {}))
            self.facts |= {"rounds": event.get("rounds", {}), "needs": event.get("needs")}
            self.facts |= self._count_start(event.get("unix_ms"))
        elif kind == "program":
            self.facts["model"] = event["model"]
        elif kind == "bundle":
            self.facts |= {"bundle": True, "served": event.get("run")}
        elif kind == "done":
            self.facts |= {"done": True, "ended": event.get("unix_ms")}
        return [("facts", dict(self.facts))]

    def _begin_again(self, rounds: Mapping[str, int]) -> None:
        """The runs have another number of rounds: those that had ended go on, and their centers are published again."""
        self._last_ms = self.facts.get("ended") or self._last_ms  # what came later is no time of the runs
        self.facts |= {"done": False, "ended": None, "bundle": False, "served": None}
        for name, of in rounds.items():
            if name in self.histories:
                self.histories[name].of = of

    def _count_start(self, unix_ms: int | None) -> dict[str, Any]:
        """When the first start was, and how long the coordinator was off before it was done, in ms.

        It was off between the newest event and a later start.
        """
        off = self.facts.get("off", 0)
        if unix_ms and self._last_ms and not self.facts.get("done"):
            off += max(0, unix_ms - self._last_ms)
        return {"began": self.facts.get("began", unix_ms), "off": off}

    def _describe(self, devices: Mapping[ClientId, tuple[str, int]]) -> Messages:
        """Take in the engine and the number of training samples of devices, which may change."""
        known = ((self.devices[cid], *facts) for cid, facts in devices.items() if cid in self.devices)
        told = [(i, engine, n or self._samples[i]) for i, engine, n in known]  # one that only asks offers no samples
        changed = [(i, engine, n) for i, engine, n in told if (engine, n) != (self._engine[i], self._samples[i])]
        for i, engine, n in changed:
            self._engine[i], self._samples[i] = engine, n
        return [("fleet", {"facts": [list(facts) for facts in changed]})] if changed else []

    def _fetch(self, cid: ClientId, center: int) -> Messages:
        """Remember which center's file a device took."""
        messages = self._add_devices([cid])
        number = self.devices.get(cid)
        if number is None or self._fetched[number] == center:
            return messages
        self._fetched[number] = center
        return [*messages, ("fleet", {"fetched": [[number, center]]})]

    def _add_devices(self, cids: Iterable[ClientId]) -> Messages:
        """Give new devices an index, up to MAX_DEVICES."""
        new = [cid for cid in dict.fromkeys(cids) if cid not in self.devices]
        new = sorted(new)[: max(0, MAX_DEVICES - len(self.devices))]
        for cid in new:
            self.devices[cid] = len(self.devices)
            self._engine.append("")
            self._samples.append(0)
            self._state.append(_NUMBER["away"])
            self._heard.append(0)
            self._refusals.append(0)
            self._fetched.append(NO_CENTER)
        return [("fleet", {"new": new})] if new else []

    def _exchange(self, exchange: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        counts = {group: len(exchange[group]) for group in ("answered", "uploading", "waiting", "refused", "open")}
        same = {key: exchange[key] for key in ("round", "exchange", "asked", "wanted", "quorum", "left_s", "closed")}
        updates = {"updates": exchange["updates"]} if "updates" in exchange else {}  # a run without rounds
        return {**same, **counts, **updates, "id": exchange["run"], "run": names.get(exchange["run"], exchange["run"])}

    # -- output

    def snapshot(self) -> dict[str, Any]:
        """The whole state, with which a page begins, as JSON."""
        return {
            "now": self.now,
            "facts": self.facts,
            "states": list(DEVICE_STATES),
            "fleet": {
                "ids": list(self.devices),
                "engine": self._engine,
                "samples": self._samples,
                "state": self._state,
                "heard": self._heard,
                "refusals": self._refusals,
                "fetched": self._fetched,
            },
            "runs": [{**self._newest(one), "lines": list(one.lines)} for one in self.histories.values()],
            "events": list(self.events),
        }

    def newest(self, run: str) -> int | None:
        lines = self.histories[run].lines if run in self.histories else ()
        return int(lines[-1]["round"]) if lines else None

    def grid(self, run: str) -> dict[str, Any] | None:
        """RunHistory.grid of a run, or None for an unknown run."""
        return self.histories[run].grid(list(self.devices)) if run in self.histories else None

    def device(self, cid: str) -> dict[str, Any] | None:
        """One device: engine, samples, state, its centers round by round, refused updates; None for an unknown one."""
        number = self.devices.get(cid)
        if number is None:
            return None
        return {
            "id": cid,
            "engine": self._engine[number],
            "samples": self._samples[number],
            "state": DEVICE_STATES[self._state[number]],
            "fetched": None if self._fetched[number] == NO_CENTER else self._fetched[number],
            "runs": {name: one.of_device(number) for name, one in self.histories.items()},
            "refused": self._refused.get(cid, []),
        }


def replay_events(lines: Iterable[str]) -> DashboardView:
    """The view after the given lines of metrics.jsonl."""
    view = DashboardView()
    for line in lines:
        if line.strip():
            view.event(json.loads(line))
    return view


def _short(event: Mapping[str, Any]) -> dict[str, Any]:
    """The first ten values of an event; one longer than 200 characters as JSON is replaced by "..."."""
    kept: dict[str, Any] = {}
    for key, value in event.items():
        kept[key] = value if len(json.dumps(value)) <= 200 else "..."  # noqa: PLR2004 - the docstring says it
    return dict(list(kept.items())[:10])
