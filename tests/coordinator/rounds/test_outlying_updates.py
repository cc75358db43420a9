"""An update that is out of line with the others: who is named, by what measure, and what a run does then."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.update_validation import MIN_UPDATES_FOR_MEDIAN, outliers
from edge_client.protocol import codecs
from edge_client.protocol.blocks import manifest_of
from tests.support.virtual_federation import Federation, Spy, program

MOVES = st.lists(st.floats(0.0, 100.0), min_size=MIN_UPDATES_FOR_MEDIAN, max_size=12)


def cohort(*moves: float, what: str = "delta") -> dict[str, dict[str, float]]:
    return {f"d{i:02}": {what: far} for i, far in enumerate(moves)}


def test_who_moves_far_more_than_the_cohort_is_named_with_the_reason() -> None:
    refused, scales = outliers(cohort(1.0, 1.2, 0.9, 50.0), {}, ratio=10.0)
    assert refused == {"d03": "rejected: moved 45.5 times as far as is usual in this run, at most 10"}
    assert scales == {"delta": 1.1}


@given(moves=MOVES, scale=st.floats(0.0, 10.0), seed=st.integers(0, 99))
def test_it_is_decided_by_the_set_of_replies_and_not_by_their_order(
    moves: list[float], scale: float, seed: int
) -> None:
    known = {"delta": scale}
    shuffled = list(cohort(*moves).items())
    np.random.default_rng(seed).shuffle(shuffled)
    assert outliers(dict(shuffled), known, ratio=3.0) == outliers(cohort(*moves), known, ratio=3.0)


@given(honest=st.lists(st.floats(0.5, 1.5), min_size=3, max_size=8), far=st.floats(1.0, 1e6))
def test_a_minority_can_neither_stay_beyond_the_ratio_nor_push_an_honest_device_out(
    honest: list[float], far: float
) -> None:
    refused, scales = outliers(cohort(*honest, *[far] * ((len(honest) - 1) // 2)), {}, ratio=4.0)
    assert 0.5 <= scales["delta"] <= 1.5
    assert set(refused) == {
        who
        for who, kinds in cohort(*honest, *[far] * ((len(honest) - 1) // 2)).items()
        if kinds["delta"] > 4.0 * scales["delta"]
    }
    assert not set(refused) & set(cohort(*honest))


def test_a_fleet_that_has_converged_still_takes_a_newcomer() -> None:
    _, scales = outliers(cohort(1.0, 1.1, 0.9), {}, ratio=10.0)
    refused, after = outliers(cohort(0.01, 0.011, 0.009, 1.2), scales, ratio=10.0)
    assert not refused
    assert after == scales


def test_two_updates_have_no_middle_and_kinds_are_not_compared() -> None:
    assert outliers(cohort(1.0, 1e6), {}, ratio=10.0) == ({}, {})
    mixed = {**cohort(1.0, 1.0, 1.0), "d09": {"model": 1e3}}
    assert outliers(mixed, {}, ratio=10.0)[0] == {}
    assert outliers(cohort(0.0, 0.0, 0.0, 1.0), {}, ratio=10.0)[0] == {}  # nobody moved: nothing is usual yet


# ---- over a broker ----


def forged(spy: Spy, cid: str, *, base: str | None = None, times: float = 1.0) -> str:
    """Announce an update of `cid` that moves everything by `times`, taken from another base than asked if given."""
    task, schema = spy.said("task", cid=cid)[-1], program().schema
    key = {name: task[name] for name in ("run", "round", "exchange")}
    flat = np.full(schema.size, times, np.float32)
    data = codecs.encode_vector(flat, schema, codec="f32", kind="delta", base=base or task["start"]["sha256"])
    update = manifest_of(data, "delta", inline=True)
    spy.say(cid, "rdy", **key, attempt=1, n=40, what="delta", update=update, seconds=1.0)
    return str(task["start"]["sha256"])


def heard(spy: Spy, kind: str, number: int, *, cid: str | None = None) -> bool:
    return len(spy.said(kind, cid=cid)) >= number


def test_an_update_out_of_line_is_left_out_at_the_closing_and_a_restart_decides_nothing_anew(tmp_path: Path) -> None:
    outcomes = []
    for killed in (False, True):
        fed = Federation.of(tmp_path / str(killed), quorum=0.5, deadline_s=30.0)
        spy = Spy(fed.world.broker)
        fed.start_coordinator()
        fed.start_devices(3)
        fed.start_mute_device("d03")
        others = 0 if killed else 3
        fed.world.run(partial(heard, spy, "ack", others))
        fed.world.run(partial(heard, spy, "task", 1, cid="d03"))
        forged(spy, "d03", times=9.0)
        fed.world.run(partial(heard, spy, "ack", 1, cid="d03"))
        assert spy.said("ack", cid="d03")[0]["status"] == "ok"  # nothing is wrong with it by itself
        if killed:
            fed.world.kill("coordinator.0")
            fed.start_coordinator()
        fed.finish()
        fed.world.end()
        first = fed.rounds()[0]
        assert set(first["refused"]) == {"d03"}
        assert first["refused"]["d03"].startswith("rejected: moved")
        outcomes.append((fed.final_states(), first))
    assert outcomes[0] == outcomes[1]


def test_a_reply_of_an_earlier_round_sent_again_is_refused_and_named(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=0.5, deadline_s=30.0)
    spy = Spy(fed.world.broker)
    fed.start(3)
    fed.start_mute_device("d03")
    fed.world.run(lambda: bool(spy.said("task", cid="d03")))
    old = forged(spy, "d03", times=0.01)
    fed.world.run(lambda: any(task["round"] == 2 and task["job"] == "fit" for task in spy.said("task", cid="d03")))
    forged(spy, "d03", base=old, times=0.01)
    fed.finish()
    fed.world.end()
    assert fed.rounds()[1]["refused"]["d03"].startswith("bad_codec")
