"""A revoked device is gone for the coordinator, though its broker keeps what it said: over a real mosquitto.

The access list that takes its rights also refuses its last word and its will.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.config_sections import RunConfig
from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from coordinator.identity.revoked_list import REVOKED_FILE
from coordinator.identity.signing_key import open_signing_key
from coordinator.runtime.server import Server
from coordinator.storage.store import Store
from edge_client.config import ClientConfig
from edge_client.protocol.messages import read_message, write_message
from edge_client.protocol.topics import Topics
from edge_client.runtime.client import Client
from edge_client.transport.base import Message, Transport, Will
from edge_client.transport.clock import SystemClock
from edge_client.transport.mqtt import MqttTransport
from tests.support import softmax_program
from tests.support.guarded_broker import FEDERATION, PATIENCE_S, Guarded, GuardedClient, guarded_broker, try_connect
from tests.support.live_federation import soon
from tests.support.virtual_federation import config, seed_program

GONE, HERE = "d02", ("d00", "d01")
SCOUT = "scout"
RUN = RunConfig(method="fedavg", rounds=2, name="run", settings={"local-steps": 3, "batch-size": 8})
TOPICS = Topics(FEDERATION)
pytestmark = pytest.mark.broker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Guarded]:
    with guarded_broker(tmp_path, GONE, *HERE, SCOUT) as found:
        yield found


@contextmanager
def device(broker: Guarded, folder: Path, cid: str) -> Iterator[threading.Event]:
    """A device that lives in a thread; -> what is set once it is connected."""
    connected = threading.Event()
    settings = ClientConfig(
        federation=FEDERATION,
        device_id=cid,
        broker=broker.url,
        data=folder / cid,
        state=folder / cid / "state",
        signing_keys=(open_signing_key(broker.work.folder / "coordinator").public,),
        min_battery_percent=0,
    )

    def dial(will: Callable[[], Will]) -> Transport:
        credentials = broker.credentials(cid)
        return MqttTransport(broker.url, f"{FEDERATION}.{cid}", will=will, credentials=credentials, jitter=soon)

    client = Client(
        settings,
        dial,
        local=softmax_program.grouped_fleet(3, 2)[cid],
        clock=SystemClock(),
        rng=np.random.default_rng(int(cid[1:])),
        open_engine=lambda *_, **__: softmax_program.SoftmaxEngine(),
        tell=lambda event: connected.set() if event["event"] == "connected" else None,
    )
    thread = threading.Thread(target=client.run)
    thread.start()
    try:
        assert connected.wait(PATIENCE_S)
        yield connected
    finally:
        client.stop()
        thread.join(PATIENCE_S)


class ThreadedCoordinator:
    """A coordinator over this broker in a thread, with its events."""

    def __init__(self, broker: Guarded, folder: Path, **changes: Any) -> None:  # noqa: ANN401 - keys of the file
        self.events: list[dict[str, Any]] = []
        self.come = threading.Condition()
        signing = broker.work.folder / "coordinator"
        given: dict[str, Any] = {
            "federation": FEDERATION,
            "signing_folder": signing,
            "runs": (RUN,),
            "exit_when_done": True,
        }
        self.config = config(folder, **given | changes)
        self.store = Store(folder / "store")
        seed_program(self.store)

        def dial(will: Will | None) -> Transport:
            name, credentials = f"{FEDERATION}.coordinator.0", broker.credentials(COORDINATOR_CLIENT_ID)
            return MqttTransport(broker.url, name, will=will, credentials=credentials, jitter=soon)

        self.server = Server(self.config, self.store, dial=dial, clock=SystemClock(), watch=self._watch)

    def _watch(self, event: Any) -> None:  # noqa: ANN401
        with self.come:
            self.events.append(dict(event))
            self.come.notify_all()

    def devices(self, kind: str) -> set[str]:
        return {event["device"] for event in self.events if event["event"] == kind}


def revoke(broker: Guarded, *names: str) -> None:
    """What an operator does; returns when the broker has read it."""
    for name in (*names, SCOUT):
        broker.work.revoke(name)
    broker.reload()
    while try_connect(broker.url, broker.credentials(SCOUT)) == "":
        pass


@pytest.mark.parametrize("knows", [True, False])
def test_a_revoked_device_joins_no_new_run_though_the_broker_keeps_its_presence(
    broker: Guarded, tmp_path: Path, *, knows: bool
) -> None:
    """Also where the list was not brought to the coordinator, which then `knows` nothing of it."""
    with device(broker, tmp_path, GONE):
        witness = broker.client(COORDINATOR_CLIENT_ID)
        witness.subscribe(TOPICS.state(GONE))
        assert witness.transport.receive(PATIENCE_S) is not None  # its presence is at the broker
        revoke(broker, GONE)
    witness.subscribe(TOPICS.state(GONE))
    assert b'"s":"on"' in next_message(witness).payload  # its last word was refused
    broker.leave()
    if not knows:
        (broker.work.folder / "coordinator" / REVOKED_FILE).unlink()
    with device(broker, tmp_path, HERE[0]), device(broker, tmp_path, HERE[1]):
        coordinator = ThreadedCoordinator(broker, tmp_path / "run", devices=2, deadline_s=20.0)
        with closing(coordinator.store):
            coordinator.server.run()
    assert coordinator.devices("joined") == set(HERE)
    assert sum(event["event"] == "round" for event in coordinator.events) == RUN.rounds


def test_a_training_goes_on_at_once_without_a_device_that_is_revoked_while_it_is_asked(
    broker: Guarded, tmp_path: Path
) -> None:
    """The device holds its task and says nothing; neither the goal nor the quorum of all devices waits for it."""
    coordinator = ThreadedCoordinator(broker, tmp_path / "run", devices=3, deadline_s=600.0)
    mute = broker.client(GONE)
    mute.subscribe(*TOPICS.device_filters(GONE))
    here = write_message("st", ident="1", t_ms=0, s="on", bd=1, caps={"engine": "onnx", "n": 40})
    with closing(coordinator.store), device(broker, tmp_path, HERE[0]), device(broker, tmp_path, HERE[1]):
        thread = threading.Thread(target=coordinator.server.run)
        thread.start()
        try:
            while not asked(heard := next_message(mute)):
                if heard.topic == TOPICS.coord():
                    mute.publish(TOPICS.state(GONE), here, retain=True)
            revoke(broker, GONE)
            thread.join(4 * PATIENCE_S)
            assert not thread.is_alive()
        finally:
            coordinator.server.stop()
            thread.join(PATIENCE_S)
    rounds = [event for event in coordinator.events if event["event"] == "round"]
    assert [record["refused"] for record in rounds] == [{GONE: "revoked"}] * RUN.rounds
    assert coordinator.devices("revoked") == {GONE}


def next_message(client: GuardedClient) -> Message:
    event = client.transport.receive(PATIENCE_S)
    assert isinstance(event, Message)
    return event


def asked(heard: Message) -> bool:
    return heard.topic == TOPICS.down(GONE) and read_message(heard.payload, "t")["k"] == "task"
