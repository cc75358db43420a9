"""What the coordinator and one phone say to each other, heard at the broker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paho.mqtt import client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from edge_client.protocol import messages
from edge_client.protocol.topics import Topics


@contextlib.contextmanager
def overheard(port: int, federation: str, cid: str, hear: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """`hear` gets each message to the device and each request of it, as they come, in a thread of its own."""
    topics, client = Topics(federation), mqtt.Client(CallbackAPIVersion.VERSION2)

    def on_message(_client: mqtt.Client, _data: object, event: mqtt.MQTTMessage) -> None:
        hear(messages.read_message(bytes(event.payload), topics.parse(event.topic).kind))

    client.on_message = on_message
    client.connect("127.0.0.1", port)
    client.subscribe([(topics.down(cid), 1), (topics.request(cid), 1)])
    client.loop_start()
    try:
        yield
    finally:
        client.disconnect()
        client.loop_stop()
