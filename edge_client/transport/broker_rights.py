"""What a broker's access list refuses to a device, tried over a connection of its own.

In MQTT 5 alone, whose answers have reasons: Mosquitto tells a client of 3.1.1 nothing. Mosquitto's access list lets any
subscription pass and filters what it brings, so there it is the message that is refused.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from edge_client.protocol.task import ClientId
from edge_client.protocol.topics import Topics

CONNECT = b"\x10\x0d\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x00"  # a clean start, keepalive 60 s, no properties, no name
DISCONNECT = b"\xe0\x00"
CONNACK, PUBACK, SUBACK, CLOSED = 0x20, 0x40, 0x90, 0xE0  # the first byte of an answer
SUBSCRIBE, PUBLISH = 0x82, 0x32  # at QoS 1
LEAST_FAILURE = 0x80  # of the reason codes
MAX_ANSWER_BYTES = 2_000_000  # retained records come with a subscription
NO_LABEL = "0" * 16  # of a blob that no device has


def try_rights(line: socket.socket, topics: Topics, cid: ClientId) -> tuple[bool, str]:
    """Hear what the device must hear, and write a block of no upload, which the coordinator drops.

    -> (whether nothing was refused, what was seen).
    """
    try:
        refused = refused_topics(line, topics.device_filters(cid), topics.upload(0, cid, NO_LABEL, 0))
    except OSError as wrong:
        return True, f"its access list could not be tried: {wrong}"
    if refused is None:
        return True, "its access list is not tried, since it does not speak MQTT 5"
    if refused:
        return False, f"the broker's access list refuses {', '.join(refused)} to {cid}"
    return True, "its access list lets this device write"


def refused_topics(line: socket.socket, filters: Sequence[str], topic: str) -> list[str] | None:
    """Subscribe to `filters`, then publish an empty message to `topic`; -> those that are refused.

    None where the broker does not speak MQTT 5 with this client. Raises OSError.
    """
    line.sendall(CONNECT)
    kind, body = _answer(line)
    if kind != CONNACK or len(body) < 2 or body[1]:  # noqa: PLR2004 - flags and the reason
        return None
    wanted = b"".join(_text(each) + b"\x01" for each in filters)
    line.sendall(_packet(SUBSCRIBE, b"\x00\x01\x00" + wanted))
    line.sendall(_packet(PUBLISH, _text(topic) + b"\x00\x02\x00"))
    refused: list[str] = []
    while (found := _answer(line))[0] != PUBACK:
        kind, body = found
        if kind == CLOSED:
            raise ConnectionError("the broker ended the connection")
        if kind == SUBACK:
            codes = body[-len(filters) :]  # behind the number of the packet and its properties
            refused += [each for each, code in zip(filters, codes, strict=False) if code >= LEAST_FAILURE]
    line.sendall(DISCONNECT)
    return [*refused, topic] if any(code >= LEAST_FAILURE for code in found[1][2:3]) else refused


def _text(value: str) -> bytes:
    data = value.encode()
    return len(data).to_bytes(2, "big") + data


def _packet(kind: int, body: bytes) -> bytes:
    size, head = len(body), bytearray([kind])
    while size > 0x7F:  # noqa: PLR2004 - seven bits a byte
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*head, size]) + body


def _answer(line: socket.socket) -> tuple[int, bytes]:
    """-> (the first byte without its flags, the body) of one packet."""
    kind, size, shift, more = _exactly(line, 1)[0] & 0xF0, 0, 0, True
    while more:
        byte = _exactly(line, 1)[0]
        size, shift, more = size | (byte & 0x7F) << shift, shift + 7, byte > 0x7F and shift < 21  # noqa: PLR2004
    if size > MAX_ANSWER_BYTES:
        raise ConnectionError(f"the broker sends a packet of {size} bytes")
    return kind, _exactly(line, size)


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := line.recv(size - len(data))):
            raise ConnectionError("the broker closed the connection")
        data += part
    return data
