"""The connection of a client that tries what it may not do: it stays open when the broker forbids something."""

from __future__ import annotations

from edge_client.transport.mqtt import MqttTransport, PahoSession


class StubbornTransport(MqttTransport):
    """A `MqttTransport` that takes no notice of refusals."""

    def opened(self, session: PahoSession) -> None:
        session.stays = True
        super().opened(session)
