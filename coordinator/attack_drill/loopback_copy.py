"""A copy of an installation in a temporary folder: what `provision` writes, mosquitto, and what takes the messages.

Its broker listens on a free port of 127.0.0.1. Nothing else is dialled.
"""

from __future__ import annotations

import datetime as dt
import getpass
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.attack_drill.stubborn_transport import StubbornTransport
from coordinator.config import CoordinatorConfig
from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from coordinator.identity.provision_plan import ProvisionPlan
from coordinator.identity.provisioning import Provisioner
from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import free_port, start_until_we_end, terminate_process
from coordinator.runtime.block_server import BlockServer
from coordinator.runtime.dispatcher import Dispatcher
from coordinator.runtime.presence import FleetPresence
from coordinator.runtime.sender import CoordinatorSender
from coordinator.storage.event_log import EventLog
from coordinator.storage.store import Store
from edge_client.errors import NetworkError
from edge_client.protocol import messages
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Connected, Disconnected, Message
from edge_client.transport.clock import SystemClock
from edge_client.transport.mqtt import MqttTransport
from edge_client.transport.tls import Credentials

FEDERATION, HOSTILE = "drill", "hostile"
FLEET = ("honest", "honest-2", "honest-3", "honest-4")
SUM_FLEET = (*FLEET, "honest-5", "honest-6")  # of a masked sum two may drop out, and five remain
HONEST, HONEST_SAMPLES = FLEET[0], 40
TOPICS = Topics(FEDERATION)
PATIENCE_S, REFUSAL_S = 20.0, 3.0
SHA256 = "ab" * 32  # of no blob


class BrokerClient:
    """A client of the broker with the certificate of `name`."""

    def __init__(self, name: str, transport: MqttTransport) -> None:
        self.name, self.transport, self._marks = name, transport, 0

    def mark(self, topic: str) -> bytes:
        """Say something new on a topic that is ours; -> what was said. It follows all that we sent before."""
        self._marks += 1
        said = f"mark {self.name} {self._marks}".encode()
        self.transport.publish(topic, said)
        return said

    def until(self, payload: bytes) -> list[Message]:
        """Everything that arrives before a message with this payload. Raises NetworkError."""
        before: list[Message] = []
        while True:
            event = self.transport.receive(PATIENCE_S)
            if event is None or isinstance(event, Disconnected):
                raise NetworkError(f"{self.name} does not hear the broker", hint="run the drill again")
            if isinstance(event, Message):
                if event.payload == payload:
                    return before
                before.append(event)


def provisioned_credentials(work: Provisioner, name: str) -> Credentials:
    """The files of a device, or of the coordinator."""
    ours = name == COORDINATOR_CLIENT_ID
    home = work.folder / ("coordinator" if ours else f"devices/{name}")
    stem = "coordinator" if ours else "device"
    return Credentials(ca=home / "ca.crt", certificate=home / f"{stem}.crt", key=home / f"{stem}.key")


@dataclass(frozen=True, kw_only=True)
class Installation:
    """What `provision` writes for a hostile device and a fleet of honest ones, and a broker that runs on it."""

    work: Provisioner
    folder: Path

    def credentials(self, name: str) -> Credentials:
        return provisioned_credentials(self.work, name)

    def connect(self, name: str, into: ExitStack) -> BrokerClient:
        """A connection that `into` closes; a device's has subscribed. Raises NetworkError."""
        made = StubbornTransport(
            self.work.plan.broker,
            f"{FEDERATION}.{name}",
            credentials=self.credentials(name),
            connect_timeout_s=REFUSAL_S,
        )
        made.connect()
        into.callback(made.close)
        if made.receive(PATIENCE_S) != Connected():
            raise NetworkError(f"{name} cannot connect to the copy's broker", hint="run the drill again")
        if name != COORDINATOR_CLIENT_ID:
            made.subscribe(*TOPICS.device_filters(name))
        return BrokerClient(name, made)


class LoopbackCopy:
    """The copy: `coordinator` hears everything, `hostile` attacks, `honest` is another device."""

    def __init__(self, site: Installation, config: CoordinatorConfig, store: Store, into: ExitStack) -> None:
        self.site, self.store = site, store
        self.coordinator = site.connect(COORDINATOR_CLIENT_ID, into)
        self.coordinator.transport.subscribe(f"fc/v1/{FEDERATION}/#", as_published=True)
        self.hostile, self.honest = site.connect(HOSTILE, into), site.connect(HONEST, into)
        clock = SystemClock()
        key = open_signing_key(site.work.folder / "coordinator")
        boot = "0" * 16
        sender = CoordinatorSender(
            topics=TOPICS,
            clock=clock,
            epoch=1,
            boot=boot,
            block=config.transfer.block,
            spread_ms=0,
            transport=self.coordinator.transport,
            signature=key.sign_record(boot, 1, FEDERATION),
            trusted=(key.public,),
        )
        self.dispatcher = Dispatcher(
            clock=clock,
            store=store,
            sender=sender,
            downloads=BlockServer(store.blobs, sender, config.transfer.in_flight_bytes),
            fleet=FleetPresence(config.fleet.max_devices),
            event_log=EventLog(site.folder / "metrics.jsonl", store.events, lambda _: None, clock.unix_ms),
        )
        self.take(self.honest, TOPICS.state(HONEST), presence(HONEST_SAMPLES), retain=True)

    def take(self, who: BrokerClient, topic: str, payload: bytes, *, retain: bool = False) -> list[Message]:
        """`who` publishes; -> what reached the coordinator, which has dealt with it."""
        who.transport.publish(topic, payload, retain=retain)
        heard = self.coordinator.until(who.mark(TOPICS.request(who.name)))
        for message in heard:
            if "/dn/" not in message.topic:  # it hears its own messages to devices as well
                self.dispatcher.dispatch(message)
        return heard

    def told(self, who: BrokerClient) -> list[Message]:
        """What the coordinator has told this device since the last call."""
        return who.until(self.coordinator.mark(TOPICS.down(who.name)))

    def honest_is_served(self) -> bool:
        """Whether an honest device's request is answered."""
        self.told(self.honest)
        self.take(self.honest, TOPICS.request(HONEST), request("get", sha256=SHA256, block=4096, at=[[0, 1]]))
        return len(self.told(self.honest)) == 1


def presence(n: int, engine: str = "onnx") -> bytes:
    """A device's announcement with `n` samples."""
    return messages.write_message("st", ident="d-1", t_ms=0, s="on", bd=1, caps={"engine": engine, "n": n})


def request(kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - the message's fields
    """A device's request."""
    return messages.write_message(kind, ident="d-2", t_ms=0, **fields)


@contextmanager
def installation(folder: Path, program: str) -> Iterator[Installation]:
    """Files and a broker that ends with the block."""
    plan = ProvisionPlan(federation=FEDERATION, hosts=("localhost", "127.0.0.1"), port=free_port())
    work = Provisioner(folder=folder / "keys", plan=plan, now=dt.datetime.now(dt.timezone.utc))
    work.write_infrastructure()
    for cid in (HOSTILE, *SUM_FLEET):
        work.add_device(cid)
    conf = work.folder / "broker" / "mosquitto.conf"
    # Started by root it would become another user, who cannot read these keys.
    conf.write_text(conf.read_text() + f"user {getpass.getuser()}\n")
    with ExitStack() as stack:
        log = stack.enter_context((folder / "broker.log").open("wb"))
        process = start_until_we_end([program, "-c", str(conf)], log)
        stack.callback(terminate_process, process, timeout_s=REFUSAL_S)
        yield Installation(work=work, folder=folder)


@contextmanager
def loopback_copy(site: Installation, config: CoordinatorConfig) -> Iterator[LoopbackCopy]:
    """A copy that ends with the block."""
    with ExitStack() as stack:
        store = stack.enter_context(closing(Store(site.folder / "store")))
        yield LoopbackCopy(site, config, store, stack)
