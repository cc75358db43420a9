"""Brokers of several makers, each as child processes in a folder of its own, on free ports of loopback.

`KINDS` names them, with what the protocol may expect of each; tests/conformance/test_brokers.py looks whether that is
so. A kind that is not installed skips its tests.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version as version_of
from pathlib import Path

import pytest

from coordinator.local_broker import SYSTEM_FOLDERS, Broker, start_broker
from tests.support.ports import free_port

BY_HAND = "make brokers"  # CI installs mosquitto and the embedded broker (SKIPS_IN_CI)
START_TIMEOUT_S = 120.0  # three nodes of RabbitMQ, on a busy machine
RABBITMQ_FOLDER = "/usr/lib/rabbitmq/bin"  # the one on PATH changes the user and the folder
PROGRAMS = {"mosquitto": "mosquitto", "nats": "nats-server"}
NATS_CONF = """\
listen: 127.0.0.1:{inner}
server_name: fedcenters
jetstream {{ store_dir: "{folder}" }}
mqtt {{ listen: 127.0.0.1:{port} }}
"""
RABBITMQ_CONF = """\
listeners.tcp = none
mqtt.listeners.tcp.default = 127.0.0.1:{port}
mqtt.allow_anonymous = true
log.console = true
log.console.level = warning
log.file = false
vm_memory_high_watermark.absolute = 1GB
disk_free_limit.absolute = 1MB
cluster_formation.peer_discovery_backend = classic_config
{peers}"""


@dataclass(frozen=True, kw_only=True)
class BrokerKind:
    """A broker, and its answers to what the protocol can use and does not need."""

    name: str
    install: str  # how to get it
    mqtt5: bool = False
    retained_by_pattern: bool = True  # a filter with + or # brings them
    retained_everywhere: bool = True  # a retained message is known at each node of a cluster
    ends_earlier: bool = True  # a second connection with a client id ends the first
    minds_leave: bool = True  # a device that disconnects in good order has no will, each time
    notices_silence: bool = True  # a device that says nothing for longer than its keepalive is lost
    nodes: int = 1


RABBITMQ = BrokerKind(
    name="rabbitmq",
    install="apt install rabbitmq-server",
    retained_by_pattern=False,
)
KINDS = {
    kind.name: kind
    for kind in (
        BrokerKind(name="mosquitto", install="apt install mosquitto", mqtt5=True),
        BrokerKind(
            name="embedded", install="pip install amqtt", ends_earlier=False, minds_leave=False, notices_silence=False
        ),
        BrokerKind(name="nats", install="apt install nats-server"),
        RABBITMQ,
        replace(RABBITMQ, name="rabbitmq-cluster", nodes=3, retained_everywhere=False),
    )
}


@dataclass
class Nodes:
    """A broker that runs: an address for each of its nodes, and what kills and starts the first node."""

    urls: Sequence[str]
    kill: Callable[[], None]
    start: Callable[[], None]

    @property
    def url(self) -> str:
        return self.urls[0]

    def restart(self) -> None:
        """As after a crash of the first node, whose address stays the same."""
        self.kill()
        self.start()


def find_program(name: str) -> str | None:
    """A program that may be in a folder that only root's PATH has."""
    folders = RABBITMQ_FOLDER if name == "rabbitmq-server" else os.pathsep.join((os.environ["PATH"], *SYSTEM_FOLDERS))
    return shutil.which(name, path=folders)


def installed_version(name: str) -> str | None:
    """The version of a kind on this machine; None where it is not installed."""
    if name == "embedded":
        return version_of("amqtt")
    program = find_program(PROGRAMS.get(name, "rabbitmq-server"))
    if program is None:
        return None
    if name not in PROGRAMS:  # RabbitMQ's folder has its version
        said = str(Path(program).resolve())
    else:
        said = subprocess.run(
            [program, "-h" if name == "mosquitto" else "--version"], capture_output=True, text=True, check=False
        ).stdout
    found = re.search(r"(?:version |v|rabbitmq_server-)(\d[\d.]*\d)", said)
    return found[1] if found else "of unknown version"


def skip_unless_installed(name: str) -> None:
    """Skip, in CI too, where it does not install this kind."""
    if installed_version(name) is None:
        pytest.skip(f"{name} is not installed ({KINDS[name].install}); {BY_HAND}")


@contextmanager
def running(name: str, folder: Path) -> Iterator[Nodes]:
    """A broker of this kind, killed at the end. Skips where it is not installed."""
    skip_unless_installed(name)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if name == "nats":
            yield _nats(folder, stack)
        elif name.startswith("rabbitmq"):
            yield _rabbitmq(folder, KINDS[name].nodes, stack)
        else:
            yield _own(name, folder, stack)


def _own(name: str, folder: Path, stack: contextlib.ExitStack) -> Nodes:
    """The two brokers that fedcenters starts itself."""
    port = free_port()
    running: list[Broker] = []

    def start() -> None:
        running.append(start_broker(folder, name, port=port))

    def kill() -> None:
        while running:
            broker = running.pop()
            if broker.pid is not None:
                os.kill(broker.pid, signal.SIGKILL)
            broker.stop()

    stack.callback(kill)
    start()
    return Nodes([f"mqtt://127.0.0.1:{port}"], kill, start)


@dataclass
class Daemon:
    """A child process in a group of its own, which says in its log that it is ready, or listens on `port`."""

    command: Sequence[str]
    log: Path
    port: int
    says: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.begin()
        self.wait()

    def begin(self) -> None:
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | self.environment,
                cwd=self.log.parent,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return once clients can connect."""
        until_s = time.monotonic() + START_TIMEOUT_S
        while self.says not in self.log.read_text(errors="replace") or not listens(self.port):
            if self.process is None or self.process.poll() is not None or time.monotonic() > until_s:
                said = self.log.read_text(errors="replace")[-3_000:]
                raise RuntimeError(f"{self.command[0]} does not start: {said}")
            time.sleep(0.1)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def listens(port: int) -> bool:
    """Whether something listens on this port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _nats(folder: Path, stack: contextlib.ExitStack) -> Nodes:
    port, conf = free_port(), folder / "nats.conf"
    conf.write_text(NATS_CONF.format(inner=free_port(), port=port, folder=folder / "store"))
    server = Daemon([str(find_program("nats-server")), "-c", str(conf)], folder / "nats.log", port)
    stack.callback(server.kill)
    server.start()
    return Nodes([f"mqtt://127.0.0.1:{port}"], server.kill, server.start)


def _rabbitmq(folder: Path, count: int, stack: contextlib.ExitStack) -> Nodes:
    """Nodes of one cluster."""
    epmd_port, ports = start_epmd(folder, stack), [free_port() for _ in range(count)]
    names = [f"fc{i}-{port}@localhost" for i, port in enumerate(ports)]
    peers = [f"cluster_formation.classic_config.nodes.{i} = {name}\n" for i, name in enumerate(names)]
    made = []
    for name, port in zip(names, ports, strict=True):
        conf = RABBITMQ_CONF.format(port=port, peers="".join(peers))
        made.append(rabbitmq_node(folder / name, name, port, conf, epmd_port))
        stack.callback(made[-1].kill)
    for node in made:
        node.begin()
    for node in made:
        node.wait()
    return Nodes([f"mqtt://127.0.0.1:{port}" for port in ports], made[0].kill, made[0].start)


def start_epmd(folder: Path, stack: contextlib.ExitStack) -> int:
    """The port of a name server through which Erlang's nodes find one another; one of our own, which ends with us."""
    port = free_port()
    epmd = Daemon(["epmd", "-port", str(port), "-address", "127.0.0.1"], folder / "epmd.log", port)
    stack.callback(epmd.kill)
    epmd.start()
    return port


def rabbitmq_node(home: Path, name: str, port: int, conf: str, epmd_port: int) -> Daemon:
    """A node that has everything in `home`."""
    home.mkdir()
    (home / "rabbitmq.conf").write_text(conf)
    (home / "plugins").write_text("[rabbitmq_mqtt, rabbitmq_auth_mechanism_ssl].\n")
    cookie = home / ".erlang.cookie"
    cookie.write_text(f"fedcenters-{epmd_port}")
    cookie.chmod(0o600)
    environment = {
        "HOME": str(home),
        "ERL_EPMD_PORT": str(epmd_port),
        "RABBITMQ_NODENAME": name,
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(home / "mnesia"),
        "RABBITMQ_LOG_BASE": str(home / "log"),
        "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_ALLOW_INPUT": "true",  # no shell between this process and Erlang's
        "RABBITMQ_SERVER_START_ARGS": "-noinput",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none",
    }
    return Daemon([str(find_program("rabbitmq-server"))], home / "node.log", port, "completed with", environment)
