"""A login to a broker by hand, in MQTT 3.1.1: whether a broker answers, and whether it lets this device in."""

from __future__ import annotations

import contextlib
import socket

from edge_client.transport import tls

CONNECT_PACKET = b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00"  # clean session, no client id, keepalive 60 s
DISCONNECT_PACKET = b"\xe0\x00"
CONNACK_TYPE, CONNACK_BYTES = 0x20, 4
IDENTIFIER_REJECTED = 2  # the broker answers, and wants a name: it can be reached
CONNECT_REFUSALS = {4: "the broker refuses our name or password", 5: "the broker does not let this device in"}


def greet(line: socket.socket, *, login: bool) -> bytes:
    """Send CONNECT, for a `login`, and DISCONNECT; -> the first bytes of the broker's answer, where it gives one.

    Raises OSError; without a login, where a broker hangs up, only for a certificate that it refuses.
    """
    try:
        try:
            line.sendall(CONNECT_PACKET if login else DISCONNECT_PACKET)
        except OSError as wrong:
            raise ConnectionError(tls.unread_alert(line.recv) or str(wrong)) from wrong
        answer = line.recv(CONNACK_BYTES)
    except OSError as wrong:
        if login or "alert" in str(wrong).lower():
            raise
        return b""
    with contextlib.suppress(OSError):
        line.sendall(DISCONNECT_PACKET)
    return answer


def is_broker(answer: bytes) -> bool:
    """Whether an answer to CONNECT is a CONNACK."""
    return len(answer) == CONNACK_BYTES and answer[0] == CONNACK_TYPE


def why_refused(answer: bytes) -> str:
    """What a CONNACK refuses; "" where the device is let in, or would be under a name."""
    code = answer[3]
    return "" if code in (0, IDENTIFIER_REJECTED) else CONNECT_REFUSALS.get(code, f"the broker answers {code}")
