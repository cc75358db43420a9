"""With certificates and an access list a device speaks and hears on its own topics alone, over each installed broker.

tests/attacks/test_foreign_topics.py asks mosquitto much more. A broker may drop what is not allowed, or end the
connection.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Connected, Disconnected, Message
from edge_client.transport.tls import Credentials
from tests.support.guarded_broker import FEDERATION, PATIENCE_S, Guarded, GuardedClient, try_connect
from tests.support.guarded_brokers import guarded

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]
TOPICS, MALLORY, VICTIM, LABEL = Topics(FEDERATION), "mallory", "victim", "0123456789abcdef"
ALL = f"fc/v1/{FEDERATION}/#"
WRITES = (
    TOPICS.state(VICTIM),
    TOPICS.request(VICTIM),
    TOPICS.upload(0, VICTIM, LABEL, 0),
    TOPICS.down(VICTIM),
    TOPICS.down(MALLORY),
    TOPICS.coord(),
    TOPICS.catalog(),
    "fc/v1/other/rq/mallory",
)
READS = (ALL, "#", f"fc/v1/{FEDERATION}/dn/{VICTIM}/#", f"fc/v1/{FEDERATION}/dn/+/t", f"fc/v1/{FEDERATION}/in/#")


@pytest.fixture(scope="module", params=["mosquitto", "nats", "rabbitmq"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(request.param, tmp_path_factory.mktemp(request.param), MALLORY, VICTIM) as found:
        yield found


@pytest.fixture
def broker(shared: Guarded) -> Iterator[Guarded]:
    yield shared
    shared.leave()


def heard(client: GuardedClient, last: bytes) -> list[bytes]:
    """The payloads that came before `last`, or until the broker ended the connection."""
    found: list[bytes] = []
    while True:
        event = client.transport.receive(PATIENCE_S)
        assert isinstance(event, (Message, Connected, Disconnected))
        if isinstance(event, Disconnected) or (isinstance(event, Message) and event.payload == last):
            return found
        if isinstance(event, Message):
            found.append(event.payload)


def listening(broker: Guarded, name: str, *filters: str) -> GuardedClient:
    client = broker.client(name)
    client.subscribe(*filters)
    client.publish(TOPICS.state(name) if name != COORDINATOR_CLIENT_ID else TOPICS.request("ready"), b"here")
    assert client.transport.drain(0, PATIENCE_S)  # the broker has taken the filters
    return client


def test_a_device_reaches_the_coordinator_and_the_coordinator_it(broker: Guarded) -> None:
    coordinator = listening(broker, COORDINATOR_CLIENT_ID, ALL)
    device = listening(broker, MALLORY, *TOPICS.device_filters(MALLORY))
    device.publish(TOPICS.upload(0, MALLORY, LABEL, 0), b"block")
    device.publish(TOPICS.request(MALLORY), b"request")
    assert heard(coordinator, b"request")[-2:] == [b"here", b"block"]
    coordinator.publish(TOPICS.coord(), b"record", retain=True)
    coordinator.publish(TOPICS.down_block(MALLORY, LABEL, 0), b"down")
    received = {event.payload for _ in range(2) if isinstance(event := device.transport.receive(PATIENCE_S), Message)}
    assert received == {b"record", b"down"}  # of different topics: in any order


@pytest.mark.parametrize("topic", WRITES)
def test_what_a_device_may_not_write_reaches_nobody(broker: Guarded, topic: str) -> None:
    coordinator = listening(broker, COORDINATOR_CLIENT_ID, "fc/v1/#")
    mallory = broker.client(MALLORY)
    mallory.publish(topic, b"forged", retain=True)
    mallory.transport.drain(0, PATIENCE_S)  # acknowledged, or the connection is over
    coordinator.publish(TOPICS.request("end"), b"end")
    assert b"forged" not in heard(coordinator, b"end")


@pytest.mark.parametrize("wanted", READS)
def test_a_filter_that_is_too_wide_brings_nothing(broker: Guarded, wanted: str) -> None:
    coordinator = listening(broker, COORDINATOR_CLIENT_ID, TOPICS.request("ready"))
    victim = listening(broker, VICTIM, *TOPICS.device_filters(VICTIM))
    mallory = broker.client(MALLORY)
    mallory.subscribe(wanted)
    mallory.subscribe(TOPICS.down(MALLORY))
    mallory.publish(TOPICS.state(MALLORY), b"here")
    mallory.transport.drain(0, PATIENCE_S)
    coordinator.publish(TOPICS.down(VICTIM), b"secret")
    coordinator.publish(TOPICS.down(VICTIM), b"victim's end")
    assert heard(victim, b"victim's end")[-1:] == [b"secret"]
    coordinator.publish(TOPICS.down(MALLORY), b"end")
    assert b"secret" not in heard(mallory, b"end")


def test_a_client_without_a_certificate_is_refused(broker: Guarded) -> None:
    assert try_connect(broker.url, Credentials(ca=broker.credentials(MALLORY).ca)) != ""


def test_a_will_on_anothers_topic_is_not_published(broker: Guarded) -> None:
    coordinator = listening(broker, COORDINATOR_CLIENT_ID, ALL)
    assert try_connect(broker.url, broker.credentials(MALLORY), (TOPICS.state(VICTIM), b"lost")) == ""
    listening(broker, MALLORY, TOPICS.down(MALLORY))
    coordinator.publish(TOPICS.request("end"), b"end")
    assert b"lost" not in heard(coordinator, b"end")
