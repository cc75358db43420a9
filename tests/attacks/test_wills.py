"""Tries to harm others with a will: what the broker publishes for a device that is gone, in its name and retained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.protocol import codecs, messages
from edge_client.protocol.blocks import manifest_of
from edge_client.transport.base import Will
from tests.support.virtual_federation import FEDERATION, TOPICS, Federation, Outcome, Spy, program, stay_announced
from tests.support.virtual_time import Participant, VirtualTransport

LIAR, HONEST = "d03", 3
CAPS = {"engine": "onnx", "n": 40}
MakeWill = Callable[[Mapping[str, Any]], Will]  # of the task that the device was given


def said(kind: str, **fields: object) -> bytes:
    return messages.write_message(kind, ident="will", t_ms=0, **fields)


def refusal(task: Mapping[str, Any]) -> bytes:
    return said("nack", re=task["id"], code="no_data", **key_of(task))


def announcement(task: Mapping[str, Any]) -> bytes:
    """Of an update that would be taken."""
    schema, base = program().schema, task["start"]["sha256"]
    data = codecs.encode_vector(np.full(schema.size, 0.3, np.float32), schema, codec="f32", kind="delta", base=base)
    update = manifest_of(data, "delta", inline=True)
    return said("rdy", **key_of(task), attempt=0, n=40, what="delta", update=update, seconds=1.0)


def key_of(task: Mapping[str, Any]) -> dict[str, Any]:
    return {name: task[name] for name in ("run", "round", "exchange")}


STATE, REQUEST, UPLOAD = TOPICS.state(LIAR), TOPICS.request(LIAR), TOPICS.upload(0, LIAR, "0" * 16, 0)
WILLS: dict[str, MakeWill] = {
    "that says that it is here": lambda _: Will(STATE, said("st", s="on", bd=2**32 - 1, caps=CAPS | {"n": 2**31})),
    "of a later connection": lambda _: Will(STATE, said("st", s="lost", bd=3)),
    "that deletes its presence": lambda _: Will(STATE, b""),
    "that is no message": lambda _: Will(STATE, b"\xff" * 1_000_000),
    "of another version": lambda _: Will(STATE, b'{"v":2,"k":"st","id":"w","t":0,"s":"on","bd":1}'),
    "that refuses": lambda task: Will(REQUEST, refusal(task)),
    "that calls the coordinator old": lambda task: Will(REQUEST, said("nack", re=task["id"], code="old_epoch")),
    "that asks for blocks": lambda _: Will(REQUEST, said("get", sha256="0" * 64, block=4096, at=[[0, 16]])),
    "that announces an update": lambda task: Will(REQUEST, announcement(task)),
    "that reports a center": lambda _: Will(REQUEST, said("served", center=0, sha256="0" * 64, n=1, metrics={})),
    "that is a block": lambda _: Will(UPLOAD, bytes(5_000)),
}


def play(folder: Path, make: MakeWill | None) -> Outcome:
    """A device joins, gets its first task, connects again with a will that knows the task, and is gone.

    The coordinator connects twice afterwards, and hears the will each time.
    """
    fed = Federation.of(folder, devices=HONEST + 1, quorum=0.5, deadline_s=20.0)
    spy = Spy(fed.world.broker)

    def live(birth: int, will: Will | None) -> None:
        def life(me: Participant) -> None:
            transport = VirtualTransport(me, fed.world.broker, f"{FEDERATION}.{LIAR}", will)
            transport.connect()
            stay_announced(transport, LIAR, said("st", s="on", bd=birth, caps=CAPS))

        fed.world.begin(LIAR, life)
        fed.world.run(lambda: len(spy.said("task", cid=LIAR)) >= birth)
        fed.world.kill(LIAR)

    fed.start_coordinator()
    fed.start_devices(HONEST)
    live(1, None)
    live(2, None if make is None else make(spy.said("task", cid=LIAR)[0]))
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
