"""The broker of one machine: it answers, it stops, and what goes wrong is said in one line."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from coordinator import local_broker as brokers
from coordinator.local_broker import Broker, start_broker
from edge_client.errors import NetworkError, RuntimeMissing, UsageError
from edge_client.transport.base import Connected, Message, Will
from edge_client.transport.mqtt import MqttTransport
from tests.support.patience import patience

PATIENCE_S = patience(60)
Event = TypeVar("Event", Connected, Message)
CONNECT = bytes.fromhex("10 10 00 04 4d 51 54 54 04 02 00 3c 00 04 74 65 73 74".replace(" ", ""))  # 3.1.1, id "test"


def answer_to_connect(url: str) -> bytes:
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=PATIENCE_S) as link:
        link.sendall(CONNECT)
        return link.recv(4)


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1]))) == 0


@pytest.mark.broker
def test_mosquitto_accepts_a_client(mosquitto: Broker) -> None:
    assert answer_to_connect(mosquitto.url) == b"\x20\x02\x00\x00"


def test_amqtt_accepts_a_client(amqtt_broker: Broker) -> None:
    assert answer_to_connect(amqtt_broker.url) == b"\x20\x02\x00\x00"


def test_amqtt_closes_a_connection_that_ends_without_a_word(amqtt_broker: Broker) -> None:
    with socket.create_connection(("127.0.0.1", int(amqtt_broker.url.rsplit(":", 1)[1])), timeout=PATIENCE_S) as link:
        link.shutdown(socket.SHUT_WR)
        assert link.recv(1) == b""  # the end of the broker's side; without it this waits until the timeout


def test_amqtt_delivers_what_a_device_sends_while_another_client_subscribes(amqtt_broker: Broker) -> None:
    """With retained messages amqtt waits while it looks through all subscriptions for a new connection."""
    with closing(MqttTransport(amqtt_broker.url, "watcher")) as watcher:
        watcher.connect()
        arrived(watcher, Connected)
        for i in range(20):
            watcher.publish(f"kept/{i}", b"kept", retain=True)
            watcher.subscribe(f"kept/{i}")
        watcher.subscribe("state/+")
        for number in range(3):
            with closing(MqttTransport(amqtt_broker.url, f"device-{number}")) as device:
                device.connect()
                device.publish(f"state/{number}", b"on", retain=True)
                for i in range(100):
                    watcher.subscribe(f"more/{number}/{i}")
                while arrived(watcher, Message).topic != f"state/{number}":
                    pass


def arrived(transport: MqttTransport, kind: type[Event]) -> Event:
    """The next event of this kind."""
    while (event := transport.receive(PATIENCE_S)) is not None:
        if isinstance(event, kind):
            return event
    pytest.fail(f"no {kind.__name__} within {PATIENCE_S} s")


@pytest.mark.broker
def test_a_stopped_mosquitto_leaves_no_process_and_no_file(mosquitto: Broker, tmp_path: Path) -> None:
    assert mosquitto.pid is not None
    mosquitto.stop()
    mosquitto.stop()
    assert not psutil.pid_exists(mosquitto.pid)
    assert not listens(mosquitto.url)
    assert list((tmp_path / "mosquitto").iterdir()) == []


@pytest.mark.broker
def test_mosquitto_ends_when_the_process_that_started_it_is_killed(tmp_path: Path, free_port: int) -> None:
    """Between two runs of `fc.federation` it stayed; that of `serve` until the next start."""
    start = f"start_broker(Path({str(tmp_path)!r}), 'mosquitto', port={free_port})"
    code = f"from coordinator.local_broker import *\nbroker = {start}\nprint(broker.pid, flush=True)\ninput()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as starter:
        assert starter.stdout is not None
        broker = psutil.Process(int(starter.stdout.readline()))
        watch = broker.children()
        starter.kill()
    _, alive = psutil.wait_procs([broker, *watch], timeout=PATIENCE_S)
    for process in alive:
        process.kill()
    assert (len(watch), alive) == (1, [])


def test_a_stopped_amqtt_leaves_no_thread(amqtt_broker: Broker) -> None:
    answer_to_connect(amqtt_broker.url)
    amqtt_broker.stop()
    amqtt_broker.stop()
    assert not listens(amqtt_broker.url)
    assert "amqtt" not in {t.name for t in threading.enumerate()}


@pytest.mark.parametrize("kind", [pytest.param("mosquitto", marks=pytest.mark.broker), "embedded"])
def test_a_port_in_use_is_named(kind: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NetworkError, match=rf"port {port}[\s\S]*hint: "):
            start_broker(tmp_path, kind, port=port)


@pytest.mark.parametrize("kind", [pytest.param("mosquitto", marks=pytest.mark.broker), "embedded"])
def test_a_port_that_is_taken_between_its_search_and_its_use_is_passed_over(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = iter([taken.getsockname()[1], brokers.free_port()])
        monkeypatch.setattr(brokers, "free_port", lambda: next(found))
        with start_broker(tmp_path, kind) as broker:
            assert answer_to_connect(broker.url) == b"\x20\x02\x00\x00"


@pytest.mark.parametrize("text", ["#!/bin/sh\necho 'libwebsockets missing'; exit 3\n", "not a program"])
def test_a_broken_mosquitto_is_named_when_asked_for_and_passed_over_when_not(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "mosquitto"
    broken.write_text(text)
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(brokers, "find_mosquitto", lambda: str(broken))
    with pytest.raises(RuntimeMissing, match="hint: use --broker embedded"):
        start_broker(tmp_path / "run", "mosquitto")
    with start_broker(tmp_path / "run", "auto") as broker:
        assert broker.kind == "embedded"


def test_without_mosquitto_the_embedded_broker_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "find_mosquitto", lambda: None)
    with start_broker(tmp_path) as broker:
        assert broker.kind == "embedded"
    with pytest.raises(RuntimeMissing, match="apt install mosquitto"):
        start_broker(tmp_path, "mosquitto")


def test_a_broker_at_a_url_is_used_and_left_running(amqtt_broker: Broker, tmp_path: Path) -> None:
    with start_broker(tmp_path, amqtt_broker.url) as broker:
        assert (broker.kind, broker.url) == ("external", amqtt_broker.url)
    assert listens(amqtt_broker.url)


def test_an_unreachable_url_is_a_network_error(free_port: int, tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="hint: start it"):
        start_broker(tmp_path, f"mqtt://127.0.0.1:{free_port}")


@pytest.mark.parametrize("wrong", ["rabbit", "http://localhost", "mqtt://", "mqtt://host:many", "mqtt://[::1"])
def test_a_broker_that_does_not_exist_is_a_usage_error(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="hint: "):
        start_broker(tmp_path, wrong)


def test_an_embedded_broker_ends_although_devices_are_connected(tmp_path: Path, free_port: int) -> None:
    broker = start_broker(tmp_path, "embedded", port=free_port)
    device = MqttTransport(broker.url, "demo.pi-1", will=Will("fc/v1/demo/st/pi-1", b"lost"))
    device.connect()
    assert device.receive(PATIENCE_S) == Connected()
    device.subscribe("fc/v1/demo/#")
    device.publish("fc/v1/demo/st/pi-1", b"on", retain=True)
    assert device.drain(0, PATIENCE_S)
    broker.stop()
    assert [thread.name for thread in threading.enumerate() if thread.name == "amqtt"] == []
    device.close()
