"""A real mosquitto with what `provision` generates, and clients that come to it honestly or not.

Nothing here sleeps. A client's own later message, seen to arrive, tells that the broker has dealt with everything that
the client sent before; mosquitto keeps the order of one client's packets.
"""

from __future__ import annotations

import datetime as dt
import getpass
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paho.mqtt.enums import MQTTProtocolVersion

from coordinator.attack_drill.loopback_copy import BrokerClient, provisioned_credentials
from coordinator.attack_drill.stubborn_transport import StubbornTransport
from coordinator.identity.provision_plan import ENROL_PORT, ProvisionPlan
from coordinator.identity.provisioning import Provisioner
from coordinator.local_broker import find_mosquitto
from edge_client.transport import mqtt
from edge_client.transport.base import Connected
from edge_client.transport.mqtt import MqttTransport
from edge_client.transport.tls import Credentials
from tests.support.patience import patience
from tests.support.ports import free_port

FEDERATION = "demo"
HOSTS = ("localhost", "127.0.0.1")
PATIENCE_S = patience(60.0)


def now() -> dt.datetime:
    return dt.datetime.now(dt.timezone.utc)


def provision_federation(
    folder: Path,
    *devices: str,
    federation: str = FEDERATION,
    port: int = 8883,
    hosts: tuple[str, ...] = HOSTS,
    enrol_port: int = ENROL_PORT,
) -> Provisioner:
    """A federation's files, as the command makes them."""
    plan = ProvisionPlan(federation=federation, hosts=hosts, port=port, enrol_port=enrol_port)
    work = Provisioner(folder=folder, plan=plan, now=now())
    work.write_infrastructure()
    for cid in devices:
        work.add_device(cid)
    return work


@contextmanager
def run_mosquitto(configuration: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """mosquitto over a configuration file, from its first answer to its end."""
    program = find_mosquitto()
    assert program is not None  # such a test is marked `broker`
    # Started by root it would become another user, who cannot read this user's keys.
    told = configuration.with_name("as-we-are.conf")
    told.write_text(configuration.read_text() + f"user {getpass.getuser()}\n")
    with (
        configuration.with_name("log").open("wb") as log,
        subprocess.Popen([program, "-c", str(told)], stdout=log, stderr=log) as process,
    ):
        try:
            _until_it_serves(port, process)
            yield process
        finally:
            process.terminate()


def _until_it_serves(port: int, process: subprocess.Popen[bytes]) -> None:
    """Return when the broker reads: its port is open before it handles signals, and a SIGHUP then would end it."""
    until_s = time.monotonic() + PATIENCE_S
    while not _answers(port):
        assert process.poll() is None
        assert time.monotonic() < until_s


def _answers(port: int) -> bool:
    """Whether something other than the kernel ends a connection that speaks neither MQTT nor TLS."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as link:
            link.sendall(b"GET / HTTP/1.1\r\n\r\n")
            link.recv(1)
    except ConnectionResetError:
        return True
    except OSError:
        return False
    return True


@dataclass
class Guarded:
    """A provisioned federation whose broker runs."""

    work: Provisioner
    process: subprocess.Popen[bytes]
    _open: list[GuardedClient] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.work.plan.broker

    def credentials(self, name: str) -> Credentials:
        return provisioned_credentials(self.work, name)

    def client(self, name: str, *, client_id: str = "", speaking: MQTTProtocolVersion | None = None) -> GuardedClient:
        """A client with the certificate of `name`."""
        if speaking is not None:
            mqtt._broker_versions[self.url] = speaking
        ident = client_id or f"{FEDERATION}.{name}"
        credentials = self.credentials(name)
        made = GuardedClient(name, StubbornTransport(self.url, ident, credentials=credentials))
        self._open.append(made)
        return made

    def reload(self) -> None:
        """What an operator does after a revocation."""
        self.process.send_signal(signal.SIGHUP)

    def leave(self) -> None:
        for client in self._open:
            client.transport.close()
        self._open.clear()
        mqtt._broker_versions.pop(self.url, None)


class GuardedClient(BrokerClient):
    """A connected client."""

    def __init__(self, name: str, transport: MqttTransport) -> None:
        super().__init__(name, transport)
        transport.connect()
        assert transport.receive(PATIENCE_S) == Connected()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self.transport.publish(topic, payload, retain=retain)

    def subscribe(self, *filters: str) -> None:
        self.transport.subscribe(*filters)

    def settle(self, topic: str) -> None:
        """Return when the broker has dealt with all that we sent; `topic` is one that we may write and hear."""
        self.until(self.mark(topic))


@contextmanager
def guarded_broker(folder: Path, *devices: str, hosts: tuple[str, ...] = HOSTS) -> Iterator[Guarded]:
    """A broker with the generated configuration, and `devices` that were provisioned for it."""
    port = free_port()
    work = provision_federation(folder / "keys", *devices, port=port, hosts=hosts)
    with run_mosquitto(work.folder / "broker" / "mosquitto.conf", port) as process:
        found = Guarded(work, process)
        try:
            yield found
        finally:
            found.leave()


def try_connect(url: str, credentials: Credentials, will: tuple[str, bytes] | None = None) -> str:
    """Dial without our own checks: "" when the broker answers CONNECT, else why the connection ended.

    A client that was let in vanishes without a DISCONNECT, so that the broker speaks its `will` (topic, payload).
    """
    host, port, _ = mqtt.parse_url(url)
    tls = ssl.create_default_context(cafile=str(credentials.ca))
    if credentials.certificate is not None and credentials.key is not None:
        tls.load_cert_chain(credentials.certificate, credentials.key)
    with closing(socket.create_connection((host, port), timeout=PATIENCE_S)) as plain:
        try:
            with tls.wrap_socket(plain, server_hostname=host) as link:
                link.sendall(_connect(will))
                return "" if link.recv(4)[:1] == b"\x20" else "closed without a word"
        except OSError as wrong:
            return str(wrong)


def _connect(will: tuple[str, bytes] | None) -> bytes:
    """A CONNECT of MQTT 3.1.1 with a clean session, a will at QoS 1 where there is one."""
    texts = [b"guest", *((will[0].encode(), will[1]) if will else ())]
    body = b"\x00\x04MQTT\x04" + (b"\x0e" if will else b"\x02") + b"\x00\x3c"
    body += b"".join(len(text).to_bytes(2, "big") + text for text in texts)
    return b"\x10" + bytes([len(body)]) + body
