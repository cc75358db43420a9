"""A control message that was decoded once: its sender from the topic, its fields from the payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.protocol.task import ClientId
from edge_client.protocol.topics import Route


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """One control message. `cid` is "" for a coordinator's; a message that breaks a rule has `error` and no fields."""

    cid: ClientId
    fields: Mapping[str, Any]
    error: Malformed | None = None

    @property
    def ident(self) -> str | None:
        """The message's id, which an answer names; None if the message could not be read."""
        return self.fields.get("id")


def open_envelope(route: Route, payload: bytes) -> Envelope:
    """Decode the payload that came on this topic; its kind has to belong there."""
    try:
        return Envelope(cid=route.cid or "", fields=messages.read_message(payload, route.kind))
    except Malformed as wrong:
        return Envelope(cid=route.cid or "", fields={}, error=wrong)
