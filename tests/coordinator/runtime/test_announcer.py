"""How often devices are sent the record while only a number of it changes."""

from __future__ import annotations

import pytest

from coordinator.runtime.announcer import StateAnnouncer
from coordinator.runtime.sender import CoordinatorSender
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Message
from tests.support.memory_broker import MemoryBroker
from tests.support.virtual_time import VirtualClock


@pytest.mark.parametrize(("devices", "records"), [(0, 100), (250, 100), (1_000, 25), (20_000, 2)])
def test_the_more_devices_there_are_the_longer_changes_of_a_number_are_gathered(devices: int, records: int) -> None:
    clock, transport = VirtualClock(), MemoryBroker().client("us")
    transport.connect()
    transport.subscribe("#")
    sender = CoordinatorSender(
        topics=Topics("test"), clock=clock, epoch=1, boot="0" * 16, block=4_096, spread_ms=0, transport=transport
    )
    announcer = StateAnnouncer(sender, lambda: devices)

    def received() -> int:
        events = iter(lambda: transport.receive(0), None)
        return sum(isinstance(event, Message) for event in events)

    for second in range(100):
        clock.time_s = float(second)
        announcer.set("gather", "now", here=second, needed=100)
    assert received() == records
    announcer.set("train", "no", run="r1", name="fedavg", round=1, of=2)
    assert received() == 1  # what the federation does is told at once
