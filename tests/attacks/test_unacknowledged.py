"""A broker acknowledges nothing that a device sends, and asks it for answers without an end."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.protocol.topics import Topics
from edge_client.runtime import sender
from edge_client.transport.base import Connected
from edge_client.transport.clock import SystemClock
from edge_client.transport.mqtt import MqttTransport
from tests.edge_client.transport.test_mqtt import listening
from tests.support.patience import patience

CONNECTED = b"\x20\x03\x00\x00\x00"  # the answer of a broker that speaks MQTT 5
MOST, PATIENCE_S = 8, patience(30.0)


def test_answers_to_a_broker_that_takes_none_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MAX_UNACKNOWLEDGED", MOST)
    with listening(CONNECTED) as url:
        transport = MqttTransport(url, "demo.d1", connect_timeout_s=PATIENCE_S)
        transport.connect()
        assert isinstance(transport.receive(PATIENCE_S), Connected)
        device = sender.DeviceSender(Topics("demo"), "d1", transport, clock=SystemClock(), rng=np.random.default_rng(0))
        for _ in range(3 * MOST):
            device.send("nack", re="t1", code="bad_field")
        assert not transport.drain(MOST, 0.0)
        assert transport.drain(MOST + 1, 0.0)
        monkeypatch.setattr("edge_client.transport.mqtt.FLUSH_TIMEOUT_S", 0.0)
        transport.close()
