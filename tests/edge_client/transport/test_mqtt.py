"""What only real MQTT has: addresses, brokers that are not there or do not answer, protocol versions, back-off."""

from __future__ import annotations

import gc
import socket
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from coordinator.local_broker import Broker, start_broker
from edge_client.errors import ConfigError, NetworkError
from edge_client.transport import mqtt
from edge_client.transport.base import Connected, Disconnected
from edge_client.transport.mqtt import MqttTransport, PahoSession, parse_url
from edge_client.transport.tls import Credentials
from tests.support.guarded_broker import guarded_broker, provision_federation
from tests.support.patience import patience

PATIENCE_S = patience(60.0)


@contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """A server that answers the first bytes of each connection with `answer` and says nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                kept.append(link)
                with suppress(OSError):  # the other side, or the test, may be over already
                    link.recv(1_024)
                    link.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"mqtt://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)  # ends `accept`
        for link in tuple(kept):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # ends `recv`
        thread.join(PATIENCE_S)
        for link in kept:
            link.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()  # paho leaves the socket of a handshake that came to nothing to the garbage collector


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("mqtt://host", ("host", 1883, False)),
        ("mqtt://127.0.0.1:7000", ("127.0.0.1", 7000, False)),
        ("mqtts://broker.example", ("broker.example", 8883, True)),
        ("mqtts://[::1]:1/", ("::1", 1, True)),
    ],
)
def test_addresses_are_read(url: str, parsed: tuple[str, int, bool]) -> None:
    assert parse_url(url) == parsed


def test_a_broker_that_was_away_for_a_day_is_found_again(tmp_path: Path, free_port: int) -> None:
    """At about a minute for each, 1,024 failed attempts are seventeen hours; 2.0 ** 1024 is no float."""
    attempts = 0
    with ExitStack() as stack:
        held = stack.enter_context(socket.socket())  # bound and deaf: refuses, and nobody else takes the port
        held.bind(("127.0.0.1", free_port))

        def jitter(_low: float, _high: float) -> float:
            nonlocal attempts
            attempts += 1
            if attempts == 1_100:
                held.close()
                stack.enter_context(start_broker(tmp_path, "embedded", port=free_port))
            return 0.0

        transport = MqttTransport(f"mqtt://127.0.0.1:{free_port}", "patient", connect_timeout_s=60.0, jitter=jitter)
        transport.connect()
        assert attempts >= 1_100
        transport.close()


@pytest.mark.parametrize("url", ["", "host:1883", "http://host", "mqtt://", "mqtt://host:x", "mqtt://host/path"])
def test_what_is_no_address_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        parse_url(url)
    assert "mqtt://host:1883" in wrong.value.hint


def test_an_absent_authority_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no certificate authority at"):
        MqttTransport("mqtts://host", "x", credentials=Credentials(ca=tmp_path / "absent.pem"))


@pytest.mark.parametrize(
    "url", ["mqtt://broker.example", "mqtt://192.168.1.2:1883", "mqtt://[2001:db8::1]", "mqtt://0.0.0.0"]
)
def test_plain_mqtt_to_another_machine_has_to_be_insisted_on(url: str) -> None:
    with pytest.raises(ConfigError, match="not encrypted") as wrong:
        MqttTransport(url, "x")
    assert "--insecure" in wrong.value.hint
    MqttTransport(url, "x", insecure=True)


@pytest.mark.parametrize("url", ["mqtt://localhost", "mqtt://127.0.0.1", "mqtt://127.9.8.7:1", "mqtt://[::1]:1"])
def test_plain_mqtt_stays_allowed_on_this_machine(url: str) -> None:
    MqttTransport(url, "x")


def test_a_broker_that_is_not_there_is_named_with_its_address_and_a_hint(free_port: int) -> None:
    url = f"mqtt://127.0.0.1:{free_port}"
    transport = MqttTransport(url, "x", connect_timeout_s=0.3)
    with pytest.raises(NetworkError, match=url) as wrong:
        transport.connect()
    assert "broker is running" in wrong.value.hint


def test_a_server_that_never_answers_is_given_up() -> None:
    with listening(b"") as url, pytest.raises(NetworkError, match="cannot reach"):
        MqttTransport(url, "x", connect_timeout_s=0.3).connect()


def test_a_broker_that_is_slow_at_first_as_at_a_high_load_is_waited_for(tmp_path: Path, free_port: int) -> None:
    """The first try ends without a word; a second one begins after `jitter`."""
    with ExitStack() as stack:
        deaf = stack.enter_context(socket.create_server(("127.0.0.1", free_port)))

        def jitter(_low: float, _high: float) -> float:
            if deaf.fileno() >= 0:
                deaf.close()
                stack.enter_context(start_broker(tmp_path, "embedded", port=free_port))
            return 0.0

        transport = MqttTransport(f"mqtt://127.0.0.1:{free_port}", "patient", connect_timeout_s=4.0, jitter=jitter)
        transport.connect()
        assert transport.receive(0.0) == Connected()
        transport.close()


def test_a_broker_that_refuses_us_is_quoted() -> None:
    not_authorised = b"\x20\x02\x00\x05"
    with listening(not_authorised) as url, pytest.raises(NetworkError, match="refused: Not authorized"):
        MqttTransport(url, "x", connect_timeout_s=2.0).connect()


@pytest.mark.broker
def test_mosquitto_is_spoken_to_in_mqtt_5(mosquitto: Broker) -> None:
    assert spoken(mosquitto.url) == MQTTProtocolVersion.MQTTv5


def test_amqtt_is_spoken_to_in_3_1_1(amqtt_broker: Broker) -> None:
    assert spoken(amqtt_broker.url) == MQTTProtocolVersion.MQTTv311


@pytest.mark.broker
def test_of_many_clients_in_one_process_one_asks_the_broker_for_its_version(
    mosquitto: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question is a connection of its own: with TLS, 75 clients of a busy machine were not in within 10 s."""
    asked, ask = list[str](), MqttTransport._ask_version

    def count(transport: MqttTransport) -> object:
        asked.append(transport._client_id)
        return ask(transport)

    monkeypatch.setattr(MqttTransport, "_ask_version", count)
    transports = [MqttTransport(mosquitto.url, f"c{number}") for number in range(8)]
    threads = [threading.Thread(target=transport.connect) for transport in transports]
    for thread in threads:
        thread.start()
    for transport in transports:
        assert transport.receive(PATIENCE_S) == Connected()
        transport.close()
    assert len(asked) == 1


def spoken(url: str) -> object:
    transport = MqttTransport(url, "x")
    transport.connect()
    transport.close()
    return mqtt._broker_versions[url]


@pytest.mark.broker
def test_attempts_wait_with_full_jitter_that_doubles_and_is_bounded(mosquitto: Broker) -> None:
    spans: list[tuple[float, float]] = []
    enough = threading.Event()

    def jitter(low: float, high: float) -> float:
        spans.append((low, high))
        if len(spans) >= 12:
            enough.set()
        return 0.001

    transport = MqttTransport(mosquitto.url, "x", jitter=jitter)
    transport.connect()
    assert transport.receive(PATIENCE_S) == Connected()
    mosquitto.stop()
    assert isinstance(transport.receive(PATIENCE_S), Disconnected)
    assert enough.wait(PATIENCE_S)
    transport.close()
    assert [low for low, _ in spans] == [0.0] * len(spans)
    assert [high for _, high in spans][:9] == [2, 4, 8, 16, 32, 64, 120, 120, 120]


@pytest.mark.broker
def test_a_client_outlives_a_restart_of_its_broker(tmp_path: Path, free_port: int) -> None:
    first = start_broker(tmp_path / "one", "mosquitto", port=free_port)
    transport = MqttTransport(first.url, "x", jitter=lambda _low, _high: 0.05)
    transport.connect()
    assert transport.receive(PATIENCE_S) == Connected()
    first.stop()
    assert isinstance(transport.receive(PATIENCE_S), Disconnected)
    transport.publish("a", b"into the void")
    with start_broker(tmp_path / "two", "mosquitto", port=free_port):
        assert transport.receive(PATIENCE_S) == Connected()
        transport.subscribe("a")
        transport.publish("a", b"heard")
        message = transport.receive(PATIENCE_S)
        assert getattr(message, "payload", None) == b"heard"
        transport.close()


@pytest.mark.broker
def test_a_packet_that_paho_cannot_read_ends_the_connection_alone(
    mosquitto: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paho 2.1 raises what its parsing raises, and the thread ended that connects again."""
    serve, wrong = PahoSession.run, [KeyError(23), struct.error("bad char in struct format")]

    def run(session: PahoSession, timeout_s: float, closing: threading.Event) -> None:
        if wrong:
            raise wrong.pop()
        serve(session, timeout_s, closing)

    monkeypatch.setattr(PahoSession, "run", run)
    transport = MqttTransport(mosquitto.url, "x", jitter=lambda _low, _high: 0.0)
    transport.connect()
    transport.close()
    assert wrong == []


def test_closing_twice_or_before_connecting_does_nothing() -> None:
    transport = MqttTransport("mqtt://127.0.0.1:1", "x")
    transport.close()
    transport.close()
    transport.publish("a", b"b")
    transport.subscribe("a")
    assert transport.receive(0) is None


def test_waking_ends_the_wait_for_the_first_connection(free_port: int) -> None:
    transport = MqttTransport(f"mqtt://127.0.0.1:{free_port}", "x", connect_timeout_s=60)
    connecting = threading.Thread(target=transport.connect, daemon=True)
    connecting.start()
    transport.wake()
    connecting.join(PATIENCE_S)
    assert not connecting.is_alive()
    transport.close()


@pytest.mark.broker
@pytest.mark.filterwarnings("ignore:unclosed <ssl:ResourceWarning")  # paho leaves a failed handshake to the collector
def test_over_tls_only_the_configured_authority_is_trusted(tmp_path: Path) -> None:
    strangers = provision_federation(tmp_path / "strangers").folder / "broker" / "ca.crt"
    with guarded_broker(tmp_path, "dev-1") as broker:
        broker.client("dev-1")
        theirs = replace(broker.credentials("dev-1"), ca=strangers)
        with pytest.raises(NetworkError, match="certificate verify failed"):
            MqttTransport(broker.url, "y", credentials=theirs, connect_timeout_s=2).connect()


def outlive(transport: MqttTransport, connections: int) -> None:
    """Return once so many connections were lost, and the next one has begun."""
    lost = 0
    while True:
        event = transport.receive(PATIENCE_S)
        assert event is not None
        lost += isinstance(event, Disconnected)
        if lost >= connections and isinstance(event, Connected):
            return


@pytest.mark.broker
def test_two_clients_of_one_name_are_told_so_once_by_a_broker_that_gives_no_reason(
    mosquitto: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    both = [MqttTransport(mosquitto.url, "one-name", jitter=lambda _low, _high: 0.05) for _ in range(2)]
    for transport in both:
        transport.connect()
    outlive(both[0], mqtt.MANY_CLOSINGS + 2)
    for transport in both:
        transport.close()
    told = [
        record.getMessage()
        for record in caplog.records
        if "does another client connect as one-name" in record.getMessage()
    ]
    assert len(told) == 2  # once by each
    assert "copy of this one's folder or certificate" in told[0]


def test_a_session_that_was_taken_over_says_by_whom(caplog: pytest.LogCaptureFixture) -> None:
    accepted, taken_over = b"\x20\x03\x00\x00\x00", b"\xe0\x01\x8e"
    with listening(accepted + taken_over) as url:
        transport = MqttTransport(url, "one-name", jitter=lambda _low, _high: 0.01)
        transport.connect()
        outlive(transport, 2)
        transport.close()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition("; if")[0] for line in told] == [
        f"{url}: Session taken over; another client connects as one-name"
    ]


@pytest.mark.broker
def test_a_broker_that_ended_twice_is_no_client_of_the_same_name(
    tmp_path: Path, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    broker = start_broker(tmp_path, "mosquitto", port=free_port)
    transport = MqttTransport(broker.url, "one-name", jitter=lambda _low, _high: 0.05)
    transport.connect()
    for _ in range(mqtt.MANY_CLOSINGS - 1):
        broker.stop()
        broker = start_broker(tmp_path, "mosquitto", port=free_port)
        outlive(transport, 1)
    transport.close()
    broker.stop()
    assert "one-name" not in caplog.text
