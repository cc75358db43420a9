"""A device sends while the coordinator reads nothing, as when it computes centers."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from edge_client.protocol.topics import Topics
from edge_client.transport import event_queue, mqtt
from edge_client.transport.event_queue import EventQueue
from tests.support.guarded_broker import FEDERATION, PATIENCE_S, guarded_broker

pytestmark = pytest.mark.broker
MALLORY = "mallory"
TOPICS = Topics(FEDERATION)
MOST, SENT, SIZE = 1 << 20, 40, 1 << 16


@pytest.mark.parametrize(
    ("label", "payload"), [("", bytes(SIZE)), ("x" * (SIZE - 1_000), b"")], ids=["payloads", "topics"]
)
def test_what_a_device_sends_meanwhile_fills_no_memory_and_the_coordinator_hears_later_messages(
    label: str, payload: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic may be as long as a block: the broker's access list lets each text stand for the label of one."""
    monkeypatch.setattr(mqtt, "EventQueue", partial(EventQueue, MOST))
    dropping = threading.Event()
    monkeypatch.setattr(event_queue.log, "warning", lambda *_: dropping.set())
    with guarded_broker(tmp_path, MALLORY) as broker:
        coordinator = broker.client(COORDINATOR_CLIENT_ID)
        coordinator.subscribe("fc/v1/demo/in/+/#", "fc/v1/demo/rq/+")
        coordinator.settle(TOPICS.request("look"))
        mallory = broker.client(MALLORY)
        for number in range(SENT):
            mallory.publish(f"fc/v1/demo/in/0/{MALLORY}/{number}{label}/0", payload)
        assert dropping.wait(PATIENCE_S)
        heard = 0
        while coordinator.transport.receive(0.0) is not None:
            heard += 1
        assert heard < SENT
        mallory.publish(TOPICS.request(MALLORY), b"later")
        coordinator.until(b"later")  # raises where it does not come
