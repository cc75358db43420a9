"""A broker in memory with the same promises as a real one: retained messages, wills, wildcards, clean sessions.

`MemoryBroker` also breaks things on request: `cut` a link, `kill` a
client, `restart` the broker, or lose and repeat single messages through `tamper`. Time plays no part in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from queue import Empty, SimpleQueue

from edge_client.errors import NetworkError
from edge_client.transport.base import Connected, Disconnected, Event, Message, Will, WillSource, filter_matches

TamperMessage = Callable[[str, bytes], Iterable[bytes]]  # (topic, payload) -> what really travels: (), (payload,), ...
covers = lru_cache(maxsize=10_000)(filter_matches)  # every message is compared with the filters of all clients


class MemoryBroker:
    """Delivers at once, in the order of publication, to every connected client that subscribed."""

    def __init__(self, *, tamper: TamperMessage | None = None) -> None:
        self.tamper = tamper
        self.retained: dict[str, bytes] = {}
        self._clients: dict[str, MemoryTransport] = {}
        self._lock = threading.RLock()

    def client(self, client_id: str, will: WillSource = None) -> MemoryTransport:
        """A transport of this broker; it is not connected until `connect`."""
        return MemoryTransport(self, client_id, will)

    def drop_connection(self, client_id: str) -> None:
        """Break one link: the will is published, and the client connects again at once."""
        with self._lock:
            client = self._clients[client_id]
            self._drop(client, "cut")
            self._welcome(client)

    def kill(self, client_id: str) -> None:
        """What a broker sees of a client's SIGKILL: its will is published, nothing reaches it any more."""
        with self._lock:
            self._drop(self._clients[client_id], "killed")

    def restart(self) -> None:
        """Forget everything; all clients lose their connection and get a new one. No will survives a broker."""
        with self._lock:
            self.retained.clear()
            for client in list(self._clients.values()):
                client.lose("broker restarted")
                self._welcome(client)

    def attach(self, client: MemoryTransport) -> None:
        """Begin a clean session; an older client of the same name loses its own, as MQTT wants it."""
        with self._lock:
            older = self._clients.get(client.client_id)
            if older is not None and older is not client:
                self._drop(older, "another client took this name")
            self._welcome(client)

    def detach(self, client: MemoryTransport) -> None:
        """End a session cleanly: no will."""
        with self._lock:
            if self._clients.get(client.client_id) is client:
                del self._clients[client.client_id]

    def subscribe(self, client: MemoryTransport, filters: tuple[str, ...], *, as_published: bool) -> None:
        """Add filters, and deliver the retained messages that each of them covers."""
        with self._lock:
            if self._clients.get(client.client_id) is not client:
                return
            for wanted in filters:
                client.filters[wanted] = as_published
                for topic, payload in sorted(self.retained.items()):
                    if covers(wanted, topic):
                        client.deliver(Message(topic, payload, retained=True))

    def publish(self, sender: MemoryTransport | None, topic: str, payload: bytes, *, retain: bool) -> None:
        """Keep it when retained, deliver it once to every client with a matching filter. The dead are not heard."""
        with self._lock:
            if sender is not None and self._clients.get(sender.client_id) is not sender:
                return
            for body in (payload,) if self.tamper is None else self.tamper(topic, payload):
                if retain and body:
                    self.retained[topic] = body
                elif retain:
                    self.retained.pop(topic, None)
                for client in self._clients.values():
                    matching = [shown for wanted, shown in client.filters.items() if covers(wanted, topic)]
                    if matching:
                        client.deliver(Message(topic, body, retained=retain and any(matching)))

    def _drop(self, client: MemoryTransport, reason: str) -> None:
        del self._clients[client.client_id]
        client.lose(reason)
        if client.last_will is not None:
            self.publish(None, client.last_will.topic, client.last_will.payload, retain=True)

    def _welcome(self, client: MemoryTransport) -> None:
        self._clients[client.client_id] = client
        client.welcome()


class MemoryTransport:
    """One client of a `MemoryBroker`. Made by `MemoryBroker.client`; its public attributes belong to the broker."""

    def __init__(self, broker: MemoryBroker, client_id: str, will: WillSource) -> None:
        self.client_id = client_id
        self.filters: dict[str, bool] = {}  # filter -> whether its live messages say if they are retained
        self.last_will: Will | None = None
        self._broker, self._will = broker, will
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._closed = False

    def connect(self) -> None:
        if self._closed:
            raise NetworkError("this transport is closed", hint="make a new one")
        self._broker.attach(self)

    def subscribe(self, *filters: str, as_published: bool = False) -> None:
        self._broker.subscribe(self, filters, as_published=as_published)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self._broker.publish(self, topic, payload, retain=retain)

    def drain(self, most: int, timeout_s: float) -> bool:
        return True

    def receive(self, timeout_s: float) -> Event | None:
        try:
            return self._events.get(timeout=max(0.0, timeout_s)) if timeout_s > 0 else self._events.get_nowait()
        except Empty:
            return None

    def wake(self) -> None:
        self._events.put(None)

    def close(self) -> None:
        self._closed = True
        self._broker.detach(self)

    def welcome(self) -> None:
        self.filters.clear()
        self.last_will = self._will() if callable(self._will) else self._will
        self._events.put(Connected())

    def lose(self, reason: str) -> None:
        self.filters.clear()
        self._events.put(Disconnected(reason))

    def deliver(self, message: Message) -> None:
        self._events.put(message)
