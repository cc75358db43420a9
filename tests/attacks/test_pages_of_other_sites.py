"""The broker that `serve` starts has no accounts: a page of another site, or another machine, does not reach it."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from coordinator import local_broker as brokers
from tests.support.ports import free_port

CONNECT = bytes.fromhex("1010 0004 4d515454 04 02 003c 0004 74657374")  # MQTT 3.1.1, client id "test"
CONNACK = bytes.fromhex("20020000")
KINDS = ["embedded", pytest.param("mosquitto", marks=pytest.mark.broker)]
OURS = ["http://127.0.0.1:8090", "http://localhost:8090", "http://[::1]:8090", "https://localhost", None]
FOREIGN = [
    "https://evil.example",
    "http://127.0.0.1.evil.example",
    "http://localhost.evil.example:8090",
    "http://127.0.0.1:8090@evil.example",
    "http://[::1",
    "file://",
    "null",
]


def answer(port: int, origin: str | None) -> bytes:
    """What the broker says to a client that comes with this origin; raises InvalidStatus where it may not speak."""
    named = None if origin is None else Origin(origin)
    with connect(f"ws://127.0.0.1:{port}", origin=named, subprotocols=[Subprotocol("mqtt")], proxy=None) as page:
        page.send(CONNECT)
        said = page.recv(10)
    assert isinstance(said, bytes)
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_only_pages_of_this_machine_reach_a_broker_without_accounts(kind: str, tmp_path: Path) -> None:
    port = free_port()
    with brokers.start_broker(tmp_path, kind, web_ports=[port]):
        for origin in OURS:
            assert answer(port, origin) == CONNACK, origin
        for origin in FOREIGN:
            with pytest.raises(InvalidStatus) as refused:
                answer(port, origin)
            assert refused.value.response.status_code == 403, origin
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0  # it ends with the broker


@pytest.mark.parametrize("kind", KINDS)
def test_other_machines_reach_no_port_of_a_broker_without_accounts(kind: str, tmp_path: Path) -> None:
    port = free_port()
    with brokers.start_broker(tmp_path, kind, web_ports=[port]) as broker:
        ours = {port, int(broker.url.rpartition(":")[2])}
        here = psutil.Process()
        open_ports = [one for each in (here, *here.children()) for one in each.net_connections()]
        listens = {(each.laddr.ip, each.laddr.port) for each in open_ports if each.status == psutil.CONN_LISTEN}
    assert {place for place in listens if place[1] in ours} == {("127.0.0.1", each) for each in ours}


@pytest.mark.broker
def test_text_and_frames_beyond_the_brokers_limit_end_their_connection_alone(tmp_path: Path) -> None:
    port = free_port()
    with brokers.start_broker(tmp_path, "mosquitto", web_ports=[port]):
        for bad in ("text", bytes(2 << 20)):
            with connect(f"ws://127.0.0.1:{port}", subprotocols=[Subprotocol("mqtt")], proxy=None) as page:
                page.send(bad)
                with pytest.raises(ConnectionClosed):
                    page.recv(10)
        assert answer(port, None) == CONNACK
