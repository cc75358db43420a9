"""Thousands of edge clients in one thread: one selector over all their sockets resumes their generators.

`ClientEventLoop.add` takes a client's generator (`Client.loop`, edge_client/runtime/client.py) and its transport.
`ClientEventLoop.run_once` serves the ready sockets and resumes the clients that have an event or whose timer is due. A
thread for each client is limited to some hundreds of devices by CPython's select and the scheduler; the selector is
limited by the number of open files, of which a device needs two. The protocol is MQTT 3.1.1.
"""

from __future__ import annotations

import datetime as dt
import heapq
import itertools
import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edge_client.transport.base import Connected, Disconnected, Event, Will
from edge_client.transport.mqtt import (
    BACKOFF_RESET_S,
    SYSTEM_CREDENTIALS,
    PahoSession,
    longest_wait_s,
    parse_url,
)
from edge_client.transport.tls import Credentials, client_context, explain_failure

if TYPE_CHECKING:
    from edge_client.runtime.session import ClientLoop

CONNECT_TIMEOUT_S = 10.0  # for the TCP handshake
CONNACK_TIMEOUT_S = 60.0  # from there to the broker's welcome
MAX_DIALS_PER_TURN = 20  # a handshake is quick, but the listen queue of a broker is short
MAX_OPEN_DIALS = 200  # handshakes under way
WINDOW_POLL_S = 0.2  # a life that waits for acknowledgements looks again
KEEPALIVE_CHECK_S = 1.0  # how often each connection's keepalive is looked at
MAX_TURN_S = 0.02  # of stepping lives, then the sockets are served
MAX_STEPS_PER_TURN = 16  # of one life in a turn: a window of blocks
MAX_SLEEP_S = 0.5  # the longest sleep of the selector
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class LoopTransport:
    """See `Transport`. Never waits: `receive` gives what is there, `drain` says whether it is done."""

    def __init__(
        self, loop: ClientEventLoop, client_id: str, will: Callable[[], Will], credentials: Credentials
    ) -> None:
        self.client_id, self.will, self.credentials = client_id, will, credentials
        self.events: deque[Event] = deque()
        self.session: PahoSession | None = None  # from the TCP handshake on
        self.up_s: float | None = None  # since when the broker knows us
        self.failures = 0
        self.open = 0  # published and not acknowledged
        self.full = False  # a life waits for acknowledgements
        self.closing = False
        self._loop = loop

    def connect(self) -> None:
        self._loop.dial(self, 0.0)

    def subscribe(self, *filters: str, as_published: bool = False) -> None:
        if self.session is not None and self.up_s is not None:
            self.session.subscribe(filters, as_published=as_published)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        if self.session is not None and self.up_s is not None:
            self.open += 1
            self.session.paho.publish(topic, payload, qos=1, retain=retain)

    def drain(self, most: int, timeout_s: float) -> bool:  # noqa: ARG002 - the loop waits
        self.full = self.up_s is not None and self.open > most
        return self.up_s is not None and not self.full

    def receive(self, timeout_s: float) -> Event | None:  # noqa: ARG002 - the loop waits
        return self.events.popleft() if self.events else None

    def wake(self) -> None:
        self._loop.resume_soon(self)

    def close(self) -> None:
        self.closing = True
        self._loop.hang_up(self)


@dataclass(eq=False)
class _LoopMember:
    """One client: its life, and when it wants to be resumed though nothing came."""

    life: ClientLoop
    transport: LoopTransport
    wake_s: float = 0.0
    begun: bool = False
    queued: bool = False  # waits to be resumed
    error: BaseException | None = None
    over: bool = False


@dataclass
class ClientEventLoop:
    """All clients of one process and one broker."""

    url: str
    jitter: Callable[[float, float], float]
    now_s: Callable[[], float] = time.monotonic
    members: dict[LoopTransport, _LoopMember] = field(default_factory=dict)
    connected: int = 0
    reason: str = ""  # why the last connection failed; none did since the last one that was accepted

    def __post_init__(self) -> None:
        self._host, self._port, self._tls = parse_url(self.url)
        self._selector = selectors.DefaultSelector()
        self._ready: deque[_LoopMember] = deque()
        self._due: list[tuple[float, int, _LoopMember]] = []
        self._dials: list[tuple[float, int, LoopTransport]] = []
        self._greeting: dict[LoopTransport, float] = {}  # handshakes under way, and until when
        self._unwritten: set[LoopTransport] = set()
        self._order = itertools.count()
        self._misc_s = 0.0

    def transport(
        self, client_id: str, will: Callable[[], Will], credentials: Credentials = SYSTEM_CREDENTIALS
    ) -> LoopTransport:
        return LoopTransport(self, client_id, will, credentials)

    def add(self, life: ClientLoop, transport: LoopTransport) -> None:
        member = self.members[transport] = _LoopMember(life, transport)
        self._queue(member)

    def run_once(self, timeout_s: float = MAX_SLEEP_S) -> None:
        """Wait at most `timeout_s` for an event, then serve the sockets and resume the clients."""
        now_s = self.now_s()
        self._dial_due(now_s)
        wait_s = 0.0 if self._ready else max(0.0, min(timeout_s, self._next_s() - now_s))
        for key, mask in self._selector.select(wait_s):
            self._serve(key.data, mask)
        self._look_after(self.now_s())
        self._resume(self.now_s())
        self._write()

    def errors(self) -> list[BaseException]:
        return [member.error for member in self.members.values() if member.error is not None]

    def close(self, timeout_s: float) -> None:
        """Disconnect every client, for at most `timeout_s` seconds."""
        for member in self.members.values():
            if not member.over:
                member.over = True
                member.life.close()
        until_s = self.now_s() + timeout_s
        while any(t.session is not None for t in self.members) and self.now_s() < until_s:
            self._write()
            for key, mask in self._selector.select(MAX_SLEEP_S):
                self._serve(key.data, mask)
        self._selector.close()

    # -- what transports ask for

    def dial(self, transport: LoopTransport, in_s: float) -> None:
        """Connect after `in_s` seconds."""
        heapq.heappush(self._dials, (self.now_s() + in_s, next(self._order), transport))

    def hang_up(self, transport: LoopTransport) -> None:
        """Disconnect once every published message is acknowledged; at once where there is no connection."""
        if transport.session is not None and (transport.up_s is None or transport.open == 0):
            transport.session.paho.disconnect()

    def resume_soon(self, transport: LoopTransport) -> None:
        """Resume the client in this turn."""
        if (member := self.members.get(transport)) is not None:
            self._queue(member)

    # -- connections

    def _dial_due(self, now_s: float) -> None:
        for _ in range(MAX_DIALS_PER_TURN):
            if not self._dials or self._dials[0][0] > now_s or len(self._greeting) >= MAX_OPEN_DIALS:
                return
            transport = heapq.heappop(self._dials)[2]
            if not transport.closing:
                self._open(transport, now_s)

    def _open(self, transport: LoopTransport, now_s: float) -> None:
        session = PahoSession(transport.client_id, will=transport.will())
        session.on_up = lambda _: self._up(transport)
        session.on_ack = lambda: self._acknowledged(transport)
        session.on_message = lambda message: self._tell(transport, message)
        session.paho.on_socket_register_write = lambda *_: self._unwritten.add(transport)
        session.paho.on_socket_close = lambda _client, _data, sock: self._closed(transport, session, sock)
        heard: Any = session.paho.on_disconnect

        def ended(*told: Any) -> None:  # noqa: ANN401 - paho's arguments
            """Paho calls this after it closed a socket that broke: only now the session knows why."""
            heard(*told)
            if not transport.closing:
                self.reason = explain_failure(session.reason)[0]

        session.paho.on_disconnect = ended
        transport.session, transport.open = session, 0
        self._greeting[transport] = now_s + CONNACK_TIMEOUT_S
        try:
            if self._tls:
                context = client_context(transport.credentials, dt.datetime.now(dt.timezone.utc))
                session.paho.tls_set_context(context)
            session.connect(self._host, self._port, CONNECT_TIMEOUT_S)
        except OSError as wrong:
            session.reason = explain_failure(wrong, transport.credentials.ca)[0]
            self._gone(transport, session)
            return
        self._selector.register(session.paho.socket(), READ, transport)  # type: ignore[arg-type]  # it is connected

    def _up(self, transport: LoopTransport) -> None:
        if transport.session is not None:
            transport.session.paho.on_log = None  # formats a line for each packet
        self._greeting.pop(transport, None)
        transport.up_s = self.now_s()
        self.connected, self.reason = self.connected + 1, ""
        self._tell(transport, Connected())

    def _closed(self, transport: LoopTransport, session: PahoSession, sock: Any) -> None:  # noqa: ANN401 - plain or TLS
        """Paho calls this before it closes a socket."""
        if sock in self._selector.get_map():
            self._selector.unregister(sock)
        self._gone(transport, session)

    def _gone(self, transport: LoopTransport, session: PahoSession) -> None:
        if transport.session is not session:
            return
        self._greeting.pop(transport, None)
        self._unwritten.discard(transport)
        now_s, up_s = self.now_s(), transport.up_s
        transport.session, transport.up_s, transport.open, transport.full = None, None, 0, False
        if up_s is not None:
            self.connected -= 1
            self._tell(transport, Disconnected(session.reason))
        if not transport.closing:
            self.reason = session.reason
            stable = up_s is not None and now_s - up_s > BACKOFF_RESET_S
            transport.failures = 0 if stable else transport.failures + 1
            self.dial(transport, self.jitter(0.0, longest_wait_s(transport.failures)))

    def _serve(self, transport: LoopTransport, mask: int) -> None:
        session = transport.session
        if session is not None and mask & READ:
            session.paho.loop_read()
            sock = session.paho.socket()
            while sock is not None and getattr(sock, "pending", int)():  # TLS has read more than it was asked for
                session.paho.loop_read()
                sock = session.paho.socket()
        if mask & WRITE:
            self._unwritten.add(transport)

    def _write(self) -> None:
        """Send what was said in this turn; the selector tells when a full socket takes more."""
        for transport in list(self._unwritten):
            self._unwritten.discard(transport)
            if transport.session is None:
                continue
            paho = transport.session.paho
            paho.loop_write()
            sock = paho.socket()
            if sock is not None:
                wanted = READ | WRITE if paho.want_write() else READ
                if self._selector.get_key(sock).events != wanted:
                    self._selector.modify(sock, wanted, transport)

    def _look_after(self, now_s: float) -> None:
        """Once a second: keepalives, and brokers that accept a connection and say nothing."""
        if now_s < self._misc_s:
            return
        self._misc_s = now_s + KEEPALIVE_CHECK_S
        for transport in self.members:
            if transport.session is not None:
                transport.session.paho.loop_misc()
        for transport in [t for t, until_s in self._greeting.items() if until_s <= now_s]:
            if transport.session is not None:
                transport.session.reason = f"no answer within {CONNACK_TIMEOUT_S:g} s"
                transport.session.paho.disconnect()

    # -- lives

    def _tell(self, transport: LoopTransport, event: Event) -> None:
        transport.events.append(event)
        self.resume_soon(transport)

    def _acknowledged(self, transport: LoopTransport) -> None:
        transport.open -= 1
        if transport.full:
            self.resume_soon(transport)
        if transport.closing and transport.open == 0:
            self.hang_up(transport)

    def _queue(self, member: _LoopMember) -> None:
        if not member.queued and not member.over:
            member.queued = True
            self._ready.append(member)

    def _next_s(self) -> float:
        due = self._due[0][0] if self._due else float("inf")
        dial = self._dials[0][0] if self._dials and len(self._greeting) < MAX_OPEN_DIALS else float("inf")
        return min(due, dial, self._misc_s)

    def _resume(self, now_s: float) -> None:
        """Resume the members with a new event and the members whose time is due, until a turn's time is over.

        The member with the latest event is first: the event may be a credit for an upload, and most others train next.
        """
        while self._due and self._due[0][0] <= now_s:
            at_s, _, member = heapq.heappop(self._due)
            if at_s == member.wake_s:
                self._queue(member)
        until_s = now_s + MAX_TURN_S
        while self._ready and self.now_s() < until_s:
            member = self._ready.pop()
            member.queued = False
            if not member.over:
                self._step(member)

    def _step(self, member: _LoopMember) -> None:
        """Resume a client while it has something to do, for a window of blocks at most."""
        transport, wait_s = member.transport, 0.0
        for _ in range(MAX_STEPS_PER_TURN):
            transport.full = False
            event = transport.receive(0.0) if member.begun else None  # a generator is begun with nothing
            member.begun = True
            try:
                wait_s = member.life.send(event)
            except StopIteration:
                member.over = True
                return
            except Exception as wrong:  # noqa: BLE001 - the other devices go on; `errors` has it
                member.over, member.error = True, wrong
                return
            if transport.full or (wait_s > 0 and not transport.events):
                break
        if transport.full:
            wait_s = max(wait_s, WINDOW_POLL_S)
        member.wake_s = self.now_s() + wait_s
        if transport.events or wait_s <= 0:
            member.queued = True
            self._ready.appendleft(member)
        else:
            heapq.heappush(self._due, (member.wake_s, next(self._order), member))
