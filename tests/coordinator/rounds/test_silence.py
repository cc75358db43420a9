"""A device that is on and silent costs a few deadlines, not one for each exchange; nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.exchange_rules import OpenExchange
from coordinator.rounds.silence import WAITED_MISSES, count_misses, is_waited_for, silent_devices
from tests.support.virtual_federation import Federation

SHA = "a" * 64
DEADLINE_S = 300.0


def opened(asked: str, silent: str = "", *, quorum: int = 2, goal: int | None = None) -> OpenExchange:
    return OpenExchange(
        asked=set(asked), silent=set(silent), quorum=quorum, goal=goal, now_s=0.0, deadline_s=DEADLINE_S
    )


def answered(exchange: OpenExchange, cids: str) -> OpenExchange:
    exchange.accept(dict.fromkeys(cids, SHA), 1.0)
    return exchange


def test_an_exchange_is_over_when_all_have_answered_for_whom_it_waits() -> None:
    exchange = answered(opened("abcd", "d"), "ab")
    assert not exchange.complete
    assert answered(exchange, "c").complete


def test_a_silent_device_that_answers_in_time_counts_as_always() -> None:
    exchange = opened("abcd", "d")
    assert exchange.countable(dict.fromkeys("dabc", SHA)) == list("dabc")
    assert answered(exchange, "dabc").complete


def test_below_the_quorum_an_exchange_waits_for_silent_devices_too() -> None:
    exchange = answered(opened("abcd", "cd", quorum=3), "ab")
    assert not exchange.complete
    assert exchange.is_over(DEADLINE_S)
    assert answered(exchange, "d").complete


def test_without_an_answer_an_exchange_is_not_over_before_its_deadline() -> None:
    assert not opened("ab", "ab", quorum=0).is_over(1.0)


def test_a_refusal_of_the_last_device_that_is_waited_for_ends_it() -> None:
    exchange = answered(opened("abcd", "d"), "ab")
    exchange.refuse("c", "no_data", 1.0)
    assert exchange.complete


def test_a_silent_device_is_waited_for_three_times_and_then_after_4_8_16_misses() -> None:
    assert [misses for misses in range(100) if is_waited_for(misses)] == [0, 1, 2, 4, 8, 16, 32, 64]


@given(number=st.integers(1, 5_000))
def test_silence_costs_few_deadlines(number: int) -> None:
    waited = [misses for misses in range(number) if is_waited_for(misses)]
    assert waited[:WAITED_MISSES] == list(range(min(number, WAITED_MISSES)))
    assert len(waited) <= WAITED_MISSES + max(0, (number - 1).bit_length() - 2)


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 40)), st.sets(st.sampled_from("abcd")))
def test_an_answer_ends_a_row_of_misses_and_silence_lengthens_it(misses: dict[str, int], heard: set[str]) -> None:
    after = count_misses(misses, answered(opened("abcd"), "".join(heard)), told="abc")
    for cid in "abcdef":
        missed = misses.get(cid, 0) + (cid in "abc" and cid not in heard)
        assert after.get(cid, 0) == (0 if cid in heard else missed)
    assert silent_devices({}, "abcd") == frozenset()


def test_a_device_that_others_were_faster_than_is_not_called_silent() -> None:
    assert count_misses({"d": 2}, answered(opened("abcd", goal=3), "abc"), told="abcd") == {"d": 2}


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
