"""Virtual time for whole processes: each is a thread, only one runs at any moment, and time passes when all wait.

A minute of silence costs nothing, and every run is the same. A participant can be killed at any of its waits; from that
moment nothing of it reaches the broker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from edge_client.transport.base import Event, WillSource
from tests.support.memory_broker import MemoryBroker


class Killed(BaseException):
    """What a SIGKILL is to the code that it hits: the end, and nothing is caught."""


class VirtualClock:
    """Seconds since the world began."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def unix_ms(self) -> int:
        return 1_700_000_000_000 + int(self.time_s * 1000)


@dataclass(eq=False)
class Participant:
    """One process: its thread, and what it waits for."""

    name: str
    world: VirtualWorld
    life: Callable[[Participant], None]
    transports: list[VirtualTransport] = field(default_factory=list)
    waiting: VirtualTransport | None = None
    wake_s: float = 0.0
    woken: bool = False
    event: Event | None = None
    doomed: bool = False
    ended: bool = False
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._live, name=self.name, daemon=True)
        self.thread.start()

    def _live(self) -> None:
        self.turn.acquire()
        try:
            if not self.doomed:
                self.life(self)
        except BaseException as wrong:  # noqa: BLE001 - shown by the test that cares
            self.error = wrong
        finally:
            self.ended = True
            self.world.baton.release()

    def vanish(self) -> None:
        """Nothing of this process reaches the broker any more; its will is published."""
        self.doomed = True
        for transport in self.transports:
            transport.kill()

    def ready(self) -> bool:
        """Whether it has something to do now."""
        if self.waiting is not None and self.event is None:
            self.event = self.waiting.poll()
        return self.doomed or self.woken or self.event is not None or self.world.clock.time_s >= self.wake_s

    def wait(self, transport: VirtualTransport, timeout_s: float) -> Event | None:
        """Called in the participant's own thread: give the turn away until something comes."""
        self.waiting, self.wake_s = transport, self.world.clock.time_s + timeout_s
        self.world.baton.release()
        self.turn.acquire()
        self.waiting, self.woken = None, False
        if self.doomed:
            raise Killed
        event, self.event = self.event, None
        return event


class VirtualTransport:
    """A transport of the memory broker whose waits take virtual time."""

    def __init__(self, participant: Participant, broker: MemoryBroker, client_id: str, will: WillSource) -> None:
        self._inner, self._broker, self._client_id = broker.client(client_id, will), broker, client_id
        self._participant, self._open = participant, False
        participant.transports.append(self)

    def connect(self) -> None:
        self._inner.connect()
        self._open = True

    def subscribe(self, *filters: str, as_published: bool = False) -> None:
        self._inner.subscribe(*filters, as_published=as_published)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self._inner.publish(topic, payload, retain=retain)

    def drain(self, most: int, timeout_s: float) -> bool:
        return self._inner.drain(most, timeout_s)

    def receive(self, timeout_s: float) -> Event | None:
        event = self._inner.receive(0.0)
        if event is not None or timeout_s <= 0:
            return event
        return self._participant.wait(self, timeout_s)

    def poll(self) -> Event | None:
        return self._inner.receive(0.0)

    def wake(self) -> None:
        self._participant.woken = True

    def close(self) -> None:
        self._open = False
        self._inner.close()

    def kill(self) -> None:
        if self._open:
            self._open = False
            self._broker.kill(self._client_id)


class VirtualWorld:
    """The participants of one test, and the virtual time."""

    opened: ClassVar[list[VirtualWorld]] = []  # by the test that runs now, which `end_worlds` ends

    def __init__(self, folder: Path, *, broker: MemoryBroker | None = None) -> None:
        self.opened.append(self)
        self.folder, self.broker, self.clock = folder, broker or MemoryBroker(), VirtualClock()
        self.baton = threading.Semaphore(0)
        self.participants: dict[str, Participant] = {}

    def begin(self, name: str, life: Callable[[Participant], None]) -> Participant:
        """Start a process; one of the same name must have ended."""
        self.participants[name] = participant = Participant(name, self, life)
        return participant

    def run(self, until: Callable[[], bool], *, limit_s: float = 3_600.0) -> None:
        """Give turns until `until`; fails when all participants have ended or the virtual time limit is over."""
        end_s = self.clock.time_s + limit_s
        while not until():
            for participant in self.participants.values():
                if participant.error is not None and not participant.doomed:
                    participant.doomed = True  # told once; a test that expects it goes on
                    raise participant.error
            alive = [p for _, p in sorted(self.participants.items()) if not p.ended]
            if not alive or self.clock.time_s > end_s:
                raise AssertionError(f"it did not happen within {limit_s:g} s of virtual time")
            ready = [p for p in alive if p.ready()]
            if not ready:
                self.clock.time_s = min(p.wake_s for p in alive)
            for participant in ready[:1]:
                participant.turn.release()
                self.baton.acquire()

    def kill(self, name: str) -> None:
        """SIGKILL while it waits."""
        participant = self.participants[name]
        participant.vanish()
        self.run(lambda: participant.ended)

    def end(self) -> None:
        """Kill the participants that have not ended."""
        for name, participant in sorted(self.participants.items()):
            if not participant.ended:
                self.kill(name)


@pytest.fixture(autouse=True)
def end_worlds() -> Iterator[None]:
    """Kill the participants that a test has left in its virtual worlds."""
    yield
    while VirtualWorld.opened:
        VirtualWorld.opened.pop().end()
