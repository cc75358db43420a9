"""A control message that was decoded once: its sender from the topic, its fields from the payload."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.protocol.message_schemas import COMMON_FIELDS
from edge_client.protocol.task import ClientId
from edge_client.protocol.topics import Route
from edge_client.protocol.validators import record


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """One control message. `cid` is "" of a coordinator's; one that breaks a rule has `error`, and its id alone."""

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
        return Envelope(cid=route.cid or "", fields=_named(payload), error=wrong)


def _named(payload: bytes) -> dict[str, Any]:
    """The id of a message that breaks another rule, so that the answer names it; nothing where it has none."""
    with suppress(Malformed):
        return dict(record({"id": COMMON_FIELDS["id"]})(messages.parse_json(payload), "message"))
    return {}
