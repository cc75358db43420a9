"""What the coordinator does now, for status.json and for an observer such as the dashboard."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from coordinator.runtime.announcer import StateAnnouncer
from coordinator.runtime.dispatcher import Dispatcher
from coordinator.runtime.exchange.current_exchange import Live
from coordinator.runtime.sender import CoordinatorSender
from coordinator.storage.status import NO_BROKER, StatusWriter
from coordinator.storage.store import Store
from edge_client.transport.clock import Clock

OBSERVE_INTERVAL_S = 0.5  # the shortest time between two regular calls of an observer

WAITS_S, MAX_WAITS_S = 30.0, 480.0  # until it is told whom an open exchange waits for; twice as long each time
PAUSE, MAX_PAUSE_S = 9, 8.0  # after a report: as many times as it took, at most so long

EventWatcher = Callable[[Mapping[str, Any]], None]


class StatusReporter:
    """Writes status.json and calls `observe`, where there is one: at once on a change of phase, else regularly.

    `clock` goes on while that of the exchanges stands still; meanwhile the phase that is told is NO_BROKER.

    A report of a large fleet takes long on a busy machine. The next one waits for PAUSE times as long, so that devices
    are answered meanwhile.
    """

    def __init__(  # noqa: PLR0913 - the parts whose numbers it reports
        self,
        writer: StatusWriter,
        *,
        clock: Clock,
        announcer: StateAnnouncer,
        store: Store,
        sender: CoordinatorSender,
        dispatcher: Dispatcher,
        is_paused: Callable[[], bool],
        observe: EventWatcher | None,
        progress: EventWatcher = lambda _: None,
    ) -> None:
        self._writer, self._phase, self.announcer = writer, "starting", announcer
        self.working_on = ""  # the part of the program that is compiled now
        self._clock, self._store, self._sender, self._dispatcher = clock, store, sender, dispatcher
        self._has_broker = True
        self._is_paused, self._observe = is_paused, observe
        self._since_ms = clock.unix_ms()  # the traffic is counted from here on
        self._observe_at_s = math.inf if observe is None else 0.0
        self._quiet_until_s = 0.0
        self._progress = progress
        self._waits_for: tuple[object, int] = (None, 0)  # the open exchange, and how many have answered
        self._tell_at_s, self._tell_again_s = math.inf, WAITS_S

    def tick(self) -> None:
        now_s = self._clock.now_s()
        self.announcer.tick()
        self._tell_of_waiting(now_s)
        if now_s < self._quiet_until_s:
            return
        if now_s >= self._writer.due_s:
            self.write()
        elif now_s >= self._observe_at_s:
            self.notify()
        else:
            return
        end_s = self._clock.now_s()
        self._quiet_until_s = end_s + min(MAX_PAUSE_S, PAUSE * (end_s - now_s))

    def _tell_of_waiting(self, now_s: float) -> None:
        """Say whom an open exchange waits for, when nothing has come for a while; the next time after twice as long."""
        live = self._dispatcher.exchange.live
        # A run without rounds waits for no device.
        if live is None or live.count_answers is None or not self._has_broker:
            self._waits_for = (None, 0)
            return
        now = (live.key, live.count_answers)
        if now != self._waits_for:
            self._waits_for, self._tell_again_s = now, WAITS_S
            self._tell_at_s = now_s + WAITS_S
        elif now_s >= self._tell_at_s:
            self._tell_again_s = min(2 * self._tell_again_s, MAX_WAITS_S)
            self._tell_at_s = now_s + self._tell_again_s
            self._progress(self._waiting(live))

    def _waiting(self, live: Live) -> dict[str, Any]:
        """Which devices an exchange waits for; those that are not connected are called so."""
        found, here = live.progress(), self._dispatcher.fleet.devices
        left = sorted(cid for group in ("open", "unasked", "uploading", "waiting") for cid in found[group])
        away = [cid for cid in left if cid not in here or not here[cid].is_online]
        run = self._store.states.run_names().get(found["run"], found["run"])
        numbers = {"answered": len(found["answered"]), "wanted": found["wanted"], "left_s": found["left_s"]}
        return {"event": "waits-for", "run": run, "round": found["round"], **numbers, "devices": left, "away": away}

    def write(self, phase: str = "") -> None:
        """Report now; an empty `phase` is the one before."""
        self._phase = phase or self._phase
        self._writer.write(self._clock.now_s(), self._told, self._numbers())
        self.notify()

    def tell_broker(self, *, here: bool) -> None:
        """The connection to the broker is lost, or is back."""
        self._has_broker = here
        self.write()

    @property
    def _told(self) -> str:
        """The phase that others are told."""
        return self._phase if self._has_broker or self._phase == "stopped" else NO_BROKER

    def notify(self) -> None:
        """Call the observer, where there is one."""
        if self._observe is None:
            return
        self._observe_at_s = self._clock.now_s() + OBSERVE_INTERVAL_S
        fleet = self._dispatcher.fleet
        presence = {cid: device.state for cid, device in fleet.devices.items()}
        devices = {cid: (device.engine, device.n) for cid, device in fleet.devices.items()}
        names = self._store.states.run_names()
        run = {"phase": self._told, "paused": self._is_paused(), "presence": presence, "names": names}
        self._observe({**self._numbers(), **run, "heard": fleet.heard, "devices": devices})

    def _numbers(self) -> dict[str, Any]:
        live, fleet = self._dispatcher.exchange.live, self._dispatcher.fleet
        online = [device for device in fleet.devices.values() if device.is_online]
        return {
            "unix_ms": self._clock.unix_ms(),
            "since_ms": self._since_ms,
            "federation": self._sender.topics.federation,
            "epoch": self._sender.epoch,
            "working_on": self.working_on,
            **{name: value for name, value in self.announcer.state.items() if name in ("here", "needed")},
            "connected": len(online),
            "without_samples": sum(device.n == 0 for device in online),
            "clients": fleet.clients(),
            "runtimes": fleet.refusals(),
            "bytes": {"down": self._sender.bytes_down, "up": self._dispatcher.bytes_up},
            "exchange": None if live is None else live.progress(),
        }
