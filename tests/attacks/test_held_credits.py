"""Tries to keep other devices from uploading: announcements that are large, or never followed by the whole update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.config_sections import RunConfig
from edge_client.protocol import blocks
from edge_client.protocol.blocks import manifest_of
from tests.support.virtual_federation import BALLAST, BLOCK, TOPICS, Federation, Spy, program

LIAR, HONEST, DEADLINE_S = "d04", 4, 120.0
NO_ROUNDS_DEADLINE_S = 3600.0
MIB = 1 << 20
UPDATE = 4 * program(ballast=BALLAST).schema.size  # bytes of an honest update's values
Act = Callable[[int], Iterator[tuple[float, str, int]]]  # blocks -> when to do what: "rdy", or "block" and its index


def repeat_one_block(_total: int) -> Iterator[tuple[float, str, int]]:
    yield 0.0, "rdy", 0
    while True:
        yield 2.0, "block", 0


def repeat_the_announcement(_total: int) -> Iterator[tuple[float, str, int]]:
    yield 0.0, "rdy", 0
    while True:
        yield 7.0, "rdy", 0


def drip(total: int) -> Iterator[tuple[float, str, int]]:
    """A new block, as seldom as keeps a credit alive."""
    yield 0.0, "rdy", 0
    for index in range(total - 1):
        yield 28.0, "block", index


def drip_for_ever(total: int) -> Iterator[tuple[float, str, int]]:
    """The same, and the announcement again when all blocks but one are there."""
    while True:
        yield from drip(total)


def federation(folder: Path, **changes: Any) -> tuple[Federation, Spy]:  # noqa: ANN401 - keys of a configuration
    usual = {"rounds": 1, "devices": HONEST + 1, "quorum": 0.8, "deadline_s": DEADLINE_S}
    fed = Federation.of(folder, ballast=BALLAST, **(usual | changes))
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.start_mute_device(LIAR)
    fed.start_devices(HONEST)
    fed.world.run(lambda: bool(spy.said("task", cid=LIAR)))
    return fed, spy


def attack(fed: Federation, spy: Spy, act: Act, size: int) -> None:
    """Do it until the first exchange of the round is over."""
    data = bytes(size)
    task, update = spy.said("task", cid=LIAR)[0], manifest_of(data, "delta", block=BLOCK)
    key = {name: task[name] for name in ("run", "round", "exchange")}
    for wait_s, what, index in act(update.total):
        until_s = fed.world.clock.time_s + wait_s
        fed.world.run(lambda: fed.world.clock.time_s >= until_s or fed.live is None)  # noqa: B023 - used at once
        if fed.live is None or fed.live.key.exchange != task["exchange"]:
            return
        if what == "rdy":
            spy.say(LIAR, "rdy", **key, attempt=0, n=40, what="delta", update=update, seconds=1.0)
        else:
            start, stop = blocks.body_range(update, index)
            message = blocks.pack_block(data[start:stop], index, update.total)
            spy.publish(TOPICS.upload(0, LIAR, update.sha256[:16], index), message)


def attack_without_rounds(fed: Federation, spy: Spy, act: Act) -> None:
    """Do it until the run is over."""
    task, update = spy.said("task", cid=LIAR)[0], manifest_of(bytes(UPDATE), "delta", block=BLOCK)
    key = {name: task[name] for name in ("run", "round", "exchange")}
    for wait_s, what, index in act(update.total):
        until_s = fed.world.clock.time_s + wait_s
        fed.world.run(lambda: fed.world.clock.time_s >= until_s or fed.catalog is not None)  # noqa: B023 - used at once
        if fed.catalog is not None or fed.world.clock.time_s > NO_ROUNDS_DEADLINE_S:
            return
        if what == "rdy":
            spy.say(LIAR, "rdy", **key, attempt=0, n=40, what="delta", update=update, seconds=1.0)
        else:
            message = blocks.pack_block(bytes(BLOCK), index, update.total)
            spy.publish(TOPICS.upload(0, LIAR, update.sha256[:16], index), message)


def answered(fed: Federation) -> set[str]:
    """The devices whose update was taken in the first exchange."""
    assert fed.store is not None
    ((run, number, exchange),) = fed.store.database.rows("select run, round, exchange from exchanges limit 1")
    query = "select cid from replies where run = ? and round = ? and exchange = ?"
    return {cid for (cid,) in fed.store.database.rows(query, (run, number, exchange))}


@pytest.mark.parametrize("act", [repeat_one_block, repeat_the_announcement, drip])
def test_a_device_that_holds_the_only_credit_gives_it_to_those_that_wait(tmp_path: Path, act: Act) -> None:
    fed, spy = federation(tmp_path, credits=1)
    attack(fed, spy, act, UPDATE)
    assert answered(fed) == {f"d{i:02}" for i in range(HONEST)}


def test_a_device_that_announces_more_than_its_update_can_have_gets_no_credit(tmp_path: Path) -> None:
    fed, spy = federation(tmp_path, in_flight_mib=1)
    attack(fed, spy, repeat_one_block, MIB)
    assert spy.said("go", cid=LIAR) == []
    assert spy.said("err", cid=LIAR)[0]["code"] == "too_big"
    assert answered(fed) == {f"d{i:02}" for i in range(HONEST)}


@pytest.mark.parametrize("act", [repeat_one_block, repeat_the_announcement, drip_for_ever])
def test_without_rounds_it_gives_the_only_credit_back_too(tmp_path: Path, act: Act) -> None:
    run = RunConfig(method="fedavg", rounds=4, name="run", settings={"local-steps": 3, "batch-size": 8})
    fed, spy = federation(
        tmp_path,
        credits=1,
        runs=(run,),
        concurrency=5,
        buffer=4,
        deadline_s=NO_ROUNDS_DEADLINE_S,
        keep_rounds=0,
        evaluate_every=100,
    )
    attack_without_rounds(fed, spy, act)
    assert fed.catalog is not None
