"""What a broker's access list refuses to a device, and whether there is one, tried over a connection of its own.

In MQTT 5 alone, whose answers have reasons: Mosquitto tells a client of 3.1.1 nothing. Mosquitto's access list lets any
subscription pass and filters what it brings, so there it is the message that is refused.
"""

from __future__ import annotations

import secrets
import ssl
import time
from collections.abc import Sequence
from typing import Any

from edge_client.protocol.task import ClientId
from edge_client.protocol.topics import Topics
from edge_client.transport.mqtt import MQTT5, PahoSession

TICK_S = 0.2
NO_LABEL = "0" * 16  # of a blob that no device has
NO_LIST = "the broker has no access list, or one that lets this device write in any name"
Address = tuple[str, int]


def try_rights(
    address: Address, context: ssl.SSLContext | None, topics: Topics, cid: ClientId, *, timeout_s: float
) -> tuple[bool, str]:
    """Hear what the device must hear, and write blocks of no upload, as itself and as another; they are dropped.

    -> (whether all is as it should be, what was seen). `context` is that of TLS; without it the broker is on this
    machine, and needs no list. Raises OSError where the broker takes no connection.
    """
    session = PahoSession("", MQTT5)  # the broker names it: the device's own name is in use
    if context is not None:
        session.paho.tls_set_context(context)
    try:
        asked = _Question(
            session,
            topics.device_filters(cid),
            topics.upload(0, cid, NO_LABEL, 0),
            topics.upload(0, secrets.token_hex(16), NO_LABEL, 0),  # in the name of no device
        )
        session.connect(*address, timeout_s)
        lost = _wait(session, asked, timeout_s)
    finally:
        session.release()
    if not session.accepted:
        return True, "its access list is not tried, since it does not speak MQTT 5"
    if asked.refused:
        return False, f"the broker's access list refuses {', '.join(asked.refused)} to {cid}"
    if not asked.answered:
        return True, f"its access list could not be tried: {lost or session.reason}"
    if asked.takes_any:
        return context is None, NO_LIST
    return True, "its access list lets this device write, and in its own name alone"


class _Question:
    """Subscribes to `filters` and writes empty messages to `topic` and to `foreign`.

    `refused` are those that the broker refuses and should not; `takes_any`: it does not refuse `foreign`.
    """

    def __init__(self, session: PahoSession, filters: Sequence[str], topic: str, foreign: str) -> None:
        self.refused: list[str] = []
        self.takes_any = False
        self._filters, self._topics, self._sent = tuple(filters), (topic, foreign), list[int]()
        self._answers = dict[int, bool]()  # mid: whether it was refused
        session.on_up, session.paho.on_subscribe, session.paho.on_publish = self._ask, self._heard, self._taken

    def _ask(self, session: PahoSession) -> None:
        session.subscribe(self._filters)
        self._sent = [session.paho.publish(topic, b"", qos=1).mid for topic in self._topics]

    @property
    def answered(self) -> bool:
        return len(self._answers) == len(self._topics)

    def _heard(self, _client: object, _data: object, _mid: int, codes: list[Any], _more: object) -> None:
        self.refused += [each for each, code in zip(self._filters, codes, strict=False) if code.is_failure]

    def _taken(self, _client: object, _data: object, mid: int, code: Any, _more: object) -> None:  # noqa: ANN401 - paho's
        self._answers[mid] = code.is_failure
        if mid == self._sent[0] and code.is_failure:
            self.refused.append(self._topics[0])
        if mid == self._sent[1]:
            self.takes_any = not code.is_failure


def _wait(session: PahoSession, asked: _Question, timeout_s: float) -> str:
    """Serve the connection until both messages have their answers; -> why one has none, where paho does not say it."""
    until = time.monotonic() + timeout_s
    try:
        while not asked.answered and not session.paho.loop(TICK_S):  # 0: the connection is well
            if time.monotonic() > until:
                return f"no answer within {timeout_s:g} s"
        session.paho.disconnect()
    except Exception as wrong:  # noqa: BLE001 - paho's readers raise whatever a malformed packet makes them raise
        return f"{type(wrong).__name__}: {wrong}"
    return ""
