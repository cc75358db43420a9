"""A device that is on and silent costs a few deadlines, not one for each exchange; nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.exchange_rules import Close, OpenExchange, Refused, Stored, Tick, advance, open_exchange
from coordinator.rounds.silence import WAITED_MISSES, count_misses, is_waited_for, silent_devices
from tests.support.virtual_federation import Federation

SHA = "a" * 64
DEADLINE_S = 300.0


def opened(asked: str, silent: str = "", *, quorum: int = 2, goal: int | None = None) -> OpenExchange:
    return open_exchange(
        run="r", round=1, number=0, asked=set(asked), silent=set(silent), quorum=quorum, goal=goal, now_s=0.0,
        deadline_s=DEADLINE_S,
    )  # fmt: skip


def answered(exchange: OpenExchange, cids: str) -> OpenExchange:
    for cid in cids:
        exchange, _ = advance(exchange, Stored(cid, SHA), 1.0)
    return exchange


def test_an_exchange_closes_when_all_have_answered_for_whom_it_waits() -> None:
    assert not answered(opened("abcd", "d"), "ab").closed
    exchange, commands = advance(answered(opened("abcd", "d"), "ab"), Stored("c", SHA), 2.0)
    assert exchange.closed
    assert commands[-1] == Close(frozenset("abc"))


def test_a_silent_device_that_answers_in_time_counts_as_always() -> None:
    exchange = answered(opened("abcd", "d"), "dabc")
    assert (exchange.closed, set(exchange.accepted)) == (True, set("abcd"))


def test_below_the_quorum_an_exchange_waits_for_silent_devices_too() -> None:
    exchange = answered(opened("abcd", "cd", quorum=3), "ab")
    assert not exchange.closed
    assert answered(exchange, "d").closed
    assert advance(exchange, Tick(), DEADLINE_S)[0].closed


def test_without_an_answer_an_exchange_does_not_close_before_its_deadline() -> None:
    exchange = opened("ab", "ab", quorum=0)
    assert not advance(exchange, Tick(), 1.0)[0].closed


def test_a_refusal_of_the_last_device_that_is_waited_for_closes() -> None:
    assert advance(answered(opened("abcd", "d"), "ab"), Refused("c", "no_data"), 1.0)[0].closed


def test_a_silent_device_is_waited_for_three_times_and_then_after_4_8_16_misses() -> None:
    assert [misses for misses in range(100) if is_waited_for(misses)] == [0, 1, 2, 4, 8, 16, 32, 64]


@given(number=st.integers(1, 5_000))
def test_silence_costs_few_deadlines(number: int) -> None:
    waited = [misses for misses in range(number) if is_waited_for(misses)]
    assert waited[:WAITED_MISSES] == list(range(min(number, WAITED_MISSES)))
    assert len(waited) <= WAITED_MISSES + max(0, (number - 1).bit_length() - 2)


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 40)), st.sets(st.sampled_from("abcd")))
def test_an_answer_ends_a_row_of_misses_and_silence_lengthens_it(misses: dict[str, int], heard: set[str]) -> None:
    closed = advance(answered(opened("abcd"), "".join(heard)), Tick(), DEADLINE_S)[0]
    after = count_misses(misses, closed, told="abc")
    for cid in "abcdef":
        missed = misses.get(cid, 0) + (cid in "abc" and cid not in heard)
        assert after.get(cid, 0) == (0 if cid in heard else missed)
    assert silent_devices({}, "abcd") == frozenset()


def test_a_device_that_others_were_faster_than_is_not_called_silent() -> None:
    closed = answered(opened("abcd", goal=3), "abc")
    assert closed.closed
    assert count_misses({"d": 2}, closed, told="abcd") == {"d": 2}


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_device_costs_a_run_a_few_deadlines(tmp_path: Path, silent: int) -> None:
    """20 rounds of two exchanges, in virtual time; the models are those of the devices that answered."""
    fed = Federation.of(tmp_path, devices=3 + silent, quorum=0.5, deadline_s=DEADLINE_S, rounds=20)
    fed.start(3)
    if silent:
        fed.start_mute_device("d99")
    began_s = fed.world.clock.time_s
    fed.complete()
    waited = (fed.world.clock.time_s - began_s) / DEADLINE_S
    expected = 0 if not silent else sum(is_waited_for(misses) for misses in range(40))
    assert expected <= waited < expected + 1
