"""A copy of an installation in a temporary folder: what `provision` writes, mosquitto, and what takes the messages.

Its broker listens on a free port of 127.0.0.1. Nothing else is dialled.
"""

from __future__ import annotations

import datetime as dt
import getpass
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from coordinator.identity.provisioning import Provisioner, ProvisionPlan
from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import free_port, terminate_process
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

FEDERATION, HOSTILE, HONEST = "drill", "hostile", "honest"
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


@dataclass
class LoopbackCopy:
    """The copy: `coordinator` hears everything, `hostile` attacks, `honest` is another device."""

    work: Provisioner
    store: Store
    broker: subprocess.Popen[bytes]
    open: ExitStack

    def __post_init__(self) -> None:
        self.coordinator = self.connect(COORDINATOR_CLIENT_ID)
        self.coordinator.transport.subscribe(f"fc/v1/{FEDERATION}/#", as_published=True)
        self.hostile, self.honest = self.connect(HOSTILE), self.connect(HONEST)
        for device in (self.hostile, self.honest):
            device.transport.subscribe(*TOPICS.device_filters(device.name))
        clock = SystemClock()
        key = open_signing_key(self.work.folder / "coordinator")
        boot = "0" * 16
        sender = CoordinatorSender(
            topics=TOPICS,
            clock=clock,
            epoch=1,
            boot=boot,
            block=4096,
            spread_ms=0,
            transport=self.coordinator.transport,
            signature=key.sign_record(boot, 1, FEDERATION),
            trusted=(key.public,),
        )
        self.dispatcher = Dispatcher(
            clock=clock,
            store=self.store,
            sender=sender,
            downloads=BlockServer(self.store.blobs, sender),
            fleet=FleetPresence(10),
            event_log=EventLog(self.work.folder / "metrics.jsonl", self.store.events, lambda _: None, clock.unix_ms),
        )
        self.take(self.honest, TOPICS.state(HONEST), presence(40), retain=True)

    def credentials(self, name: str) -> Credentials:
        """The files of a device, or of the coordinator."""
        ours = name == COORDINATOR_CLIENT_ID
        home = self.work.folder / ("coordinator" if ours else f"devices/{name}")
        stem = "coordinator" if ours else "device"
        return Credentials(ca=home / "ca.crt", certificate=home / f"{stem}.crt", key=home / f"{stem}.key")

    def connect(self, name: str) -> BrokerClient:
        """Raises NetworkError."""
        made = MqttTransport(
            self.work.plan.broker,
            TOPICS.client_id(name) if name != COORDINATOR_CLIENT_ID else f"{FEDERATION}.{name}",
            credentials=self.credentials(name),
            connect_timeout_s=REFUSAL_S,
        )
        made.connect()
        self.open.callback(made.close)
        if made.receive(PATIENCE_S) != Connected():
            raise NetworkError(f"{name} cannot connect to the copy's broker", hint="run the drill again")
        return BrokerClient(name, made)

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


def presence(n: int) -> bytes:
    """A device's announcement with `n` samples."""
    return messages.write_message("st", ident="d-1", t_ms=0, s="on", bd=1, caps={"engine": "onnx", "n": n})


def request(kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - the message's fields
    """A device's request."""
    return messages.write_message(kind, ident="d-2", t_ms=0, **fields)


@contextmanager
def loopback_copy(folder: Path, program: str) -> Iterator[LoopbackCopy]:
    """A copy that ends with the block."""
    plan = ProvisionPlan(federation=FEDERATION, hosts=("localhost", "127.0.0.1"), port=free_port())
    work = Provisioner(folder=folder / "keys", plan=plan, now=dt.datetime.now(dt.timezone.utc))
    work.write_infrastructure()
    for cid in (HOSTILE, HONEST):
        work.add_device(cid)
    conf = work.folder / "broker" / "mosquitto.conf"
    # Started by root it would become another user, who cannot read these keys.
    conf.write_text(conf.read_text() + f"user {getpass.getuser()}\n")
    with ExitStack() as stack:
        log = stack.enter_context((folder / "broker.log").open("wb"))
        process = subprocess.Popen([program, "-c", str(conf)], stdout=log, stderr=log, start_new_session=True)
        stack.callback(terminate_process, process, timeout_s=REFUSAL_S)
        store = stack.enter_context(closing(Store(folder / "store")))
        yield LoopbackCopy(work, store, process, stack.enter_context(ExitStack()))
