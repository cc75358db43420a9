"""The event loop: broker events one after another, and what is due between them.

Other threads act on it through `Controls`; the loop honours them where nothing is half done.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from coordinator.runtime.block_server import BlockServer
from coordinator.runtime.dispatcher import Dispatcher
from coordinator.runtime.exchange.current_exchange import Live
from coordinator.runtime.sender import CoordinatorSender
from coordinator.runtime.status_reporter import StatusReporter
from coordinator.storage.exchange_store import ExchangeKey
from edge_client.errors import NetworkError
from edge_client.transport.base import Connected, Disconnected, Message, Transport
from edge_client.transport.clock import Clock

log = logging.getLogger(__name__)
T = TypeVar("T")

PACKET_ROOM_BYTES = 512  # of a packet, beside the block: its header and topic
MAX_WAIT_S = 1.0  # the longest wait of the event loop
MAX_UNSYNCED_S = 0.1  # an update waits so long for others, while messages come without a pause
MANY_CUTS, SHORT_S = 10, 60.0  # with the pauses before each new connection they take about five minutes
MOST_CUTS = 10 * MANY_CUTS  # while parts arrive, which a device may ask for again and again: in all about an hour
MOST_NAMES = 5  # of devices in a message
MAX_LATE_S = 10.0  # a wait that ends later than that was interrupted; a busy machine is less late


def lost_broker(reason: str, block: int) -> str:
    """What is said of a connection that the broker cut, and what to do where connecting again does not help."""
    told, least = reason.lower(), block + PACKET_ROOM_BYTES
    if "too large" in told:
        why, option = "it does not take a block", "max_packet_size"
    elif told == "protocol error":  # mosquitto's, of a message beyond its message_size_limit
        why, option = "it may take no message as large as a block", "message_size_limit (0: none)"
    else:
        return f"the broker is gone ({reason}); connecting again"
    return (
        f"the broker is gone ({reason}): {why}. Set its {option} to {least} or more, "
        "or `block` in the coordinator's file to less; connecting again"
    )


@dataclass(frozen=True, kw_only=True)
class ExchangePlace:
    """How far the open exchange is: what has been answered, how many parts of models and answers have arrived.

    `waits_for` names the devices that have not answered.
    """

    answers: object
    parts: object
    waits_for: Sequence[str] = ()


class ShortConnections:
    """Connections that the broker cut soon, one after another, while no part of a model or of an answer arrived.

    No deadline runs while there is no broker, so nothing else would end a run whose broker cuts it at each block. A
    device can let parts arrive without an end: so MOST_CUTS without an answer are too many, whatever arrived.
    """

    def __init__(self) -> None:
        self._began_s = -math.inf
        self._parts: tuple[object, int] = (None, 0)  # where the exchange is, and how many were cut there
        self._answers: tuple[object, int] = (None, 0)

    def begin(self, now_s: float) -> None:
        self._began_s = now_s

    def cut(self, now_s: float, place: ExchangePlace | None, reason: str) -> None:
        """One was cut; `place` is None without an exchange. Raises NetworkError after MANY_CUTS or MOST_CUTS."""
        if place is None or now_s >= self._began_s + SHORT_S:
            self._parts = self._answers = (None, 0)
            return
        self._parts = _one_more(self._parts, (place.answers, place.parts))
        self._answers = _one_more(self._answers, place.answers)
        if self._parts[1] < MANY_CUTS and self._answers[1] < MOST_CUTS:
            return
        count, what = self._parts[1], "part of a model or of an answer"
        if count < MANY_CUTS:
            names = ", ".join(place.waits_for[:MOST_NAMES])
            more = len(place.waits_for) - MOST_NAMES
            left = names + (f" and {more} more" if more > 0 else "")
            count, what = self._answers[1], f"answer of {left or 'a device'}"
        raise NetworkError(
            f"the broker has cut the connection {count} times, each within {SHORT_S:.0f} s, and no {what} arrived "
            f"meanwhile ({reason})",
            hint="look into the broker's log: does it take no message as large as a `block`, or does another "
            "client have this one's name? Then start again, which continues",
        )


def _one_more(row: tuple[object, int], place: object) -> tuple[object, int]:
    return place, (row[1] if place == row[0] else 0) + 1


class ServerStopped(Exception):
    """The server was asked to stop, and noticed it where nothing is half done."""


class AwakeClock:
    """A clock without the time in which the process was stopped, its machine paused, or its broker away.

    Such a process hears nothing, so this time is not taken from the devices' deadlines. `waited` finds the first two;
    from `stop` until `go_on` the clock stands still.
    """

    def __init__(self, inner: Clock) -> None:
        self._inner, self._slept_s = inner, 0.0
        self._stopped_s: float | None = None

    @property
    def stands_still(self) -> bool:
        return self._stopped_s is not None

    def stop(self) -> None:
        if self._stopped_s is None:
            self._stopped_s = self._inner.now_s()

    def go_on(self) -> None:
        if self._stopped_s is not None:
            self._slept_s += self._inner.now_s() - self._stopped_s
            self._stopped_s = None

    def now_s(self) -> float:
        return (self._inner.now_s() if self._stopped_s is None else self._stopped_s) - self._slept_s

    def unix_ms(self) -> int:
        return self._inner.unix_ms()

    def waited(self, since_s: float, timeout_s: float) -> None:
        """A wait of at most `timeout_s` that began at `since_s` is over; leave out what was much longer."""
        late_s = self.now_s() - since_s - timeout_s
        if late_s > MAX_LATE_S:
            self._slept_s += late_s


@dataclass
class Controls:
    """What other threads ask of the server."""

    stopping: bool = False
    paused: bool = False
    closing: ExchangeKey | None = None  # the exchange to close now
    worker: threading.Thread | None = None  # the last thread with slow work


@dataclass(frozen=True, kw_only=True)
class EventLoop:
    """One thread that takes events from the transport. It and its parts carry the epoch of one lead."""

    transport: Transport
    clock: AwakeClock
    sender: CoordinatorSender
    downloads: BlockServer
    dispatcher: Dispatcher
    status: StatusReporter
    controls: Controls
    connections: ShortConnections = field(default_factory=ShortConnections)

    def run_until(self, done: Callable[[], bool], until_s: float = math.inf) -> bool:
        """Take events until `done`; -> False when `until_s` came first. Raises ServerStopped."""
        while not done():
            if self.controls.stopping:
                raise ServerStopped
            live, now_s = self.dispatcher.exchange.live, self.clock.now_s()
            self.status.tick()
            self.dispatcher.tick()
            if now_s >= until_s:
                return False
            if live is not None and live.key == self.controls.closing:
                self.controls.closing = None
                live.close()
                continue
            if live is not None and now_s >= live.wakes_at_s and not self.clock.stands_still:
                live.tick()
                continue
            wake_s = min(until_s, now_s + MAX_WAIT_S, math.inf if live is None else live.wakes_at_s)
            since_s = self.dispatcher.exchange.unsynced_since_s
            wait_s = MAX_WAIT_S if self.clock.stands_still else min(wake_s, self.downloads.wakes_at_s) - now_s
            came = self._take(0.0 if since_s < math.inf else wait_s)
            if not came or self.clock.now_s() >= since_s + MAX_UNSYNCED_S:
                self.dispatcher.exchange.sync()
            self.downloads.send_due()
            if not came and not self.downloads.has_waiting:
                self.dispatcher.exchange.on_quiet()
        return True

    def run_beside(self, work: Callable[[], T]) -> T:
        """Do slow work in a thread of its own and take events meanwhile. Raises what it raises, and ServerStopped."""
        found: list[T] = []
        wrong: list[BaseException] = []

        def run() -> None:
            try:
                found.append(work())
            except BaseException as error:  # noqa: BLE001 - raised again in the thread of the loop
                wrong.append(error)
            finally:
                self.transport.wake()

        name = threading.current_thread().name  # what it shows is of the same federation
        self.controls.worker = threading.Thread(target=run, name=name, daemon=True)
        self.controls.worker.start()
        self.run_until(lambda: bool(found or wrong))
        if wrong:
            raise wrong[0]
        return found[0]

    def run_until_closed(self, live: Live) -> None:
        """Take events until the exchange is closed."""
        self.dispatcher.exchange.live = live
        self.status.write("asking")
        self.run_until(lambda: live.closed)
        self.status.notify()
        self.dispatcher.exchange.end()
        self.status.write("aggregating")

    def wait_while_paused(self) -> None:
        """Take events until the pause is over; return at once without one."""
        if self.controls.paused:
            self.status.write("paused")
            self.run_until(lambda: not self.controls.paused)

    def _take(self, timeout_s: float) -> bool:
        """Handle the next event; -> False when none came."""
        began_s, timeout_s = self.clock.now_s(), max(0.0, timeout_s)
        event = self.transport.receive(timeout_s)
        self.clock.waited(began_s, timeout_s)
        if isinstance(event, Message):
            self.dispatcher.dispatch(event, more=True)
        elif isinstance(event, Connected):
            self._on_connected()
        elif isinstance(event, Disconnected):
            log.warning("%s", lost_broker(event.reason, self.sender.block))
            self.connections.cut(self.clock.now_s(), self._place(), event.reason)
            self.clock.stop()
            self.status.tell_broker(here=False)
        return event is not None

    def _place(self) -> ExchangePlace | None:
        """How far the open exchange is; None without one."""
        if (live := self.dispatcher.exchange.live) is None:
            return None
        found = live.progress()
        updates = found.get("updates", {})
        return ExchangePlace(
            answers=(live.key, found["answered"], updates.get("counted"), updates.get("test")),  # without rounds
            parts=(self.dispatcher.blocks_up, self.downloads.arrived),
            waits_for=sorted({*found["uploading"], *found["waiting"], *found["open"]}),
        )

    def _on_connected(self) -> None:
        """The broker has forgotten this connection, and maybe every retained message: send everything again."""
        self.clock.go_on()
        self.connections.begin(self.clock.now_s())
        if self.sender.link:
            log.warning("the broker is back")
            self.status.tell_broker(here=True)
        self.dispatcher.begin_link()
        self.sender.subscribe()
        self.sender.link += 1  # devices that came meanwhile announce themselves again
        self.sender.publish_record(online=True)
        self.dispatcher.catalog.publish_again()
        if self.dispatcher.exchange.live is not None:
            self.dispatcher.exchange.live.begin()
