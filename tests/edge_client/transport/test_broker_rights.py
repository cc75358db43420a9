"""What `doctor` reads in a broker's answers about its access list, and that no answer of a strange broker ends it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from edge_client.protocol.topics import Topics
from edge_client.transport.broker_rights import NO_LABEL, NO_LIST, try_rights

TOPICS = Topics("home")
FILTERS = TOPICS.device_filters("d1")
UPLOAD = TOPICS.upload(0, "d1", NO_LABEL, 0)
CONNACK = b"\x20\x03\x00\x00\x00"
SUBACK = b"\x90\x06\x00\x01\x00\x01\x01\x01"
PUBACK = b"\x40\x02\x00\x02"
FOREIGN = b"\x40\x04\x00\x03\x87\x00"  # a message in another device's name is refused
RETAINED = b"\x31\x05\x00\x01t\x00x"
LETS = "its access list lets this device write, and in its own name alone"


def tried(answers: bytes) -> tuple[bool, str]:
    """What is told of a broker that says `answers` to each connection, and ends it."""

    def answer() -> None:
        line, _ = listening.accept()
        with line, suppress(OSError):  # the client may end it first
            line.recv(1)
            line.sendall(answers)
            line.shutdown(socket.SHUT_WR)
            while line.recv(1024):  # until the client has left
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        broker = threading.Thread(target=answer)
        broker.start()
        found = try_rights(listening.getsockname(), None, TOPICS, "d1", timeout_s=30.0)
        broker.join()
    return found


def test_what_is_allowed_is_said_also_where_retained_messages_come_between() -> None:
    assert tried(CONNACK + RETAINED + SUBACK + RETAINED + PUBACK + FOREIGN) == (True, LETS)
    assert tried(CONNACK + SUBACK + b"\x40\x04\x00\x02\x10\x00" + FOREIGN) == (True, LETS)  # 0x10: no subscriber


def test_a_broker_without_a_list_is_told_and_is_no_fault_on_this_machine() -> None:
    """It was said of it that its access list lets the device write."""
    assert tried(CONNACK + SUBACK + PUBACK + b"\x40\x02\x00\x03") == (True, NO_LIST)


@pytest.mark.parametrize("code", [0x80, 0x83, 0x87, 0x97])
def test_a_topic_that_is_refused_for_whichever_reason_is_named(code: int) -> None:
    """Only 0x87 counted: with another reason the list was said to let the device write."""
    lets, said = tried(CONNACK + SUBACK + b"\x40\x04\x00\x02" + bytes([code, 0]) + FOREIGN)
    assert (lets, UPLOAD in said) == (False, True)
    lets, said = tried(CONNACK + SUBACK[:-1] + bytes([code]) + PUBACK + FOREIGN)
    assert (lets, FILTERS[-1] in said, UPLOAD in said) == (False, True, False)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (b"\x20\x02\x00\x01", "does not speak MQTT 5"),
        (b"", "does not speak MQTT 5"),
        (CONNACK + SUBACK + PUBACK, "could not be tried"),
        (CONNACK, "could not be tried"),
        (CONNACK + b"\xe0\x01\x8d", "could not be tried"),
        (CONNACK + b"\x90\x01\x00" + PUBACK, "could not be tried"),
        (CONNACK + b"\x30\xff\xff\xff\x7f", "could not be tried"),
    ],
)
def test_a_broker_that_answers_strangely_is_no_fault_of_its_list(answers: bytes, said: str) -> None:
    """An answer with too few codes ended `doctor` with a traceback, "a bug of fedcenters"."""
    lets, told = tried(answers)
    assert (lets, said in told) == (True, True), told
