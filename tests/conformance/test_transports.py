"""What every transport promises (edge_client/transport/base.py), over memory, the embedded broker and mosquitto."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Queue

import pytest

from edge_client.transport.base import Connected, Disconnected, Event, Message, Will
from tests.support.memory_broker import MemoryBroker
from tests.support.nets import PATIENCE_S, Net, next_event, next_message, over_mqtt, settle


@pytest.fixture(params=["memory", "amqtt", pytest.param("mosquitto", marks=pytest.mark.broker)])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    if request.param == "memory":
        broker = MemoryBroker()
        built = Net(broker.client, broker.drop_connection)
    else:
        fixture = {"amqtt": "amqtt_broker", "mosquitto": "mosquitto"}[request.param]
        built = over_mqtt(request.getfixturevalue(fixture).url)
    try:
        yield built
    finally:
        built.close()


def test_a_message_reaches_every_matching_subscription_with_its_bytes_unchanged(net: Net) -> None:
    exact, plus, hash_, other = (net.join(name) for name in ("exact", "plus", "hash", "other"))
    exact.subscribe("fc/a/b")
    plus.subscribe("fc/+/b")
    hash_.subscribe("fc/#")
    other.subscribe("fc/+")
    for transport in (exact, plus, hash_, other):
        settle(transport)
    body = bytes(range(256)) * 5
    net.join("sender").publish("fc/a/b", body)
    assert [next_message(t) for t in (exact, plus, hash_)] == [Message("fc/a/b", body)] * 3
    settle(other)


def test_messages_on_one_topic_arrive_in_the_order_sent(net: Net) -> None:
    receiver, sender = net.join("receiver"), net.join("sender")
    settle(receiver, "fc/t")
    for number in range(100):
        sender.publish("fc/t", str(number).encode())
    assert [int(next_message(receiver).payload) for _ in range(100)] == list(range(100))


def test_a_retained_message_is_delivered_on_subscribing_until_it_is_deleted(net: Net) -> None:
    sender = net.join("sender")
    sender.publish("fc/r", b"\x00\xff kept", retain=True)
    settle(sender)
    early = net.join("early")
    early.subscribe("fc/+")
    assert next_message(early) == Message("fc/r", b"\x00\xff kept", retained=True)
    sender.publish("fc/r", b"", retain=True)
    assert next_message(early).payload == b""
    settle(sender)
    late = net.join("late")
    settle(late, "fc/+")
    assert late.receive(0) is None


def test_what_is_published_live_is_not_marked_retained(net: Net) -> None:
    receiver, sender = net.join("receiver"), net.join("sender")
    settle(receiver, "fc/r")
    sender.publish("fc/r", b"now", retain=True)
    assert next_message(receiver) == Message("fc/r", b"now", retained=False)


def test_more_filters_than_one_subscribe_packet_takes_all_work(net: Net) -> None:
    receiver, sender = net.join("receiver"), net.join("sender")
    receiver.subscribe(*(f"fc/{i}" for i in range(19)))
    settle(receiver)
    for i in range(19):
        sender.publish(f"fc/{i}", b"x")
    assert {next_message(receiver).topic for _ in range(19)} == {f"fc/{i}" for i in range(19)}


def test_a_broken_link_is_reported_once_and_mends_itself_with_a_clean_session(net: Net) -> None:
    receiver, sender = net.join("receiver"), net.join("sender")
    settle(receiver, "fc/t")
    net.break_link("receiver")
    assert isinstance(next_event(receiver), Disconnected)
    assert next_event(receiver) == Connected()
    sender.publish("fc/t", b"nobody listens")
    settle(sender)
    settle(receiver, "fc/t")
    sender.publish("fc/t", b"heard")
    assert next_message(receiver).payload == b"heard"


def test_the_will_of_a_broken_link_is_published_retained(net: Net) -> None:
    watcher = net.join("watcher")
    settle(watcher, "fc/st")
    net.join("device", will=Will("fc/st", b"lost"))
    net.break_link("device")
    assert next_message(watcher).payload == b"lost"
    late = net.join("late")
    late.subscribe("fc/st")
    assert next_message(late) == Message("fc/st", b"lost", retained=True)


def test_each_connection_carries_the_will_of_that_moment(net: Net) -> None:
    births = iter(range(100))
    watcher = net.join("watcher")
    settle(watcher, "fc/st")
    device = net.join("device", will=lambda: Will("fc/st", str(next(births)).encode()))
    wills = []
    for _ in range(2):
        net.break_link("device")
        wills.append(int(next_message(watcher).payload))
        assert isinstance(next_event(device), Disconnected)
        assert next_event(device) == Connected()
    assert wills == sorted(set(wills))


def test_closing_sends_what_was_published_and_no_will(net: Net) -> None:
    watcher = net.join("watcher")
    settle(watcher, "fc/#")
    leaver = net.join("leaver", will=Will("fc/st", b"lost"))
    for number in range(50):
        leaver.publish("fc/last", str(number).encode())
    leaver.close()
    leaver.close()
    assert [int(next_message(watcher).payload) for _ in range(50)] == list(range(50))
    settle(watcher)
    assert watcher.receive(0) is None


def test_drain_waits_until_the_broker_has_everything(net: Net) -> None:
    sender = net.join("sender")
    for _ in range(200):
        sender.publish("fc/t", bytes(1_000))
    assert sender.drain(0, PATIENCE_S)


def test_wake_ends_a_wait_in_another_thread(net: Net) -> None:
    transport = net.join("sleeper")
    woken: Queue[Event | None] = Queue()
    sleeper = threading.Thread(target=lambda: woken.put(transport.receive(PATIENCE_S * 6)), daemon=True)
    sleeper.start()
    transport.wake()
    assert woken.get(timeout=PATIENCE_S) is None
    sleeper.join(PATIENCE_S)


def test_a_receive_without_time_returns_at_once(net: Net) -> None:
    assert net.join("quiet").receive(0) is None
