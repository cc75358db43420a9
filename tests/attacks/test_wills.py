"""Tries to harm others with a will: what the broker publishes for a device that is gone, in its name and retained."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client.protocol import messages
from edge_client.protocol.blocks import manifest_of
from edge_client.transport.base import Will
from tests.support.virtual_federation import FEDERATION, TOPICS, Federation, Outcome, Spy, stay_announced
from tests.support.virtual_time import Participant, VirtualTransport

LIAR, HONEST = "d03", 3
CAPS = {"engine": "onnx", "n": 40}
KEY = {"run": "r1", "round": 1, "exchange": 0}
UPDATE = manifest_of(bytes(100), "stats", inline=True)


def said(kind: str, **fields: object) -> bytes:
    return messages.write_message(kind, ident="will", t_ms=0, **fields)


STATE, REQUEST, UPLOAD = TOPICS.state(LIAR), TOPICS.request(LIAR), TOPICS.upload(0, LIAR, "0" * 16, 0)
WILLS = {
    "that says that it is here": (STATE, said("st", s="on", bd=2**32 - 1, caps=CAPS | {"n": 2**31})),
    "of a later connection": (STATE, said("st", s="lost", bd=2)),
    "that deletes its presence": (STATE, b""),
    "that is no message": (STATE, b"\xff" * 1_000_000),
    "of another version": (STATE, b'{"v":2,"k":"st","id":"w","t":0,"s":"on","bd":1}'),
    "that refuses": (REQUEST, said("nack", re="c1-9", code="old_epoch")),
    "that asks for blocks": (REQUEST, said("get", sha256="0" * 64, block=4096, at=[[0, 16]])),
    "that announces an update": (REQUEST, said("rdy", **KEY, attempt=0, n=1, what="stats", update=UPDATE, seconds=0)),
    "that reports a center": (REQUEST, said("served", center=0, sha256="0" * 64, n=1, metrics={})),
    "that is a block": (UPLOAD, bytes(5_000)),
}


def play(folder: Path, will: tuple[str, bytes] | None) -> Outcome:
    """A device joins, gets its first task, and is gone; the coordinator connects twice and hears the will each time."""
    fed = Federation.of(folder, devices=HONEST + 1, quorum=0.5, deadline_s=20.0)

    def life(me: Participant) -> None:
        name = f"{FEDERATION}.{LIAR}"
        transport = VirtualTransport(me, fed.world.broker, name, None if will is None else Will(*will))
        transport.connect()
        stay_announced(transport, LIAR, said("st", s="on", bd=1, caps=CAPS))

    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.start_devices(HONEST)
    fed.world.begin(LIAR, life)
    fed.world.run(lambda: bool(spy.said("task", cid=LIAR)))
    fed.world.kill(LIAR)
    for _ in range(2):
        answers = len(spy.said("ack"))
        fed.world.run(lambda: len(spy.said("ack")) > answers)  # noqa: B023 - used at once
        fed.world.broker.drop_connection(f"{FEDERATION}.coordinator.0")
    return fed.complete().outcome()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return play(tmp_path_factory.mktemp("calm"), None)


@pytest.mark.parametrize("name", WILLS)
def test_a_will_changes_nothing_for_the_others(tmp_path: Path, calm: Outcome, name: str) -> None:
    assert play(tmp_path, WILLS[name]) == calm
