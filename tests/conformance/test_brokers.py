"""What the protocol needs of a broker (PROTOCOL.md, 1, 2 and 11), over every broker that is installed here.

The table in docs/run-at-scale.md has the answers. Where brokers differ in what the protocol can do without, `KINDS`
says how, and a test fails when a broker does better or worse. The protocol uses no QoS 2, no shared subscription, no
session that outlives its connection, no topic alias, no message expiry and no user property: they are not asked for.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from edge_client.protocol.blocks import MAX_BLOCK_BYTES
from edge_client.transport.base import Connected, Disconnected, Message, Transport, Will, WillSource
from edge_client.transport.mqtt import MAX_IN_FLIGHT, MqttTransport
from emulator.stop_signals import DeferredSignals
from emulator.testbed.processes import ChildProcess, ChildProcesses
from tests.support import process_fleet
from tests.support.brokers import KINDS, BrokerKind, Nodes, running
from tests.support.nets import Net, next_event, next_message, over_mqtt, settle
from tests.support.process_fleet import FleetScene

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]
HEADER_BYTES = 16  # of a block
MANY = 1_000  # retained messages
ROUNDS = 3
_numbers = itertools.count()


@dataclass
class Place:
    """One test's own clients and topics, at a broker that all tests of a kind share."""

    kind: BrokerKind
    nodes: Nodes
    nets: list[Net]
    own: str = field(default_factory=lambda: f"t{next(_numbers)}")

    def join(self, name: str, *, node: int = 0, will: WillSource = None) -> Transport:
        """A client at a node; `-1` is the last one, which a cluster has apart from the first."""
        return self.nets[node].join(f"{self.own}-{name}", will)

    def break_link(self, name: str, *, node: int = 0) -> None:
        self.nets[node].break_link(f"{self.own}-{name}")

    def topic(self, *levels: str) -> str:
        return "/".join(("fc", self.own, *levels))

    def subscribed(self, name: str, topic: str, *, node: int = 0) -> Transport:
        client = self.join(name, node=node)
        settle(client, topic)
        return client

    def retained(self, topic: str, *, node: int = 0) -> list[Message]:
        """What a new client gets that subscribes to this; the broker has handled its SUBSCRIBE."""
        client = self.join(f"reader{next(_numbers)}", node=node)
        mark = self.topic(f"mark{next(_numbers)}")
        client.subscribe(topic, mark)
        client.publish(mark, b".")
        found = []
        while (message := next_message(client)).topic != mark:
            found.append(message)
        return found


@pytest.fixture(scope="module", params=sorted(KINDS))
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[BrokerKind, Nodes]]:
    with running(request.param, tmp_path_factory.mktemp(request.param)) as nodes:
        yield KINDS[request.param], nodes


@pytest.fixture
def place(shared: tuple[BrokerKind, Nodes]) -> Iterator[Place]:
    kind, nodes = shared
    made = Place(kind, nodes, [over_mqtt(url) for url in nodes.urls])
    yield made
    for net in made.nets:
        net.close()


def test_a_client_finds_out_which_version_the_broker_speaks(place: Place) -> None:
    client = place.join("client")
    assert isinstance(client, MqttTransport)
    assert client._session is not None
    wanted = MQTTProtocolVersion.MQTTv5 if place.kind.mqtt5 else MQTTProtocolVersion.MQTTv311
    assert client._session.version == wanted


def test_a_message_reaches_each_matching_subscription_at_each_node_with_its_bytes_unchanged(place: Place) -> None:
    readers = [
        place.subscribed(f"{name}{node}", topic, node=node)
        for node in range(place.kind.nodes)
        for name, topic in (
            ("exact", place.topic("a", "b")),
            ("plus", place.topic("+", "b")),
            ("all", place.topic("#")),
        )
    ]
    stranger = place.subscribed("stranger", place.topic("+"))
    body = bytes(range(256)) * 5
    place.join("sender").publish(place.topic("a", "b"), body)
    assert [next_message(reader) for reader in readers] == [Message(place.topic("a", "b"), body)] * len(readers)
    settle(stranger)


def test_messages_on_one_topic_arrive_in_the_order_sent(place: Place) -> None:
    reader, sender = place.subscribed("reader", place.topic("t"), node=-1), place.join("sender")
    for number in range(300):
        sender.publish(place.topic("t"), str(number).encode())
    assert [int(next_message(reader).payload) for _ in range(300)] == list(range(300))


@pytest.mark.parametrize("size", [65_536, MAX_BLOCK_BYTES])
def test_a_block_arrives_whole_under_the_longest_topic(place: Place, size: int) -> None:
    topic = place.topic("in").ljust(135, "x")
    reader, body = place.subscribed("reader", topic, node=-1), bytes(range(256)) * (size // 256) + bytes(HEADER_BYTES)
    place.join("sender").publish(topic, body)
    assert next_message(reader).payload == body


def test_windows_of_blocks_from_several_devices_wait_for_a_reader_that_is_busy(place: Place) -> None:
    reader = place.subscribed("reader", place.topic("in", "#"), node=-1)
    for device in range(4):
        sender = place.join(f"sender{device}")
        for index in range(MAX_IN_FLIGHT):
            sender.publish(place.topic("in", str(device), str(index)), bytes(65_552))
        assert sender.drain(0, 60)
    wanted = {place.topic("in", str(device), str(index)) for device in range(4) for index in range(MAX_IN_FLIGHT)}
    assert {next_message(reader).topic for _ in wanted} == wanted


def test_a_retained_message_is_kept_by_name_until_an_empty_one_deletes_it(place: Place) -> None:
    sender, topic = place.join("sender"), place.topic("bc", "coord")
    sender.publish(topic, b"old", retain=True)
    sender.publish(topic, b"\x00\xff new", retain=True)
    settle(sender)
    assert set(place.retained(topic)) == {Message(topic, b"\x00\xff new", retained=True)}
    sender.publish(topic, b"", retain=True)
    settle(sender)
    assert place.retained(topic) == []


def test_a_pattern_brings_all_retained_messages_or_none_as_the_table_says(place: Place) -> None:
    sender = place.join("sender")
    topics = [place.topic("st", str(number)) for number in range(MANY)]
    for topic in topics:
        sender.publish(topic, b"on", retain=True)
    settle(sender)
    found = {message.topic for message in place.retained(place.topic("st", "+"))}
    assert found == (set(topics) if place.kind.retained_by_pattern else set())


def test_a_retained_message_is_known_at_each_node_or_at_its_own_as_the_table_says(place: Place) -> None:
    sender, topic = place.join("sender"), place.topic("bc", "coord")
    sender.publish(topic, b"kept", retain=True)
    settle(sender)
    found = [bool(place.retained(topic, node=node)) for node in range(place.kind.nodes)]
    assert found == [True] + [place.kind.retained_everywhere] * (place.kind.nodes - 1)


def test_a_live_message_is_not_marked_as_retained(place: Place) -> None:
    reader = place.subscribed("reader", place.topic("bc"), node=-1)
    place.join("sender").publish(place.topic("bc"), b"now", retain=True)
    assert next_message(reader) == Message(place.topic("bc"), b"now", retained=False)


def test_retain_as_published_is_kept_where_mqtt_5_is_spoken(place: Place) -> None:
    reader, mark = place.join("reader"), place.topic("mark")
    reader.subscribe(place.topic("rq"), mark, as_published=True)
    reader.publish(mark, b".")
    assert next_message(reader).topic == mark
    place.join("sender").publish(place.topic("rq"), b"hostile", retain=True)
    assert next_message(reader) == Message(place.topic("rq"), b"hostile", retained=place.kind.mqtt5)


def test_a_session_ends_with_its_connection(place: Place) -> None:
    reader, sender = place.subscribed("reader", place.topic("t")), place.join("sender", node=-1)
    place.break_link("reader")
    assert isinstance(next_event(reader), Disconnected)
    assert next_event(reader) == Connected()
    sender.publish(place.topic("t"), b"nobody listens")
    settle(sender)
    settle(reader, place.topic("t"))
    sender.publish(place.topic("t"), b"heard")
    assert next_message(reader).payload == b"heard"


def test_the_will_of_a_broken_link_is_published_and_retained(place: Place) -> None:
    watcher, topic = place.subscribed("watcher", place.topic("st"), node=-1), place.topic("st")
    place.join("device", will=Will(topic, b"lost"))
    place.break_link("device")
    assert next_message(watcher).payload == b"lost"
    assert {message.payload for message in place.retained(topic)} == {b"lost"}


@pytest.mark.parametrize("shared", [kind.name for kind in KINDS.values() if kind.notices_silence], indirect=True)
def test_the_will_of_a_device_that_falls_silent_is_published(place: Place) -> None:
    """Its link stays open, as behind a router that forgot it; its keepalive is a second."""
    watcher, topic = place.subscribed("watcher", place.topic("st"), node=-1), place.topic("st")
    connect = connect_packet(f"{place.own}-silent", topic, b"lost", keepalive_s=1)
    with socket.create_connection(("127.0.0.1", int(place.nodes.url.rsplit(":", 1)[1]))) as link:
        link.sendall(connect)
        assert link.recv(4) == b"\x20\x02\x00\x00"
        assert next_message(watcher).payload == b"lost"


@pytest.mark.parametrize("shared", [kind.name for kind in KINDS.values() if kind.minds_leave], indirect=True)
def test_a_device_that_takes_its_leave_has_no_will(place: Place) -> None:
    watcher = place.subscribed("watcher", place.topic("#"), node=-1)
    leaver = place.join("leaver", will=Will(place.topic("st"), b"lost"))
    leaver.publish(place.topic("st"), b"off")
    leaver.close()
    assert next_message(watcher).payload == b"off"
    settle(watcher)


@pytest.mark.parametrize("shared", [kind.name for kind in KINDS.values() if kind.ends_earlier], indirect=True)
def test_a_second_connection_of_a_device_ends_the_first(place: Place) -> None:
    first, again = place.join("twin"), over_mqtt(place.nodes.urls[-1])
    again.join(f"{place.own}-twin")
    again.close()  # before the first one dials again
    assert isinstance(next_event(first), Disconnected)


def test_after_a_crash_of_a_node_its_clients_find_back_and_messages_flow(place: Place) -> None:
    reader, other = place.join("reader"), place.subscribed("other", place.topic("t"), node=-1)
    place.nodes.restart()
    assert isinstance(reader.receive(60), Disconnected)
    assert reader.receive(60) == Connected()
    if place.kind.nodes == 1:
        assert isinstance(other.receive(60), Disconnected)
        assert other.receive(60) == Connected()
        settle(other, place.topic("t"))
    reader.publish(place.topic("t"), b"again")
    assert next_message(other).payload == b"again"


def test_a_federation_trains_to_its_end_though_devices_and_then_the_broker_are_killed(
    shared: tuple[BrokerKind, Nodes], tmp_path: Path
) -> None:
    """Its devices are there before the coordinator, which has to learn of them, and at another node of a cluster."""
    _, nodes = shared
    with DeferredSignals() as signals, ChildProcesses(tmp_path / "logs", signals) as children:
        here = FleetScene(tmp_path / "run", nodes.urls[-1], children, [{**process_fleet.RUN, "num-rounds": ROUNDS}])
        workers = start_and_wait(here)
        here.broker = nodes.url
        here.start_coordinator()
        here.wait_for("round")
        children.kill(workers[0])  # half of the devices, without which no exchange closes
        assert len(here.of("round")) < ROUNDS
        nodes.restart()
        children.python("again", *map(str, workers[0].process.args[1:]))  # type: ignore[index]  # it is a list
        here.wait_for("bundle")
    assert [event["round"] for event in here.of("round")] == list(range(1, ROUNDS + 1))
    assert all(len(assignment) == process_fleet.DEVICES for assignment in here.assignments())


def start_and_wait(here: FleetScene) -> list[ChildProcess]:
    """Two processes of devices, each of which has announced itself."""
    births: set[str] = set()
    with closing(MqttTransport(here.broker, "spy")) as spy:
        spy.connect()
        assert next_event(spy) == Connected()
        settle(spy, "fc/v1/+/st/+")
        workers = here.start_devices(2)
        while len(births) < process_fleet.DEVICES:
            event = spy.receive(process_fleet.PATIENCE_S)
            assert isinstance(event, Message)
            births.add(event.topic)
    return workers


def connect_packet(client_id: str, will_topic: str, will: bytes, *, keepalive_s: int) -> bytes:
    """CONNECT of MQTT 3.1.1 with a clean session and a retained will at QoS 1."""
    fields = b"".join(len(each).to_bytes(2, "big") + each for each in (client_id.encode(), will_topic.encode(), will))
    body = b"\x00\x04MQTT\x04\x2e" + keepalive_s.to_bytes(2, "big") + fields
    return b"\x10" + bytes([len(body)]) + body
