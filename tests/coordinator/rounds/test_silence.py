"""A device that is on and silent costs a few deadlines, not one for each exchange; nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.exchange_rules import OpenExchange
from coordinator.rounds.silence import (
    ANSWERS_FOR_ONE,
    WAITED_MISSES,
    LastingRefusals,
    Misses,
    count_misses,
    is_waited_for,
    silent_devices,
)
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


def test_where_no_answer_is_needed_an_exchange_of_silent_devices_is_over_at_once() -> None:
    silent = OpenExchange(asked="ab", silent="ab", quorum=0, least=0, now_s=0.0, deadline_s=DEADLINE_S)
    assert silent.is_over(0.0)
    awake = OpenExchange(asked="ab", silent="a", quorum=0, least=0, now_s=0.0, deadline_s=DEADLINE_S)
    assert not awake.is_over(0.0)
    assert answered(awake, "b").is_over(1.0)


def test_an_answer_that_pays_for_nothing_ends_a_row_and_leaves_what_is_owed() -> None:
    misses = {"d": Misses(2, 8)}
    assert count_misses(misses, answered(opened("abcd"), "abcd"), told="abcd", pays=False) == {"d": Misses(0, 8)}


def test_the_last_answer_that_is_owed_leaves_nothing() -> None:
    misses = {"a": Misses(2, 1), "b": Misses(0, 2), "c": Misses(1, 0)}
    assert count_misses(misses, answered(opened("abcd"), "abcd"), told="abcd") == {"b": Misses(0, 1)}


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


MISSES = st.builds(Misses, st.integers(0, 40), st.integers(0, 15))
PATTERNS = ("MMA", "MA", "MMMA", "MMMMA", "MMMMAA", "MAAAA", "MMMMMMMMA")  # missed and answered, again and again
NUMBER = 200  # of exchanges


@given(st.dictionaries(st.sampled_from("abcdef"), MISSES), st.sets(st.sampled_from("abcd")))
def test_an_answer_ends_a_row_of_misses_and_silence_lengthens_it(misses: dict[str, Misses], heard: set[str]) -> None:
    after = count_misses(misses, answered(opened("abcd"), "".join(heard)), told="abc")
    for cid in "abcdef":
        missed = misses.get(cid, Misses()).row + (cid in "abc" and cid not in heard)
        assert after.get(cid, Misses()).row == (0 if cid in heard else missed)
    assert silent_devices({}, "abcd") == frozenset()


def test_a_device_that_others_were_faster_than_is_not_called_silent() -> None:
    missed = {"d": Misses(2, 8)}
    assert count_misses(missed, answered(opened("abcd", goal=3), "abc"), told="abcd") == missed


def held_up(pattern: str, exchanges: int) -> int:
    """How many exchanges wait in vain for d, which misses and answers them by this pattern; the others answer."""
    misses, held = dict[str, Misses](), 0
    for number in range(exchanges):
        silent = "".join(silent_devices(misses, "abcd"))
        missed = pattern[number % len(pattern)] == "M"
        held += missed and "d" not in silent
        misses = count_misses(misses, answered(opened("abcd", silent), "abc" if missed else "abcd"), told="abcd")
    return held


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_device_that_answers_by_a_short_pattern_holds_up_one_exchange_in_five_at_most(pattern: str) -> None:
    """An answer ended each row, so that two of three exchanges waited for it, for ever; so did each evaluation."""
    assert held_up(pattern, 500) <= WAITED_MISSES + 500 / (1 + ANSWERS_FOR_ONE)


@pytest.mark.parametrize("missed", range(1, 18))
def test_no_long_pattern_of_misses_and_answers_holds_up_one_exchange_in_four(missed: int) -> None:
    """The worst misses nine and then answers twelve: 5 of 21 wait for it."""
    worst = max(held_up("M" * missed + "A" * answers, NUMBER) for answers in range(1, 14))
    assert worst <= WAITED_MISSES + 1 + NUMBER / 4


def test_a_device_that_is_back_and_slower_than_the_others_is_waited_for_again() -> None:
    """It answers whenever it is waited for, and is too late otherwise."""
    misses = {"d": Misses(1_023, 15)}
    waited = list[bool]()
    for _ in range(60):
        silent = "".join(silent_devices(misses, "abcd"))
        waited.append("d" not in silent)
        misses = count_misses(misses, answered(opened("abcd", silent), "abcd" if waited[-1] else "abc"), told="abcd")
    assert all(waited[30:])


def test_of_a_fleet_whose_devices_are_often_away_a_tenth_is_left_out_at_most() -> None:
    """Else all would be, and exchanges would end at the quorum."""
    fleet = [f"d{i:02d}" for i in range(30)]
    misses = {cid: Misses(0, 12 + (cid == "d07")) for cid in fleet}
    assert silent_devices(misses, fleet) == {"d00", "d01", "d07"}
    assert silent_devices(misses | {"d29": Misses(3, 15)}, fleet) == {"d00", "d01", "d07", "d29"}


def test_a_sum_leaves_out_no_more_devices_for_what_they_owe_than_it_may_lose() -> None:
    misses = {cid: Misses(0, 12) for cid in "abc"} | {"d": Misses(3, 12)}
    assert silent_devices(misses, "abcd", 0) == {"d"}  # it does not answer
    assert silent_devices(misses, "abcd", 1) == silent_devices(misses, "abcd", 9) == {"a", "d"}


def test_a_device_that_can_do_one_kind_of_task_is_asked_for_that() -> None:
    known = LastingRefusals()
    for _ in range(3):
        known.note("d0", "fit", "no_space")
    assert (known.unable("d0", "fit"), known.unable("d0", "probe"), known.unable("d1", "fit")) == ("no_space", "", "")
    known.forget("d0", "probe")
    assert known.unable("d0", "fit")
    known.forget("d0", "fit")
    assert not known.unable("d0", "fit")


def test_a_device_that_refused_is_asked_as_often_as_a_silent_one_is_waited_for() -> None:
    known, asked = LastingRefusals(), list[int]()
    for row in range(20):
        if not known.skips("d0"):
            asked.append(row)
            known.note("d0", "fit", "no_space")
    assert asked == [0, 1, 2, 4, 8, 16]
    assert not known.skips("d1")


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
