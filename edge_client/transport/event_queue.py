"""The events of a connection that wait for the thread that takes them; the messages among them are bounded in bytes.

A coordinator takes none while it computes centers, and one client can send faster than another reads. A message beyond
the bound is dropped, as if the broker had lost it: both sides say again what has no answer (PROTOCOL.md, 1).
"""

from __future__ import annotations

import logging
import sys
import threading
from queue import Empty, SimpleQueue

from edge_client.transport.base import Event, Message

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 256 << 20
MESSAGE_BYTES = 1_024  # that an event counts beside its topic and payload, so that empty messages fill it, too


class EventQueue:
    """Any thread may `put`; one thread calls `get`. None is an event, too: it only ends a wait."""

    def __init__(self, most: int = MAX_WAITING_BYTES) -> None:
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the next two
        self._waiting = 0  # bytes
        self._is_dropping = False  # since there was last no event
        self._most = most

    def put(self, event: Event | None) -> None:
        size = _size(event)
        with self._lock:
            full = isinstance(event, Message) and self._waiting + size > self._most
            told, self._is_dropping = self._is_dropping, self._is_dropping or full
            if not full:
                self._waiting += size
        if not full:
            self._events.put(event)
        elif not told:
            log.warning("more messages come than are read: beyond %d MiB they are dropped", self._most >> 20)

    def get(self, timeout_s: float) -> Event | None:
        """The next event; None where none came within `timeout_s`."""
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
        except Empty:
            return None
        with self._lock:
            self._waiting -= _size(event)
            self._is_dropping = self._is_dropping and self._waiting > 0
        return event


def _size(event: Event | None) -> int:
    return MESSAGE_BYTES + (sys.getsizeof(event.topic) + len(event.payload) if isinstance(event, Message) else 0)
