"""Devices and coordinators of other protocol versions: each is told clearly, and the others go on without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.identity.signing_key import open_signing_key
from edge_client.errors import ProtocolError
from edge_client.protocol import messages
from edge_client.protocol.messages import canonical_json
from edge_client.transport.base import Message
from tests.support.virtual_federation import FEDERATION, TOPICS, Federation, Spy
from tests.support.virtual_time import Participant, VirtualTransport


def start_old_device(fed: Federation, cid: str, *, says: tuple[dict[str, Any], ...]) -> list[bytes]:
    """A device of version 0: it announces itself and asks in its own way. -> what it is told."""
    told: list[bytes] = []

    def life(me: Participant) -> None:
        transport = VirtualTransport(me, fed.world.broker, f"{FEDERATION}.{cid}", None)
        transport.connect()
        transport.subscribe(*TOPICS.device_filters(cid))
        transport.publish(TOPICS.state(cid), canonical_json({"v": 0, "k": "st", "state": "ready"}), retain=True)
        for message in says:
            transport.publish(TOPICS.request(cid), canonical_json(message))
        while True:
            event = transport.receive(60.0)
            if isinstance(event, Message) and event.topic == TOPICS.down(cid):
                told.append(event.payload)

    fed.world.begin(cid, life)
    return told


def test_a_device_of_an_older_version_is_told_so_and_the_others_finish_as_without_it(tmp_path: Path) -> None:
    alone, mixed = (Federation.of(tmp_path / name, devices=3) for name in ("alone", "mixed"))
    told: list[bytes] = []
    for fed in (alone, mixed):
        fed.start_coordinator()
        if fed is mixed:
            fed.world.run(lambda: mixed.happened("program"))
            told = start_old_device(fed, "d07", says=({"v": 0, "k": "hello"}, {"v": 0, "k": "update", "data": [1.0]}))
            fed.world.run(lambda: len(told) == 3)  # noqa: B023 - used at once
        fed.start_devices(3)
        fed.complete()
    answers = [messages.read_message(payload, "t") for payload in told]
    assert {(answer["k"], answer["code"]) for answer in answers} == {("err", "bad_version")}
    assert all("message version 0, this side reads 1" in answer["detail"] for answer in answers)
    assert mixed.outcome() == alone.outcome()


def test_a_device_that_is_told_so_ends_with_what_to_do(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=4)
    spy = Spy(fed.world.broker)
    fed.start(2)
    fed.world.run(lambda: fed.happened("joined"))
    error = messages.write_message(
        "err", ident="x", t_ms=0, epoch=1, code="bad_version", detail="version 1, this side reads 2"
    )
    spy.publish(TOPICS.down("d01"), error)
    with pytest.raises(ProtocolError, match="speaks another version of the protocol: version 1, this side reads 2"):
        fed.world.run(lambda: False)
    assert fed.world.participants["d01"].ended
    assert not fed.world.participants["d00"].ended
    fed.world.end()


def record(fed: Federation, proto: list[int]) -> bytes:
    """A coordinator's, which speaks these versions."""
    fields: dict[str, Any] = {"boot": "0" * 16, "online": True, "spread_ms": 0, "block": 4096, "window": 4}
    fields |= {"src": ["mqtt"], **open_signing_key(fed.config.folder).sign_record("0" * 16, 9, FEDERATION)}
    return messages.write_message("coord", ident="x", t_ms=0, epoch=9, proto=proto, **fields)


def test_a_device_leaves_a_coordinator_that_no_longer_speaks_its_version(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.world.broker.retained[TOPICS.coord()] = record(fed, [2, 3])
    fed.start_devices(1)
    with pytest.raises(ProtocolError, match=r"speaks version \[2, 3\] of the protocol, not 1"):
        fed.world.run(lambda: False)
    fed.world.end()


def test_a_coordinator_that_speaks_this_version_and_later_ones_is_fine(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.world.broker.retained[TOPICS.coord()] = record(fed, [1, 2])
    fed.start_devices(1)
    fed.world.run(lambda: fed.world.clock.time_s > 100.0)
    assert not fed.world.participants["d00"].ended
    fed.world.end()
