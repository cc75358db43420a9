"""What a client hears of a broker that lets it in and forbids its topics, or that does not let it in."""

from __future__ import annotations

from pathlib import Path

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

from edge_client.errors import ConfigError, NetworkError
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Connected, Disconnected
from edge_client.transport.mqtt import MqttTransport, PahoSession, parse_url
from tests.edge_client.transport.test_mqtt import listening
from tests.support.guarded_broker import FEDERATION, guarded_broker

TOPICS = Topics(FEDERATION)


@pytest.mark.broker
def test_a_client_whose_topics_the_broker_forbids_is_told_so_and_begins_again_until_they_are_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with guarded_broker(tmp_path, "dev-1") as broker:
        rights = broker.work.folder / "broker" / "mosquitto.acl"
        allowed = rights.read_text()
        rights.write_text(allowed.replace(f"/{FEDERATION}/", "/another/"))
        broker.reload()
        credentials = broker.credentials("dev-1")
        client = MqttTransport(broker.url, "demo.dev-1", credentials=credentials, jitter=lambda _low, _high: 0.05)
        client.connect()
        lost = 0
        while lost < 2:
            event = client.receive(30.0)
            if isinstance(event, Connected):
                client.publish(TOPICS.state("dev-1"), b"on", retain=True)
            else:
                assert event == Disconnected("the broker does not let demo.dev-1 publish what it says: Not authorized")
                lost += 1
        rights.write_text(allowed)
        broker.reload()
        while not client.drain(0, 1.0):  # what was published before a connection ended is published again by its owner
            if client.receive(0.0) == Connected():
                client.publish(TOPICS.state("dev-1"), b"on", retain=True)
        client.close()
    told = [record.getMessage() for record in caplog.records if "access list" in record.getMessage()]
    assert len(told) == 1  # not at each attempt


def test_a_refused_subscription_ends_the_connection_and_is_named() -> None:
    session = PahoSession("demo.dev-1")
    session.accepted = True
    session.subscribe(("a/+", "b"))
    codes = [ReasonCode(PacketTypes.SUBACK, identifier=number) for number in (1, 128)]
    session._subscribed(None, None, 1, codes, None)
    assert session.refused
    assert session.reason == "the broker does not let demo.dev-1 hear b: Unspecified error"


@pytest.mark.filterwarnings(
    "ignore:unclosed <socket:ResourceWarning"
)  # paho leaves a failed handshake to the collector
def test_a_login_that_is_refused_is_not_called_a_broker_that_does_not_run() -> None:
    refused = b"\x20\x02\x00\x05"  # MQTT 3.1.1: not authorized
    with listening(refused) as url, pytest.raises(NetworkError, match="refused: Not authorized") as wrong:
        MqttTransport(url, "x", connect_timeout_s=2.0).connect()
    assert "certificate" in wrong.value.hint
    assert "running" not in wrong.value.hint


@pytest.mark.parametrize("url", ["mqtt://bob:secret@127.0.0.1", "mqtts://bob@broker.example"])
def test_a_name_and_a_password_in_an_address_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="names a user") as wrong:
        parse_url(url)
    assert "secret" not in f"{wrong.value}"
