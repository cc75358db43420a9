"""Tries to speak on topics that are not one's own, and to hear what is not meant for one, through a real mosquitto."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from edge_client.protocol.topics import Topics
from tests.support.guarded_broker import FEDERATION, Guarded, guarded_broker, try_connect

pytestmark = pytest.mark.broker
MALLORY, VICTIM = "mallory", "victim"
TOPICS = Topics(FEDERATION)
LABEL = "0123456789abcdef"
WRITES = {
    "another's presence": TOPICS.state(VICTIM),
    "another's request": TOPICS.request(VICTIM),
    "another's upload": TOPICS.upload(0, VICTIM, LABEL, 0),
    "an upload to a shard without a coordinator": TOPICS.upload(1, MALLORY, LABEL, 0),
    "below one's own upload": f"{TOPICS.upload(0, MALLORY, LABEL, 0)}/more",
    "a task or ack to another": TOPICS.down(VICTIM),
    "a task or ack to oneself": TOPICS.down(MALLORY),
    "a block to another": TOPICS.down_block(VICTIM, LABEL, 0),
    "the coordinator's record": TOPICS.coord(),
    "the catalog": TOPICS.catalog(),
    "blocks to all devices": f"fc/v1/{FEDERATION}/bb/{LABEL}/0",
    "the coordinator's presence": f"fc/v1/{FEDERATION}/st/{COORDINATOR_CLIENT_ID}",
    "below one's own request": f"{TOPICS.request(MALLORY)}/more",
    "another federation": f"fc/v1/other/rq/{MALLORY}",
    "outside all federations": "anything",
}
READS = {
    "everything": "#",
    "every federation": "fc/v1/+/dn/+/t",
    "all below this federation": f"fc/v1/{FEDERATION}/#",
    "another's tasks": f"fc/v1/{FEDERATION}/dn/{VICTIM}/#",
    "everybody's tasks": f"fc/v1/{FEDERATION}/dn/+/t",
    "a shared part of another's tasks": f"$share/all/fc/v1/{FEDERATION}/dn/{VICTIM}/#",
    "everybody's uploads": f"fc/v1/{FEDERATION}/in/#",
    "everybody's requests": f"fc/v1/{FEDERATION}/rq/+",
    "everybody's presence": f"fc/v1/{FEDERATION}/st/+",
    "the broker's own figures": "$SYS/#",
}
VERSIONS = (MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_broker(tmp_path_factory.mktemp("topics"), MALLORY, VICTIM) as found:
        yield found


@pytest.fixture(params=VERSIONS, ids=lambda version: version.name)
def broker(fleet: Guarded, request: pytest.FixtureRequest) -> Iterator[Guarded]:
    fleet.client(COORDINATOR_CLIENT_ID, speaking=request.param)
    yield fleet
    fleet.leave()


def test_nothing_that_a_device_may_not_write_reaches_anybody(broker: Guarded) -> None:
    mallory, victim, coordinator = broker.client(MALLORY), broker.client(VICTIM), broker._open[0]
    coordinator.subscribe(f"fc/v1/{FEDERATION}/#")
    coordinator.settle(TOPICS.request("ready"))
    victim.subscribe(*TOPICS.device_filters(VICTIM))
    coordinator.until(victim.mark(TOPICS.request(VICTIM)))
    for retain in (False, True):
        for name, topic in WRITES.items():
            mallory.publish(topic, name.encode(), retain=retain)
        mallory.publish("$SYS/broker/version", b"forged", retain=retain)
    heard = coordinator.until(mallory.mark(TOPICS.request(MALLORY)))
    assert [message.payload for message in heard] == []
    mine = coordinator.mark(TOPICS.down(VICTIM))
    assert [message.payload for message in victim.until(mine)] == []
    late = broker.client(
        COORDINATOR_CLIENT_ID, client_id="a-second-look"
    )  # each later subscriber would be sent a retained message
    late.subscribe("fc/v1/#", "anything")
    assert [message.payload for message in late.until(late.mark(TOPICS.request("look")))] == []


@pytest.mark.parametrize("wanted", READS.values(), ids=READS.keys())
def test_a_filter_that_is_too_wide_brings_nothing(broker: Guarded, wanted: str) -> None:
    mallory, victim, coordinator = broker.client(MALLORY), broker.client(VICTIM), broker._open[0]
    coordinator.subscribe(f"fc/v1/{FEDERATION}/rq/+")
    coordinator.settle(TOPICS.request("ready"))
    coordinator.publish(TOPICS.down(VICTIM), b"kept for whoever asks", retain=True)
    mallory.subscribe(wanted, TOPICS.device_filters(MALLORY)[0], TOPICS.down(MALLORY))
    coordinator.until(mallory.mark(TOPICS.request(MALLORY)))  # by now the broker has taken the filters
    coordinator.publish(TOPICS.down(VICTIM), b"secret")
    victim.publish(TOPICS.state(VICTIM), b"here", retain=True)
    victim.publish(TOPICS.upload(0, VICTIM, LABEL, 0), b"update")
    coordinator.until(victim.mark(TOPICS.request(VICTIM)))
    heard = mallory.until(coordinator.mark(TOPICS.down(MALLORY)))
    assert [message for message in heard if VICTIM in message.topic or message.topic.startswith("$")] == []
    coordinator.publish(TOPICS.down(VICTIM), b"", retain=True)


def test_each_hears_and_says_what_the_protocol_gives_it(broker: Guarded) -> None:
    mallory, coordinator = broker.client(MALLORY), broker._open[0]
    coordinator.subscribe(*TOPICS.coordinator_filters())
    coordinator.settle(TOPICS.request("ready"))
    coordinator.publish(TOPICS.coord(), b"record", retain=True)
    mallory.subscribe(*TOPICS.device_filters(MALLORY))
    mallory.publish(TOPICS.state(MALLORY), b"here")
    mallory.publish(TOPICS.upload(0, MALLORY, LABEL, 0), b"block")
    heard = coordinator.until(mallory.mark(TOPICS.request(MALLORY)))
    assert [message.payload for message in heard] == [b"here", b"block"]
    coordinator.publish(TOPICS.down_block(MALLORY, LABEL, 0), b"down")
    received = mallory.until(coordinator.mark(TOPICS.down(MALLORY)))
    assert [message.payload for message in received] == [b"record", b"down"]
    coordinator.publish(TOPICS.coord(), b"", retain=True)


def test_a_will_on_anothers_topic_is_not_published(broker: Guarded) -> None:
    """The broker speaks for a client that vanished; it must not say what the client could not."""
    coordinator = broker._open[0]
    coordinator.subscribe(f"fc/v1/{FEDERATION}/#")
    coordinator.settle(TOPICS.request("ready"))
    assert try_connect(broker.url, broker.credentials(MALLORY), (TOPICS.state(VICTIM), b"lost")) == ""
    mallory = broker.client(MALLORY)  # the broker gives it the same name, and ends the one that vanished
    assert coordinator.until(mallory.mark(TOPICS.request(MALLORY))) == []


def test_ones_own_will_is_published(broker: Guarded) -> None:
    coordinator = broker._open[0]
    coordinator.subscribe(*TOPICS.coordinator_filters())
    coordinator.settle(TOPICS.request("ready"))
    assert try_connect(broker.url, broker.credentials(MALLORY), (TOPICS.state(MALLORY), b"lost")) == ""
    mallory = broker.client(MALLORY)
    heard = coordinator.until(mallory.mark(TOPICS.request(MALLORY)))
    assert [message.payload for message in heard] == [b"lost"]
