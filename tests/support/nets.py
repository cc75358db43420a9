"""Clients of one broker for tests: they join, break their links, and read what comes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import count

from edge_client.transport.base import Connected, Event, Message, Transport, WillSource
from edge_client.transport.mqtt import MqttTransport
from tests.support.patience import patience

PATIENCE_S = patience(60.0)
_settled = count()


class Net:
    """Makes transports of one broker, and breaks their links as a broker or a dead process would."""

    def __init__(self, make: Callable[[str, WillSource], Transport], break_link: Callable[[str], None]) -> None:
        self._make, self.break_link = make, break_link
        self._made: list[Transport] = []

    def join(self, name: str, will: WillSource = None) -> Transport:
        transport = self._make(name, will)
        self._made.append(transport)
        transport.connect()
        assert next_event(transport) == Connected()
        return transport

    def close(self) -> None:
        for transport in self._made:
            transport.close()


def next_event(transport: Transport) -> Event | None:
    return transport.receive(PATIENCE_S)


def next_message(transport: Transport) -> Message:
    event = next_event(transport)
    assert isinstance(event, Message), event
    return event


def settle(transport: Transport, *filters: str) -> None:
    """Subscribe, and return once the broker has handled everything that this client sent.

    What arrives meanwhile is a mistake. It is one SUBSCRIBE: amqtt may handle a message before a second one.
    """
    topic = f"settle/{next(_settled)}"
    transport.subscribe(*filters, topic)
    transport.publish(topic, b".")
    assert next_message(transport).topic == topic


def over_mqtt(url: str) -> Net:
    transports: dict[str, MqttTransport] = {}

    def make(name: str, will: WillSource) -> Transport:
        transports[name] = MqttTransport(url, name, will=will, jitter=lambda _low, _high: 0.05)
        return transports[name]

    def break_link(name: str) -> None:
        session = transports[name]._session
        assert session is not None
        link = session.paho.socket()
        assert link is not None
        assert isinstance(link, socket.socket)
        link.shutdown(socket.SHUT_RDWR)  # both directions, as when a process dies or a cable is pulled

    return Net(make, break_link)
