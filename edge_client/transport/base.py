"""What a transport promises: events are pulled by one thread, publishing never blocks on the network.

The conformance suite (tests/conformance/test_transports.py) runs over every implementation:

* a message published at QoS 1 while connected is received at least once by every matching subscription;
* messages on one topic from one sender arrive in order; a retained message is delivered on subscribing;
* the first event after a (re)connection is `Connected`; sessions are clean, so the receiver subscribes again then;
* `Disconnected` is reported once per broken connection, and reconnecting goes on by itself with full jitter;
* the will is published by the broker when the connection dies without `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Message:
    """One publication: a topic, its bytes, and whether the broker had it retained (see `subscribe`)."""

    topic: str
    payload: bytes
    retained: bool = False


@dataclass(frozen=True)
class Connected:
    """A fresh, clean session with the broker; nothing is subscribed yet."""


@dataclass(frozen=True)
class Disconnected:
    """The connection broke; `reason` is for logs."""

    reason: str


Event = Message | Connected | Disconnected


@dataclass(frozen=True)
class Will:
    """Published retained at QoS 1 by the broker if this client vanishes."""

    topic: str
    payload: bytes


# A function is called before each connection attempt, from any thread: a device's will carries its birth number.
WillSource = Will | Callable[[], Will] | None


class Transport(Protocol):
    """A connection to one broker. Everything at QoS 1. Thread-safe for `publish`; one thread calls `receive`."""

    def connect(self) -> None:
        """Start; returns at once. Raises NetworkError if the first connection fails within the configured time."""
        ...

    def subscribe(self, *filters: str, as_published: bool = False) -> None:
        """Subscribe; retained messages that match arrive as events.

        With `as_published` a live message says too whether its sender had it retained, where the broker speaks MQTT 5.
        """
        ...

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Queue one message at QoS 1; an empty retained payload deletes the retained message.

        Between `Disconnected` and `Connected` nothing is kept: after `Connected` both sides say again what is still
        open.
        """
        ...

    def drain(self, most: int, timeout_s: float) -> bool:
        """Wait until at most `most` messages lack the broker's acknowledgement; False if that takes longer."""
        ...

    def receive(self, timeout_s: float) -> Event | None:
        """Wait for the next event, at most `timeout_s`; None when nothing came."""
        ...

    def wake(self) -> None:
        """Make a `receive` that waits in another thread return None soon (for shutting down)."""
        ...

    def close(self) -> None:
        """Flush what was published, disconnect cleanly (no will), free everything. Idempotent."""
        ...


Dial = Callable[[Callable[[], Will]], Transport]  # from a source of wills to a transport that is not connected yet


def filter_matches(topic_filter: str, topic: str) -> bool:
    """Whether a filter with `+` (one level) and `#` (the rest, also none) covers a topic."""
    wanted, levels = topic_filter.split("/"), topic.split("/")
    for position, level in enumerate(wanted):
        if level == "#":
            return True
        if position >= len(levels) or level not in ("+", levels[position]):
            return False
    return len(wanted) == len(levels)
