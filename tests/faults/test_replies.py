"""Replies that come twice, late, changed, from strangers, or not at all: no device counts twice, every round ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.silence import WAITED_MISSES
from coordinator.storage.status import read_status
from edge_client.errors import NetworkError
from edge_client.protocol.blocks import manifest_of
from tests.support import softmax_program
from tests.support.direct_calls import train_directly
from tests.support.memory_broker import MemoryBroker
from tests.support.virtual_federation import BALLAST, TOPICS, Anything, Federation, Spy


def again(rdy: dict[str, Any], **changes: Anything) -> dict[str, Any]:
    """The fields of a `rdy` to be said once more."""
    return {k: v for k, v in (rdy | changes).items() if k not in ("v", "k", "id", "t")}


@pytest.mark.parametrize("ballast", [0, BALLAST], ids=["inline", "blocks"])
def test_messages_that_all_arrive_twice_change_nothing(tmp_path: Path, ballast: int) -> None:
    once = Federation.of(tmp_path / "once", ballast=ballast)
    twice = Federation.of(tmp_path / "twice", ballast=ballast, broker=MemoryBroker(tamper=lambda _, body: (body, body)))
    for fed in (once, twice):
        fed.play()
    assert once.outcome() == twice.outcome()


@pytest.mark.parametrize("kind", ["rq", "in", "b"])
def test_messages_that_get_lost_are_made_up_for(tmp_path: Path, kind: str) -> None:
    """Every fifth message of one kind of topic vanishes, as if a link had broken right then."""
    count = 0

    def lossy(topic: str, body: bytes) -> tuple[bytes, ...]:
        nonlocal count
        ours = TOPICS.parse(topic).kind == kind
        count += ours
        return () if ours and count % 5 == 4 else (body,)

    calm = Federation.of(tmp_path / "calm", ballast=BALLAST)
    rough = Federation.of(tmp_path / "rough", ballast=BALLAST, broker=MemoryBroker(tamper=lossy))
    for fed in (calm, rough):
        fed.play()
    assert calm.final_states() == rough.final_states()
    assert count > 10


def test_a_reply_said_again_is_dup_another_one_superseded_and_neither_counts(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    spy = Spy(fed.world.broker)
    fed.start(3)
    mute = fed.start_mute_device("d03", n=43)
    fed.world.run(lambda: len(spy.said("ack")) == 3)
    rdy = spy.said("rdy", cid="d00")[0]
    other = manifest_of(b"another update", "delta", inline=True)
    spy.say("d00", "rdy", **again(rdy))
    spy.say("d00", "rdy", **again(rdy, attempt=2, update=other))
    fed.world.run(lambda: len(spy.said("ack", cid="d00")) == 3)
    assert [ack["status"] for ack in spy.said("ack", cid="d00")] == ["ok", "dup", "superseded"]
    fed.world.kill(mute.name)
    fed.start_devices(4)
    fed.complete()
    np.testing.assert_array_equal(fed.final_state().centers, train_directly(fed)[0].centers)


def test_after_an_exchange_is_closed_its_replies_are_late_dup_or_superseded(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=0.5)
    spy = Spy(fed.world.broker)
    fed.start(3)
    fed.start_mute_device("d03")
    fed.world.run(lambda: fed.happened("round"))
    rdy = spy.said("rdy", cid="d00")[0]
    other = manifest_of(b"another update", "delta", inline=True)
    asked = [spy.say("d03", "rdy", **again(rdy)), spy.say("d00", "rdy", **again(rdy))]
    asked += [spy.say("d00", "rdy", **again(rdy, update=other)), spy.say("d00", "rdy", **again(rdy, round=77))]
    count = len(spy.said("ack"))
    fed.world.run(lambda: len(spy.said("ack")) + len(spy.said("err")) >= count + 4)
    assert [ack["status"] for ack in spy.said("ack")[count:]] == ["late", "dup", "superseded"]
    assert [(err["re"], err["code"]) for err in spy.said("err")] == [(asked[3], "closed")]
    fed.world.end()


def test_a_silent_device_costs_the_deadline_and_nothing_else(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=0.7, deadline_s=300.0)
    fed.start(3)
    fed.start_mute_device("d03", n=43)
    fed.complete()
    expected, _ = train_directly(fed, silent=frozenset({"d03"}))
    np.testing.assert_array_equal(fed.final_state().centers, expected.centers)
    waited_s = WAITED_MISSES * 300.0  # in two rounds of two exchanges each; after so many misses it is not waited for
    assert waited_s <= fed.world.clock.time_s < waited_s + 10.0
    assert [sorted(record["per_device"]) for record in fed.rounds()] == [["d00", "d01", "d02"]] * 2
    assert [record["silent"] for record in fed.rounds()] == [["d03"]] * 2


def test_below_the_quorum_the_training_stops_and_a_restart_gives_it_another_deadline(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=0.9, deadline_s=60.0)
    fed.start(3)
    mute = fed.start_mute_device("d03", n=43)
    with pytest.raises(NetworkError, match="only 3 of 4 devices gave an answer that counts in round 1"):
        fed.finish()
    fed.world.kill(mute.name)
    fed.start_coordinator()
    fed.start_device("d03", softmax_program.grouped_fleet(4, 2)["d03"])
    fed.complete()
    np.testing.assert_array_equal(fed.final_state().centers, train_directly(fed)[0].centers)


def test_a_refusal_of_an_earlier_try_does_not_count_for_the_repeat_which_has_the_new_deadline(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=0.9, deadline_s=60.0)
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.start_devices(3)
    fed.start_mute_device("d03", n=43)
    with pytest.raises(NetworkError, match="only 3 of 4 devices"):
        fed.finish()
    (first,) = spy.said("task", cid="d03")
    key = {name: first[name] for name in ("run", "round", "exchange")}
    fed.config = replace(fed.config, round=replace(fed.config.round, deadline_s=500.0))
    fed.start_coordinator()
    fed.world.run(lambda: len(spy.said("task", cid="d03")) > 1)
    assert spy.said("task", cid="d03")[1]["left_ms"] == 500_000
    spy.say("d03", "nack", re=first["id"], **key, code="deadline", detail="the time was over")
    fed.world.run(lambda: fed.live_since(400.0))
    assert (fed.live is not None, read_status(fed.config.folder)["runs"][0]["refused"]) == (True, {})
    spy.say("d03", "nack", re=spy.said("task", cid="d03")[-1]["id"], **key, code="deadline")
    with pytest.raises(NetworkError, match="only 3 of 4 devices"):
        fed.world.run(lambda: False, limit_s=10)
    assert list(read_status(fed.config.folder)["runs"][0]["refused"]) == ["d03"]
    fed.world.end()


def test_below_the_quorum_it_goes_on_where_that_is_wanted(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=0.9, deadline_s=60.0, below_quorum="continue")
    fed.start(3)
    fed.start_mute_device("d03", n=43)
    fed.complete()
    expected, _ = train_directly(fed, silent=frozenset({"d03"}))
    np.testing.assert_array_equal(fed.final_state().centers, expected.centers)


def test_a_broker_that_forgets_everything_costs_nothing(tmp_path: Path) -> None:
    calm, rough = (Federation.of(tmp_path / name, ballast=BALLAST) for name in ("calm", "rough"))
    for fed in (calm, rough):
        spy = Spy(fed.world.broker)
        fed.start(4)
        for moment in (10, 60, 120) if fed is rough else ():
            fed.world.run(lambda: len(spy.heard()) >= moment)  # noqa: B023 - used at once
            fed.world.broker.restart()
            spy = Spy(fed.world.broker)
        fed.complete()
    assert calm.final_states() == rough.final_states()
