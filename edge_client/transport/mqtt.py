"""MQTT through paho: one network thread per client, MQTT 5 where the broker speaks it, 3.1.1 otherwise.

The only file that names paho. A broker that is not on this machine is spoken to over TLS (tls.py), unless the
command says `insecure`. Every connection is a fresh paho client with a clean session, so that nothing queued for
the last connection reaches the next one. Reconnecting waits with full jitter.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.subscribeoptions import SubscribeOptions

from edge_client.errors import ConfigError, FedcentersError, NetworkError
from edge_client.transport.base import Connected, Disconnected, Event, Message, Will, WillSource, filter_matches
from edge_client.transport.event_queue import EventQueue
from edge_client.transport.tls import (
    Credentials,
    client_context,
    expiry_warnings,
    explain_failure,
    is_loopback,
    unread_alert,
)

log = logging.getLogger(__name__)

PORTS = {"mqtt": 1883, "mqtts": 8883}
KEEPALIVE_S = 60
BACKOFF_RESET_S = 60.0  # a connection that lasted this long resets the back-off
MAX_BACKOFF_S = 120.0
MAX_DOUBLINGS = 10  # more than MAX_BACKOFF_S; a float overflows at 1,024
MIN_BACKOFF_S = 0.5  # the caller of `connect` waits for the first connection
FLUSH_TIMEOUT_S = 5.0
FILTERS_PER_SUBSCRIBE = 8  # AWS IoT takes no more
MQTT3, MQTT5 = MQTTProtocolVersion.MQTTv311, MQTTProtocolVersion.MQTTv5
MAX_IN_FLIGHT = 64  # unacknowledged messages per direction; paho queues what exceeds it
VERSION_TIMEOUT_S = 2.0  # a broker that stays silent this long on MQTT 5 is asked in 3.1.1
CLOSED = "the connection was closed"
TAKEN_OVER = "session taken over"  # MQTT 5's reason; many brokers close the connection and say none
MANY_CLOSINGS, CLOSINGS_WITHIN_S = 3, 600.0  # by the broker, without a reason: a client with the same name is suspected
TICK_S = 1.0  # how often paho looks after its keepalive

SYSTEM_CREDENTIALS = Credentials()  # the system's authorities, and no certificate
RIGHTS_HINT = (
    "write the broker's access list again with `provision`, and let the broker read it; or was this client's "
    "certificate revoked? (docs/security.md)"
)
LOGIN_HINT = "the broker's log has the reason; clients have certificates, not passwords (docs/security.md)"
NOT_AUTHORIZED = "Not authorized"  # paho's words
REFUSED = "refused: "  # begins the reason of a CONNECT that the broker answered with no
START_HINT = "check the address, and that the broker is running, then start again; one that is lost later is waited for"
SILENT, MOST_WAITS = "no answer", 3  # of a broker that is too busy

_broker_versions: dict[str, MQTTProtocolVersion] = {}  # what each broker turned out to speak
_asking: dict[str, threading.Lock] = {}  # of many clients one asks: each question is a TLS handshake


def parse_url(url: str) -> tuple[str, int, bool]:
    """`mqtt://host[:port]` or `mqtts://host[:port]` -> (host, port, whether TLS). Raises ConfigError."""
    hint = "use mqtt://host:1883, or mqtts://host:8883 for TLS"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as wrong:
        raise ConfigError(f"broker URL {url!r}: {wrong}", hint=hint) from wrong
    if parts.username is not None:  # not shown: a password may follow it
        hint = "leave out what stands before @; clients log in with a certificate (docs/security.md)"
        raise ConfigError(f"the broker URL for {parts.hostname} names a user", hint=hint)
    if parts.scheme not in PORTS or not parts.hostname or parts.path.strip("/"):
        raise ConfigError(f"broker URL {url!r} is not an MQTT address", hint=hint)
    return parts.hostname, port or PORTS[parts.scheme], parts.scheme == "mqtts"


def check_encrypted(url: str, *, insecure: bool) -> None:
    """Raise ConfigError for a URL whose traffic is readable and changeable on the way, unless `insecure` is set."""
    host, _, encrypted = parse_url(url)
    if not encrypted and not insecure and not is_loopback(host):
        raise ConfigError(
            f"{url} is not encrypted: everything can be read and changed on the way",
            hint=f"use mqtts://{host}:{PORTS['mqtts']} with certificates (docs/security.md), or type --insecure",
        )


def longest_wait_s(failures: int, longest_s: float = MAX_BACKOFF_S) -> float:
    """The longest time before the next attempt, after so many in a row that failed; a broker may be away for days."""
    return min(longest_s, 2.0 ** min(failures, MAX_DOUBLINGS))


class MqttTransport:
    """A `Transport` over one broker. Raises ConfigError for credentials that cannot work.

    `insecure`: plain MQTT to another machine is wanted. `jitter(low, high)` draws the seconds to wait before the next
    attempt. A connection whose topics the broker forbids ends like a broken one: its access list may be mended.
    """

    def __init__(  # noqa: PLR0913 - what a connection is made of
        self,
        url: str,
        client_id: str,
        *,
        will: WillSource = None,
        credentials: Credentials = SYSTEM_CREDENTIALS,
        insecure: bool = False,
        connect_timeout_s: float = 10.0,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        check_encrypted(url, insecure=insecure)
        self._host, self._port, self._tls = parse_url(url)
        if self._tls:
            client_context(credentials, _now())
        self._url, self._client_id, self._will, self._credentials = url, client_id, will, credentials
        self._timeout_s, self._jitter = connect_timeout_s, jitter
        self._events = EventQueue()
        self._acknowledged = threading.Condition()  # guards the next two
        self._session: PahoSession | None = None  # None while not connected
        self._open = 0  # published and not yet acknowledged
        self._reason, self._hint = SILENT, ""
        self._closed_at_s: deque[float] = deque(maxlen=MANY_CLOSINGS)
        self._was_connected, self._closing = threading.Event(), threading.Event()
        self._settled = threading.Event()  # connected once, or told not to wait for it
        self._thread = threading.Thread(target=self._stay_connected, name=f"mqtt {client_id}", daemon=True)

    def connect(self) -> None:
        self._thread.start()
        waits = 1
        while not self._settled.wait(self._timeout_s):
            reason, hint = self._reason, self._hint  # of the last whole attempt; closing cuts the next one short
            if waits == MOST_WAITS or (reason != SILENT and "timed out" not in reason):
                self.close()
                told = f"cannot reach the MQTT broker at {self._url} within {waits * self._timeout_s:g} s: {reason}"
                raise NetworkError(told, hint=hint or START_HINT)
            waits += 1

    def subscribe(self, *filters: str, as_published: bool = False) -> None:
        if session := self._session:
            for start in range(0, len(filters), FILTERS_PER_SUBSCRIBE):
                session.subscribe(filters[start : start + FILTERS_PER_SUBSCRIBE], as_published=as_published)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        with self._acknowledged:
            session = self._session
            if session is None:
                return
            self._open += 1
        session.paho.publish(topic, payload, qos=1, retain=retain)

    def drain(self, most: int, timeout_s: float) -> bool:
        with self._acknowledged:
            self._acknowledged.wait_for(lambda: self._open <= most or self._session is None, timeout_s)
            return self._session is not None and self._open <= most

    def receive(self, timeout_s: float) -> Event | None:
        return self._events.get(timeout_s)

    def wake(self) -> None:
        self._settled.set()
        self._events.put(None)

    def close(self) -> None:
        if not self._closing.is_set():
            self.drain(0, FLUSH_TIMEOUT_S)
        self._closing.set()
        if session := self._session:
            session.paho.disconnect()
        if self._thread.is_alive():
            self._thread.join(FLUSH_TIMEOUT_S)

    def _stay_connected(self) -> None:
        failures, told = 0, ""
        while not self._closing.is_set():
            began = time.monotonic()
            self._one_connection()
            if self._hint and self._reason != told and self._settled.is_set():  # before, `connect` raises it
                log.warning("%s: %s; %s", self._url, self._reason, self._hint)
                told = self._reason
            failures = 0 if time.monotonic() - began > BACKOFF_RESET_S else failures + 1
            longest = MAX_BACKOFF_S if self._was_connected.is_set() else MIN_BACKOFF_S
            self._closing.wait(self._jitter(0.0, longest_wait_s(failures, longest)))

    def _one_connection(self) -> None:
        """Live through one connection, from the first attempt to its end."""
        try:
            self._warn()
            with _asking.setdefault(self._url, threading.Lock()):
                version = _broker_versions.get(self._url) or self._ask_version()
            will = self._will() if callable(self._will) else self._will
            session = PahoSession(self._client_id, version, will=will)
            session.on_up, session.on_ack, session.on_message = self.opened, self._ack, self._events.put
            self._live(session)
        except FedcentersError as wrong:  # a certificate file is missing or expired; a new one may replace it
            self._reason, self._hint = wrong.message, wrong.hint
        except Exception as wrong:
            log.debug("connection to %s", self._url, exc_info=wrong)
            self._reason, self._hint = explain_failure(wrong, self._credentials.ca)

    def _live(self, session: PahoSession) -> None:
        try:
            self._open_socket(session)
            session.run(self._timeout_s, self._closing)
        finally:
            session.release()
            with self._acknowledged:
                self._session, self._open = None, 0
                self._acknowledged.notify_all()
            if session.accepted:
                log.info("connection to %s lost: %s", self._url, session.reason)
                self._events.put(Disconnected(session.reason))
        self._reason, self._hint = explain_failure(session.reason)
        if not session.accepted:
            _broker_versions.pop(self._url, None)
            self._hint = self._hint or (LOGIN_HINT if session.reason.startswith(REFUSED) else "")
        elif session.refused:
            self._hint = RIGHTS_HINT
        elif not self._hint:
            self._hint = self._suspect_namesake(session.reason)

    def _suspect_namesake(self, reason: str) -> str:
        """What to do where another client seems to have this one's name; "" where nothing says so.

        A broker keeps one connection per name, so two such clients end each other's again and again.
        """
        stop = "if that is a copy of this one's folder or certificate, stop it and give it a name of its own"
        if reason.lower() == TAKEN_OVER:
            return f"another client connects as {self._client_id}; {stop}"
        if reason != CLOSED or self._closing.is_set():
            return ""
        self._closed_at_s.append(time.monotonic())
        if len(self._closed_at_s) < MANY_CLOSINGS or self._closed_at_s[-1] > self._closed_at_s[0] + CLOSINGS_WITHIN_S:
            return ""
        return f"{MANY_CLOSINGS} times within minutes: does another client connect as {self._client_id}? {stop}"

    def _ask_version(self) -> MQTTProtocolVersion:
        """Whether the broker takes MQTT 5. Asked apart, without properties and will.

        A 3.1.1 broker reads those as something else; amqtt then waits for bytes that never come instead of refusing.
        """
        session = PahoSession(self._client_id, MQTT5)
        session.on_up = lambda session: session.paho.disconnect()
        try:
            self._open_socket(session)
            session.run(VERSION_TIMEOUT_S, self._closing)
        finally:
            session.release()
        if session.accepted:
            _broker_versions[self._url] = MQTT5
        elif explain_failure(session.reason)[1]:
            raise ConnectionError(session.reason)  # turned away by TLS: another version of MQTT would not help
        return session.version if session.accepted else MQTT3

    def _open_socket(self, session: PahoSession) -> None:
        if self._tls:
            session.paho.tls_set_context(client_context(self._credentials, _now()))
        session.connect(self._host, self._port, self._timeout_s)

    def _warn(self) -> None:
        for sentence in expiry_warnings(self._credentials, _now()) if self._tls else ():
            log.warning(sentence)

    def opened(self, session: PahoSession) -> None:
        """The broker has accepted a connection; called in its thread, before anything is asked or said."""
        _broker_versions[self._url] = session.version
        with self._acknowledged:
            self._session, self._open = session, 0
        self._events.put(Connected())
        self._was_connected.set()
        self._settled.set()

    def _ack(self) -> None:
        with self._acknowledged:
            self._open -= 1
            self._acknowledged.notify_all()


class PahoSession:
    """One paho client for one connection, run by the thread that made it. Set the three callbacks before `connect`.

    `run` serves its socket; a loop over many sockets (emulator/testbed/event_loop.py) does that itself.
    """

    def __init__(self, client_id: str, version: MQTTProtocolVersion = MQTT3, *, will: Will | None = None) -> None:
        self.version, self.accepted, self.reason = version, False, SILENT
        self.filters: set[str] = set()
        self.refused = False  # a subscription or a message; `reason` says which
        self.stays = False  # although one is refused
        self._asked: deque[tuple[str, ...]] = deque()  # the filters of each SUBSCRIBE that has no answer yet
        self._client_id = client_id
        self.on_up: Callable[[PahoSession], object] = lambda _session: None
        self.on_ack: Callable[[], object] = lambda: None
        self.on_message: Callable[[Message], object] = lambda _message: None
        clean = None if version == MQTT5 else True  # MQTT 5 says it when connecting
        self.paho = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, clean, protocol=version, reconnect_on_failure=False
        )
        self.paho.max_inflight_messages_set(MAX_IN_FLIGHT)
        if will is not None:
            self.paho.will_set(will.topic, will.payload, qos=1, retain=True)
        self.paho.on_connect = self._connected
        self.paho.on_disconnect = self._disconnected
        self.paho.on_publish, self.paho.on_subscribe = self._published, self._subscribed
        self.paho.on_message = self._received
        self.paho.on_log = self._heard
        self.paho.on_socket_open = lambda _client, _data, sock: _no_delay(sock)
        # With this callback set, paho leaves all writing to the thread in `run`, also for publishers in other threads.
        self.paho.on_socket_register_write = lambda *_: None

    def connect(self, host: str, port: int, timeout_s: float) -> None:
        """Open the socket and say CONNECT. Raises OSError."""
        self.paho.connect_timeout = timeout_s
        self.paho.connect(host, port, KEEPALIVE_S)  # a clean session, as each first one

    def run(self, timeout_s: float, closing: threading.Event) -> None:
        """Serve the socket until it breaks, the broker forbids something, or says nothing for `timeout_s`."""
        until = time.monotonic() + timeout_s
        tick_s = min(TICK_S, timeout_s)
        while self.paho.loop(tick_s) == MQTTErrorCode.MQTT_ERR_SUCCESS:
            if self.refused or (not self.accepted and (closing.is_set() or time.monotonic() > until)):
                return

    def release(self) -> None:
        """Drop paho's callbacks, which refer to this: its client then closes its sockets with the last reference."""
        self.paho.on_connect = self.paho.on_disconnect = self.paho.on_publish = None
        self.paho.on_message = self.paho.on_log = self.paho.on_subscribe = None

    def subscribe(self, filters: tuple[str, ...], *, as_published: bool = False) -> None:
        self.filters |= set(filters)
        self._asked.append(filters)
        if self.version == MQTT5:
            self.paho.subscribe([(f, SubscribeOptions(qos=1, retainAsPublished=as_published)) for f in filters])
        else:
            self.paho.subscribe([(f, 1) for f in filters])

    def _received(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        # amqtt sends a new client every retained message that any client subscribed to.
        if any(filter_matches(wanted, message.topic) for wanted in self.filters.copy()):
            self.on_message(Message(message.topic, bytes(message.payload), bool(message.retain)))

    def _connected(self, _client: object, _data: object, _flags: object, code: Any, _more: object) -> None:  # noqa: ANN401
        if code.is_failure:
            self.reason = f"{REFUSED}{code}"
            return
        self.accepted = True
        self.on_up(self)

    def _subscribed(self, _client: object, _data: object, _mid: int, codes: list[Any], _more: object) -> None:
        asked = self._asked.popleft() if self._asked else ()  # a broker answers in order
        if refused := [f"{wanted}: {code}" for wanted, code in zip(asked, codes, strict=False) if code.is_failure]:
            self._forbidden(f"hear {refused[0]}")

    def _published(self, _client: object, _data: object, _mid: int, code: Any, _more: object) -> None:  # noqa: ANN401
        if str(code) == NOT_AUTHORIZED:
            self._forbidden(f"publish what it says: {code}")
        elif code.is_failure:
            log.warning("the broker did not take a message of %s: %s; its log has the reason", self._client_id, code)
        self.on_ack()

    def _forbidden(self, what: str) -> None:
        """Neither side would know that the other waits: the connection ends, and says why."""
        if not self.refused and not self.stays:
            self.refused, self.reason = True, f"the broker does not let {self._client_id} {what}"

    def _heard(self, client: paho.Client, _data: object, level: int, text: str) -> None:
        """A refusal in TLS 1.3 comes after the handshake; paho tells of it in its log alone."""
        if level == paho.MQTT_LOG_ERR and not self.accepted:
            line = client.socket()
            self.reason = (unread_alert(line.recv) if line is not None else "") or text

    def _disconnected(self, _client: object, _data: object, _flags: object, code: Any, _more: object) -> None:  # noqa: ANN401
        if not self.refused and (self.accepted or self.reason == SILENT):
            self.reason = CLOSED if str(code) == "Unspecified error" else str(code)  # paho's word for a closed socket


def _now() -> dt.datetime:
    """Certificates live by the wall clock."""
    return dt.datetime.now(dt.timezone.utc)


def _no_delay(sock: Any) -> None:  # noqa: ANN401 - a plain or a TLS socket
    """Small acknowledgements wait for 40 ms and more behind Nagle's algorithm."""
    with contextlib.suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
