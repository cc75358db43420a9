"""The queue between a connection and its client: what waits in it is bounded, and what is not read is dropped."""

from __future__ import annotations

import logging

import pytest

from edge_client.transport.base import Connected, Disconnected, Event, Message
from edge_client.transport.event_queue import MESSAGE_BYTES, EventQueue

BIG = Message("t", bytes(10_000))
MOST = 3 * (MESSAGE_BYTES + 10_000 + 100)  # a short text takes about 50 bytes


def taken(queue: EventQueue) -> list[Event]:
    found = []
    while (event := queue.get(0.0)) is not None:
        found.append(event)
    return found


def test_as_many_messages_wait_as_there_is_room_for_and_later_ones_are_taken_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = EventQueue(MOST)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for _ in range(5):
                queue.put(BIG)
            assert taken(queue) == [BIG] * 3
    assert [record.getMessage() for record in caplog.records].count(caplog.records[0].getMessage()) == 2  # each time


def test_a_message_has_room_again_as_soon_as_another_was_taken() -> None:
    queue = EventQueue(MOST)
    for _ in range(4):
        queue.put(BIG)
    assert queue.get(0.0) == BIG
    last = Message("last", bytes(10_000))
    queue.put(last)
    assert taken(queue) == [BIG, BIG, last]


def test_empty_messages_fill_it_too() -> None:
    queue = EventQueue(MOST)
    for _ in range(1_000):
        queue.put(Message("t", b""))
    assert 0 < len(taken(queue)) <= MOST // MESSAGE_BYTES


def test_what_happens_to_the_connection_is_never_dropped() -> None:
    queue = EventQueue(MOST)
    for _ in range(4):
        queue.put(BIG)
    queue.put(Disconnected("gone"))
    queue.put(Connected())
    assert taken(queue) == [BIG, BIG, BIG, Disconnected("gone"), Connected()]
