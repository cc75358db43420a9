"""Tries to fill the broker's memory: a device asks for blocks again and again, and reads none of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edge_client.protocol.blocks import HEADER
from tests.support.virtual_federation import BALLAST, BLOCK, TOPICS, Federation, Spy

LIAR, REQUESTS, PER_S = "d02", 200, 20
BLOCKS = TOPICS.down(LIAR).removesuffix("/t") + "/b/"
MARKS: dict[str, Callable[[int], dict[str, int]]] = {  # by the mark that was sent last
    "of an older version": lambda _: {},
    "that says that nothing came": lambda _: {"mark": 0},
    "that guesses": lambda mark: {"mark": mark % 65_535 + 1},
}


def blocks_sent(spy: Spy) -> list[bytes]:
    return [event.payload for event in spy.heard() if event.topic.startswith(BLOCKS)]


@pytest.mark.parametrize("lie", MARKS)
def test_a_device_that_reads_nothing_is_sent_little(tmp_path: Path, lie: str) -> None:
    fed = Federation.of(tmp_path, ballast=BALLAST, devices=3, rounds=1, quorum=0.6, deadline_s=60.0, in_flight_mib=1)
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.start_mute_device(LIAR)
    fed.start_devices(2)
    fed.world.run(lambda: bool(spy.said("task", cid=LIAR)))
    start = spy.said("task", cid=LIAR)[0]["start"]
    begin_s, total = fed.world.clock.time_s, -(-start["size"] // BLOCK)
    for k in range(REQUESTS):
        last = HEADER.unpack_from((blocks_sent(spy) or [bytes(HEADER.size)])[-1])[2]
        spy.say(LIAR, "get", sha256=start["sha256"], block=BLOCK, at=[[0, total]], **MARKS[lie](last))
        fed.world.run(lambda: fed.world.clock.time_s >= begin_s + (k + 1) / PER_S)  # noqa: B023 - used at once
    assert len(blocks_sent(spy)) <= 4 * total  # two requests at once, and two more after eight seconds
    fed.complete()  # the others are served meanwhile
