"""Tries to steer devices through a broker that delivers anything: forged orders, old ones, garbage planted before.

An access list keeps devices from writing here; these are for the day when it does not. Whatever is not what a device
waits for is ignored, and the training ends with the bits of an undisturbed one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_client.protocol import blocks, messages
from edge_client.protocol.messages import canonical_json
from edge_client.protocol.topics import routing_label
from tests.support.virtual_federation import BALLAST, TOPICS, Federation, Spy

VICTIM = "d01"
SHA = hashlib.sha256(b"what the victim never sent").hexdigest()
UPLOADS = TOPICS.upload(0, VICTIM, "0" * 16, 0).removesuffix(f"{'0' * 16}/0")
KEY: dict[str, Any] = {"run": "r1", "round": 1, "exchange": 0}


def order(kind: str, *, epoch: int = 1, **fields: Any) -> bytes:  # noqa: ANN401 - the message's fields
    return messages.write_message(kind, ident="forged", t_ms=0, epoch=epoch, **fields)


def the_same_key(spy: Spy) -> dict[str, Any]:
    """Of the task that the victim was really given last."""
    task = spy.said("task", cid=VICTIM)[-1]
    return {name: task[name] for name in ("run", "round", "exchange")}


def announced(spy: Spy) -> str:
    """The hash of the victim's last update."""
    rdys = spy.said("rdy", cid=VICTIM)
    return str(rdys[-1]["update"]["sha256"]) if rdys else SHA


def blocks_up(spy: Spy) -> list[str]:
    """The topics of the blocks that the victim sent; each has a block's own number and a part of its blob's hash."""
    return [event.topic for event in spy.heard() if event.topic.startswith(UPLOADS)]


FORGED: dict[str, Callable[[Spy], bytes]] = {
    "an ack for another hash": lambda spy: order("ack", **the_same_key(spy), attempt=0, sha256=SHA, status="ok"),
    "an ack for another task": lambda _: order("ack", **KEY, attempt=0, sha256=SHA, status="rejected"),
    "a credit for another hash": lambda _: order("go", re="x", sha256=SHA, shard=0, window=16),
    "a credit with a bitmap of another size": lambda spy: order(
        "go", re="x", sha256=announced(spy), shard=0, window=16, have="AAAAAAAA"
    ),
    "a stop for another task": lambda _: order("stop", **KEY, why="because"),
    "an error for another request": lambda _: order("err", re="x", code="closed"),
    "an error that names nothing": lambda _: order("err", code="internal"),
    "a rebirth": lambda _: order("rebirth"),
    "an answer that was not asked": lambda _: order("near", re="x", center=0),
    "an order of an earlier coordinator": lambda spy: order("stop", epoch=0, **the_same_key(spy)),
    "json that never ends": lambda _: b"[" * 8_000,
    "nothing": lambda _: b"",
    "a kind of the other direction": lambda spy: canonical_json(spy.said("rdy")[-1]) if spy.said("rdy") else b"{}",
    "a message of another version": lambda _: canonical_json({"v": 2, "k": "task", "id": "x", "t": 0}),
    "a megabyte": lambda _: bytes(1 << 20),
}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation.of(tmp_path_factory.mktemp("calm"), ballast=BALLAST, devices=3).play(3)


@pytest.mark.parametrize("name", FORGED)
def test_an_order_that_was_never_given_is_ignored_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, calm: Federation, name: str
) -> None:
    """It comes while the victim computes, and while it waits for the answer to its announcement."""
    fed = Federation.of(tmp_path, ballast=BALLAST, devices=3)
    spy = Spy(fed.world.broker)
    fed.start(3)
    for number in (1, 2, 3):
        for kind in ("task", "rdy"):
            fed.world.run(lambda: len(spy.said(kind, cid=VICTIM)) >= number)  # noqa: B023 - used at once
            spy.publish(TOPICS.down(VICTIM), FORGED[name](spy))
    fed.complete()
    assert fed.outcome() == calm.outcome()
    assert len(blocks_up(spy)) == len(set(blocks_up(spy)))


def test_blocks_that_nobody_asked_for_or_that_lie_do_not_reach_a_device(tmp_path: Path, calm: Federation) -> None:
    """Where the victim waits for a block comes first one of another blob, then a damaged one, then none."""
    fed = Federation.of(tmp_path, ballast=BALLAST, devices=3)
    spy = Spy(fed.world.broker)
    fed.start(3)
    for moment in (10, 30, 60):
        fed.world.run(lambda: len(spy.heard()) >= moment)  # noqa: B023 - used at once
        for get in spy.said("get", cid=VICTIM):
            for index in range(4):
                topic = TOPICS.down_block(VICTIM, routing_label(get["sha256"]), index)
                spy.publish(topic, blocks.pack_block(b"x", 0, 1))
                spy.publish(topic, bytes(5_000))
                spy.publish(topic, b"")
        spy.publish(TOPICS.down_block(VICTIM, "0" * 16, 65_535), blocks.pack_block(b"x" * 4_096, 0, 1))
    fed.complete()
    assert fed.outcome() == calm.outcome()


def test_what_was_planted_before_anybody_came_is_found_out(tmp_path: Path, calm: Federation) -> None:
    fed = Federation.of(tmp_path, ballast=BALLAST, devices=3)
    planted = (
        b"\xff\xfe",
        b"[" * 8_000,
        b'{"v":1}',
        canonical_json({"v": 1, "k": "cat", "id": "x", "t": 0}),
        bytes(100_000),
    )
    for number, garbage in enumerate(planted):
        topics = [TOPICS.coord(), TOPICS.catalog(), TOPICS.state(VICTIM), TOPICS.state(f"ghost-{number}")]
        topics += [TOPICS.down(f"d0{number}"), TOPICS.down_block(VICTIM, "0" * 16, number)]
        for topic in topics:
            fed.world.broker.retained[topic] = garbage
    fed.world.broker.retained[TOPICS.request(VICTIM)] = planted[1]
    fed.play(3)
    assert fed.outcome() == calm.outcome()
