"""A device leaves retained messages on its own topics, where brokers keep them after it has left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from coordinator.runtime.block_server import BlockServer
from coordinator.runtime.dispatcher import Dispatcher
from coordinator.runtime.presence import FleetPresence
from coordinator.runtime.sender import MAX_DELETIONS, CoordinatorSender
from coordinator.storage.event_log import EventLog
from coordinator.storage.store import Store
from edge_client.protocol import messages
from edge_client.protocol.topics import Topics
from tests.support.guarded_broker import FEDERATION, PATIENCE_S, Guarded, GuardedClient, guarded_broker
from tests.support.virtual_time import VirtualClock

pytestmark = pytest.mark.broker
MALLORY, HONEST = "mallory", "honest"
TOPICS = Topics(FEDERATION)
PRESENCE = messages.write_message("st", ident="m-1", t_ms=0, s="on", bd=1, caps={"engine": "onnx", "n": 4})
LEFT = [
    *(TOPICS.upload(0, MALLORY, f"{i:016x}", 7) for i in range(40)),
    f"fc/v1/{FEDERATION}/in/0/{MALLORY}/no-label/x",
    TOPICS.request(MALLORY),
    TOPICS.state(MALLORY),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_broker(tmp_path_factory.mktemp("retained"), MALLORY, HONEST) as found:
        yield found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path)
    yield found
    found.close()


@pytest.fixture
def broker(fleet: Guarded) -> Iterator[Guarded]:
    yield fleet
    fleet.leave()


class Coordinator:
    """The part of a coordinator that takes messages, on a connection that tests pull."""

    def __init__(self, store: Store, client: GuardedClient) -> None:
        clock, self.client = VirtualClock(), client
        sender = CoordinatorSender(
            topics=TOPICS, clock=clock, epoch=1, boot="0" * 16, block=4096, spread_ms=0, transport=client.transport
        )
        self.dispatcher = Dispatcher(
            clock=clock,
            store=store,
            sender=sender,
            downloads=BlockServer(store.blobs, sender),
            fleet=FleetPresence(10),
            event_log=EventLog(store.folder / "metrics.jsonl", store.events, lambda _: None, clock.unix_ms),
        )
        sender.subscribe()

    def take(self, payload: bytes) -> None:
        """Dispatch everything up to a message with this payload."""
        for message in self.client.until(payload):
            self.dispatcher.dispatch(message)


def _kept(broker: Guarded) -> dict[str, bytes]:
    """Every retained message of the federation: topic -> payload."""
    late = broker.client(COORDINATOR_CLIENT_ID)
    late.subscribe(f"fc/v1/{FEDERATION}/#")
    return {message.topic: message.payload for message in late.until(late.mark(TOPICS.request("look")))}


def test_what_a_device_leaves_is_deleted_as_it_comes(broker: Guarded, store: Store) -> None:
    coordinator = Coordinator(store, broker.client(COORDINATOR_CLIENT_ID))
    coordinator.take(coordinator.client.mark(TOPICS.request("ready")))
    mallory, honest = broker.client(MALLORY), broker.client(HONEST)
    honest.publish(TOPICS.state(HONEST), PRESENCE, retain=True)
    coordinator.take(honest.mark(TOPICS.request(HONEST)))
    for topic in LEFT:
        mallory.publish(topic, bytes(1000), retain=True)
    coordinator.take(mallory.mark(TOPICS.request(MALLORY)))
    coordinator.take(coordinator.client.mark(TOPICS.request("done")))
    assert _kept(broker) == {TOPICS.state(HONEST): PRESENCE}
    assert list(coordinator.dispatcher.fleet.devices) == [HONEST]


def test_what_was_left_while_no_coordinator_was_there_is_deleted_when_one_comes(broker: Guarded, store: Store) -> None:
    mallory = broker.client(MALLORY)
    for topic in LEFT:
        mallory.publish(topic, bytes(1000), retain=True)
    mallory.transport.drain(0, 20.0)
    coordinator = Coordinator(store, broker.client(COORDINATOR_CLIENT_ID))
    for _ in range(2):  # the second mark follows the deletions
        coordinator.take(coordinator.client.mark(TOPICS.request("ready")))
    assert MALLORY not in "".join(_kept(broker))


def test_a_flood_of_what_is_deleted_does_not_hold_up_what_the_coordinator_says(broker: Guarded, store: Store) -> None:
    """Over a slow link 16,000 deletions waited after 14 seconds; tasks and models of all devices waited behind them."""
    coordinator = Coordinator(store, broker.client(COORDINATOR_CLIENT_ID))
    coordinator.take(coordinator.client.mark(TOPICS.request("ready")))
    mallory, many = broker.client(MALLORY), [TOPICS.upload(0, MALLORY, f"{i:016x}", 0) for i in range(500)]
    for topic in many:
        mallory.publish(topic, b"left", retain=True)
    left = coordinator.client.until(mallory.mark(TOPICS.request(MALLORY)))
    broker.process.send_signal(signal.SIGSTOP)
    try:
        for message in left:
            coordinator.dispatcher.dispatch(message)
        is_free = coordinator.client.transport.drain(MAX_DELETIONS + 1, 0.0)
    finally:
        broker.process.send_signal(signal.SIGCONT)
    assert is_free
    for _ in many:  # more of them than are needed
        coordinator.client.transport.drain(0, PATIENCE_S)
        coordinator.dispatcher.tick()
    assert MALLORY not in "".join(_kept(broker))


def test_a_retained_request_is_not_answered(broker: Guarded, store: Store) -> None:
    coordinator = Coordinator(store, broker.client(COORDINATOR_CLIENT_ID))
    mallory = broker.client(MALLORY)
    mallory.publish(TOPICS.state(MALLORY), PRESENCE, retain=True)
    mallory.subscribe(*TOPICS.device_filters(MALLORY))
    coordinator.take(mallory.mark(TOPICS.request(MALLORY)))
    mallory.until(coordinator.client.mark(TOPICS.down(MALLORY)))
    mallory.publish(TOPICS.request(MALLORY), b"not a request", retain=True)  # without `retain` an `err` would follow
    coordinator.take(mallory.mark(TOPICS.request(MALLORY)))
    assert mallory.until(coordinator.client.mark(TOPICS.down(MALLORY))) == []
    mallory.publish(TOPICS.state(MALLORY), b"", retain=True)


def test_a_device_that_comes_back_as_its_old_presence_is_deleted_is_here_though_the_broker_forgets_it(
    broker: Guarded, store: Store
) -> None:
    """No deletion can be tied to what it deletes, so the broker may lose a newer `on`. This coordinator has heard it,
    since it subscribed before; to the next one, and to its next connection, the device announces itself again
    (PROTOCOL.md 11; tests/edge_client/runtime/test_client_repeats.py).
    """
    honest = broker.client(HONEST)
    lost = messages.write_message("st", ident="m-1", t_ms=0, s="lost", bd=1)
    honest.publish(TOPICS.state(HONEST), lost, retain=True)
    honest.transport.drain(0, 20.0)
    coordinator = Coordinator(store, broker.client(COORDINATOR_CLIENT_ID))
    old = coordinator.client.until(coordinator.client.mark(TOPICS.request("subscribed")))
    assert lost in [message.payload for message in old]
    honest.publish(TOPICS.state(HONEST), PRESENCE, retain=True)
    honest.transport.drain(0, 20.0)
    for message in old:
        coordinator.dispatcher.dispatch(message)  # deletes, after the broker has the new one
    coordinator.take(honest.mark(TOPICS.request(HONEST)))
    coordinator.take(coordinator.client.mark(TOPICS.request("done")))
    assert TOPICS.state(HONEST) not in _kept(broker)
    assert coordinator.dispatcher.fleet.online() == [HONEST]
