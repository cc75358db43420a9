"""The devices that train: enrolled at the first start, and joined between rounds by those that come later.

The fleet grows only before a round whose tasks are not stored, and while no other round is under way. So a replay asks
the devices that were asked before, and a restarted coordinator continues with the same fleet. So does the training
program, which is compiled for the engines that the devices ask for. A replay of an earlier round, whose state was
damaged, has the fleet of that round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from coordinator.rounds.sample_weights import MAX_SAMPLES_RATIO, weighed_fleet
from coordinator.runtime.presence import DevicePresence, FleetPresence
from coordinator.storage.event_log import EventLog
from coordinator.storage.store import Store
from coordinator.strategies.base import Fleet
from edge_client.protocol.task import ClientId


class TrainingFleet:
    """`members`: (announced training samples, engine) of each enrolled device.

    `engines` are those that the program may be compiled for, and `compile_for` makes it have some of them.
    """

    def __init__(
        self,
        store: Store,
        presence: FleetPresence,
        engines: Collection[str],
        event_log: EventLog,
        compile_for: Callable[[Collection[str]], object],
        *,
        max_samples_ratio: float = MAX_SAMPLES_RATIO,
    ) -> None:
        self.members = dict(store.states.enrolled())
        self._joined, self._ended = dict[ClientId, float](store.states.let_in()), store.states.ended()
        self.engines, self._compile_for = engines, compile_for
        self._max_samples_ratio = max_samples_ratio
        self._store, self._presence, self._event_log = store, presence, event_log
        self._named: set[ClientId] = set()  # devices of which `left-out` was logged
        self._others = 0  # devices with another engine, when they were last looked at

    def ended(self, run: str) -> int:
        """How many rounds of a run had ended when this process began."""
        return len(self._ended.get(run, ()))

    def members_of(self, run: str, number: int) -> dict[ClientId, tuple[int, str]]:
        """The members that round `number` of `run` has, sorted by device: not those that joined after its end."""
        ended = self._ended.get(run, ())[number - 1 : number]
        return {c: facts for c, facts in sorted(self.members.items()) if not ended or self._joined.get(c, 0) < ended[0]}

    def fleet_of(self, run: str, number: int) -> Fleet:
        """The training samples that count of each of them (sample_weights.py)."""
        return weighed_fleet({cid: n for cid, (n, _) in self.members_of(run, number).items()}, self._max_samples_ratio)

    def ready(self) -> dict[ClientId, DevicePresence]:
        """The devices that can train now, members or not. A device that cannot is logged once, with the reason."""
        for cid, device in self._presence.devices.items():
            if device.is_online and device.n > 0 and device.engine not in self.engines and cid not in self._named:
                self._named.add(cid)
                why = f"the program is not for {device.engine}; it is for {', '.join(self.engines)}"
                self._event_log.note("left-out", device=cid, why=why)
        return self._presence.ready(self.engines)

    def count_ready(self) -> int:
        """How many can train now. It is asked after each message, and goes over the fleet for a left-out one only."""
        here, others = self._presence.count_ready(self.engines)
        if others != self._others:
            self._others = others
            self.ready()
        return here

    def compile_program(self) -> None:
        """Compile the program for each engine that is asked for: of members, and of devices that are ready now."""
        asked: set[str] | None = None
        while (now := self._asked_engines()) != asked:  # a device with another engine may come meanwhile
            self._compile_for(sorted(now))
            asked = now

    def is_asked_for(self) -> bool:
        """Whether a device is here that needs the program: to train, or to know what samples it may collect."""
        return bool(self._asked_engines())

    def _asked_engines(self) -> set[str]:
        """An engine that fails on its device needs a replacement, and any may be the one that works there.

        A device without samples counts: a phone's page learns from the program what its user can add.
        """
        here = [device for device in self._presence.devices.values() if device.is_online and device.n > 0]
        if not all(device.able for device in here):
            return set(self.engines)
        online = {device.engine for device in self._presence.devices.values() if device.is_online}
        asked = {engine for _, engine in self.members.values()} | online
        return asked & set(self.engines)

    def enrol(self) -> None:
        """Enrol everyone who is ready, at the first start."""
        self.compile_program()
        self._enrol(self.ready(), [])

    def let_in(self, run: str, number: int) -> Fleet:
        """Enrol the devices that came since the last round, before round `number` of `run` begins; -> the fleet."""
        self.compile_program()
        new = {cid: device for cid, device in self.ready().items() if cid not in self.members}
        if new:
            when = {"unix_ms": self._event_log.unix_ms(), "run": run, "round": number}
            events: list[dict[str, object]] = [
                {"event": "let-in", "device": cid, "engine": device.engine, "n": device.n, **when}
                for cid, device in new.items()
            ]
            self._enrol(new, events)
            self._joined |= dict.fromkeys(new, math.inf)  # after all rounds that are played again
            for event in events:
                self._event_log.append_stored(event)
        return self.fleet_of(run, number)

    def _enrol(self, devices: Mapping[ClientId, DevicePresence], events: list[dict[str, object]]) -> None:
        rows = {cid: (device.n, device.engine) for cid, device in devices.items()}
        self._store.states.enrol(rows, events)
        self.members.update(rows)
