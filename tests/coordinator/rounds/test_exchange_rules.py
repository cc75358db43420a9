from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.rounds.exchange_rules import (
    CREDIT_IDLE_S,
    GO_REPEAT_S,
    LEAST_PACE,
    Ack,
    Block,
    Close,
    Event,
    Go,
    OpenExchange,
    Ready,
    Refused,
    Stored,
    Tick,
    advance,
    open_exchange,
)

A, B = "a" * 64, "b" * 64


def opened(
    asked: str = "xyz",
    quorum: int = 2,
    credits: int = 8,  # noqa: A002 - the protocol's word
    *,
    goal: int | None = None,
    budget: float = float("inf"),
) -> OpenExchange:
    return open_exchange(
        run="r",
        round=1,
        number=0,
        asked=set(asked),
        goal=goal,
        quorum=quorum,
        now_s=0.0,
        deadline_s=100.0,
        credits=credits,
        budget=budget,
    )


def after(exchange: OpenExchange, *events: Event, now_s: float = 1.0) -> OpenExchange:
    for event in events:
        exchange, _ = advance(exchange, event, now_s)
    return exchange


def test_the_first_update_of_a_client_counts_and_no_other() -> None:
    exchange, commands = advance(opened(), Stored("x", A), 1.0)
    assert commands == [Ack("x", A, "ok")]
    assert advance(exchange, Stored("x", A), 2.0)[1] == [Ack("x", A, "dup")]
    assert advance(exchange, Ready("x", A, 9), 2.0)[1] == [Ack("x", A, "dup")]
    assert advance(exchange, Stored("x", B), 2.0)[1] == [Ack("x", B, "superseded")]
    assert exchange.accepted == {"x": A}


def test_a_client_that_was_not_asked_is_rejected() -> None:
    exchange = opened()
    assert advance(exchange, Stored("stranger", A), 1.0) == (exchange, [Ack("stranger", A, "rejected")])
    assert advance(exchange, Ready("stranger", A, 9), 1.0) == (exchange, [Ack("stranger", A, "rejected")])
    assert advance(exchange, Refused("stranger", "no_data"), 1.0) == (exchange, [])


def test_everybodys_answer_closes_the_exchange_and_a_refusal_is_an_answer() -> None:
    exchange = after(opened(), Stored("x", A), Refused("y", "no_data"))
    closed, commands = advance(exchange, Stored("z", B), 2.0)
    assert commands == [Ack("z", B, "ok"), Close(frozenset("xz"))]
    assert closed.closed


def test_of_more_devices_than_wanted_the_first_to_answer_close_the_exchange() -> None:
    exchange = after(opened("vwxyz", goal=3), Stored("x", A), Refused("v", "no_data"), Stored("y", A))
    assert not exchange.closed
    closed, commands = advance(exchange, Stored("w", B), 2.0)
    assert commands == [Ack("w", B, "ok"), Close(frozenset("wxy"))]
    assert advance(closed, Stored("z", B), 3.0)[1] == [Ack("z", B, "late")]


def test_where_too_many_refuse_to_reach_the_goal_everybodys_answer_closes_it() -> None:
    exchange = after(opened("xyz", goal=2), Refused("x", "no_data"), Refused("y", "no_data"))
    assert advance(exchange, Stored("z", A), 2.0)[1] == [Ack("z", A, "ok"), Close(frozenset("z"))]


def test_uploads_hold_no_more_bytes_than_the_budget_but_one_may_always_go_on() -> None:
    exchange = opened(budget=20)
    exchange, commands = advance(exchange, Ready("x", A, 30), 1.0)
    assert commands == [Go("x", A)]
    exchange = after(exchange, Ready("y", B, 9), Ready("z", B, 9))
    assert list(exchange.uploads) == ["x"]
    assert advance(exchange, Stored("x", A), 2.0)[1] == [Ack("x", A, "ok"), Go("y", B), Go("z", B)]


def test_the_deadline_closes_with_the_updates_that_came() -> None:
    exchange = after(opened(), Stored("x", A))
    assert advance(exchange, Tick(), 99.9)[1] == []
    assert advance(exchange, Tick(), 100.0)[1] == [Close(frozenset("x"))]
    assert advance(after(exchange, Stored("y", B)), Tick(), 100.0)[1] == [Close(frozenset("xy"))]


def test_after_closing_everything_new_is_late_and_what_was_stored_stays_a_duplicate() -> None:
    closed = after(opened(), Stored("x", A), Tick(), now_s=100.0)
    assert advance(closed, Stored("y", B), 101.0) == (closed, [Ack("y", B, "late")])
    assert advance(closed, Ready("y", B, 9), 101.0) == (closed, [Ack("y", B, "late")])
    assert advance(closed, Stored("x", A), 101.0) == (closed, [Ack("x", A, "dup")])
    assert advance(closed, Tick(), 999.0) == (closed, [])


def test_uploads_wait_for_a_credit_and_get_it_first_come_first_served() -> None:
    exchange, first = advance(opened(credits=1), Ready("x", A, 9), 1.0)
    assert first == [Go("x", A)]
    exchange, nothing = advance(exchange, Ready("y", B, 9), 1.0)
    assert nothing == []
    exchange = after(exchange, Ready("z", B, 9))
    exchange, commands = advance(exchange, Stored("x", A), 2.0)
    assert commands == [Ack("x", A, "ok"), Go("y", B)]


def test_a_repeated_ready_goes_on_and_keeps_its_place() -> None:
    exchange = after(opened(credits=1), Ready("x", A, 9), Ready("y", B, 9), Ready("z", B, 9), Ready("y", B, 9))
    assert list(exchange.queue) == ["y", "z"]
    assert advance(exchange, Ready("x", A, 9), 2.0)[1] == [Go("x", A)]


def test_a_recomputed_result_replaces_the_one_that_was_offered() -> None:
    exchange, commands = advance(after(opened(), Ready("x", A, 9)), Ready("x", B, 9), 2.0)
    assert commands == [Go("x", B)]
    assert advance(exchange, Stored("x", B), 3.0)[1] == [Ack("x", B, "ok")]


def test_a_silent_upload_is_told_to_go_on_and_then_loses_its_credit() -> None:
    exchange = after(opened(credits=1), Ready("x", A, 9), Ready("y", B, 9), now_s=0.0)
    assert advance(exchange, Tick(), GO_REPEAT_S - 0.1)[1] == []
    exchange, commands = advance(exchange, Tick(), GO_REPEAT_S)
    assert commands == [Go("x", A)]
    exchange, commands = advance(exchange, Tick(), CREDIT_IDLE_S)
    assert commands == [Go("y", B)]
    assert list(exchange.uploads) == ["y"]


def test_it_says_when_time_alone_will_change_something() -> None:
    exchange = opened()
    assert exchange.wakes_at_s == 100.0
    exchange = after(exchange, Ready("x", A, 9), now_s=0.0)
    due: list[float] = []
    while len(due) < 5:
        due.append(exchange.wakes_at_s)
        exchange = after(exchange, Tick(), now_s=due[-1])
    assert due == [8.0, 16.0, 24.0, 30.0, 100.0]
    assert exchange.wakes_at_s == float("inf")


def test_blocks_keep_a_credit_alive() -> None:
    exchange = after(opened(), Ready("x", A, 9), now_s=0.0)
    exchange = after(exchange, Block("x", 1), now_s=CREDIT_IDLE_S - 1)
    assert list(after(exchange, Tick(), now_s=CREDIT_IDLE_S + 1).uploads) == ["x"]
    assert after(opened(), Block("x", 1)) == opened()


def test_a_slow_upload_keeps_its_credit_until_another_one_waits_and_then_takes_turns() -> None:
    exchange = after(opened(credits=1), Ready("x", A, 100), now_s=0.0)
    for now_s in (20.0, 40.0, 60.0):
        exchange = after(exchange, Block("x", 1), Tick(), now_s=now_s)
    assert list(exchange.uploads) == ["x"]
    exchange, commands = advance(after(exchange, Ready("y", B, 100), now_s=60.0), Tick(), 60.0)
    assert commands == [Go("y", B)]
    assert list(exchange.queue) == ["x"]
    assert advance(exchange, Stored("y", B), 61.0)[1] == [Ack("y", B, "ok"), Go("x", A)]


def test_an_upload_at_the_least_pace_is_not_interrupted() -> None:
    exchange = after(opened(credits=1), Ready("x", A, 100), Ready("y", B, 100), now_s=0.0)
    pace = 100.0 / LEAST_PACE / 100  # seconds per byte
    for second in range(1, 24):
        exchange = after(exchange, Block("x", round(1 / pace)), Tick(), now_s=float(second))
    assert list(exchange.uploads) == ["x"]
    exchange = after(exchange, Tick(), now_s=exchange.wakes_at_s)
    assert list(exchange.uploads) == ["x"]  # the reminder, after eight seconds of silence
    assert list(after(exchange, Tick(), now_s=CREDIT_IDLE_S + 23).uploads) == ["y"]


def test_an_announcement_without_blocks_does_not_prolong_a_credit() -> None:
    exchange = after(opened(credits=1), Ready("x", A, 9), Ready("y", B, 9), now_s=0.0)
    exchange = after(exchange, Ready("x", A, 9), now_s=CREDIT_IDLE_S - 1)
    assert list(after(exchange, Tick(), now_s=CREDIT_IDLE_S).uploads) == ["y"]


def test_a_larger_update_in_the_place_of_an_announced_one_waits_for_its_bytes() -> None:
    exchange = after(opened(budget=20), Ready("x", A, 9), Ready("y", A, 9))
    exchange, commands = advance(exchange, Ready("x", B, 15), 2.0)
    assert (commands, list(exchange.uploads), list(exchange.queue)) == ([], ["y"], ["x"])
    assert advance(exchange, Stored("y", A), 3.0)[1] == [Ack("y", A, "ok"), Go("x", B)]


def test_a_client_that_refused_may_still_answer() -> None:
    exchange = after(opened(), Refused("x", "unavailable"), Ready("x", A, 9))
    assert exchange.refused == {}
    assert after(exchange, Stored("x", A)).accepted == {"x": A}


def test_a_refusal_after_an_accepted_update_changes_nothing() -> None:
    exchange = after(opened(), Stored("x", A))
    assert after(exchange, Refused("x", "internal")).accepted == {"x": A}
    assert after(exchange, Refused("x", "internal")).refused == {}


def test_a_restart_remembers_who_answered_and_closes_if_that_was_everybody() -> None:
    again = open_exchange(
        run="r",
        round=1,
        number=0,
        asked="xy",
        quorum=1,
        now_s=50.0,
        deadline_s=10.0,
        accepted={"x": A},
        refused={"y": "no_data"},
    )
    assert advance(again, Tick(), 50.0)[1] == [Close(frozenset("x"))]


def test_an_exchange_that_asks_nobody_closes_at_once() -> None:
    assert advance(opened(asked=""), Tick(), 0.0)[1] == [Close(frozenset())]


def test_impossible_exchanges_are_refused() -> None:
    with pytest.raises(ValueError, match="credits"):
        opened(credits=0)
    with pytest.raises(ValueError, match="quorum"):
        opened(quorum=-1)
    key: dict[str, Any] = {"run": "r", "round": 1, "number": 0, "asked": "x", "quorum": 0, "now_s": 0, "deadline_s": 1}
    with pytest.raises(ValueError, match="not asked"):
        open_exchange(**key, accepted={"y": A})
    with pytest.raises(ValueError, match="not asked"):
        open_exchange(**key, refused={"y": "no_data"})
    with pytest.raises(ValueError, match="accepted and refused"):
        open_exchange(**key, accepted={"x": A}, refused={"x": "no_data"})
    assert open_exchange(**key, accepted={"x": A}, credits=1).quorum == 0


def test_without_other_settings_32_uploads_of_any_size_go_on_at_once_and_all_are_wanted() -> None:
    cids = [f"d{i}" for i in range(33)]
    exchange = open_exchange(run="r", round=1, number=0, asked=cids, quorum=0, now_s=0.0, deadline_s=100.0)
    exchange = after(exchange, *(Ready(cid, A, 2**40) for cid in cids))
    assert (len(exchange.uploads), list(exchange.queue), exchange.goal) == (32, ["d32"], 33)
    assert opened("xyz", goal=5).goal == 3


def test_uploads_that_fill_the_budget_exactly_go_on_together() -> None:
    exchange = after(opened(budget=18), Ready("x", A, 9), Ready("y", A, 9), Ready("z", A, 9))
    assert (list(exchange.uploads), list(exchange.queue)) == (["x", "y"], ["z"])
    assert list(after(opened(budget=17), Ready("x", A, 9), Ready("y", A, 9)).uploads) == ["x"]


def test_a_reminder_comes_eight_seconds_after_the_last_block_and_the_last_word_to_the_client() -> None:
    exchange = after(opened(), Ready("x", A, 9), now_s=0.0)
    announced = after(exchange, Ready("x", A, 9), now_s=5.0)
    heard = after(exchange, Block("x", 1), now_s=5.0)
    for each in (announced, heard):
        assert each.wakes_at_s == 13.0
        assert advance(each, Tick(), 12.9)[1] == []
        assert advance(each, Tick(), 13.0)[1] == [Go("x", A)]


def test_while_another_waits_a_quarter_of_the_time_for_a_whole_upload_is_enough_and_not_a_moment_more() -> None:
    """100 s: 30 s to begin, and a second for each of 25 bytes."""
    exchange = after(opened(credits=1), Ready("x", A, 25), now_s=0.0)
    exchange = after(exchange, Block("x", 1), now_s=20.0)
    exchange = after(exchange, Block("x", 2), now_s=29.0)
    assert exchange.wakes_at_s == 37.0  # a reminder
    exchange = after(exchange, Ready("y", B, 9), now_s=29.0)
    assert exchange.wakes_at_s == 33.0
    assert list(after(exchange, Tick(), now_s=32.9).uploads) == ["x"]
    behind, commands = advance(exchange, Tick(), 33.0)
    assert (commands, list(behind.queue)) == ([Go("y", B)], ["x"])


def test_it_shows_who_has_answered_who_uploads_who_waits_and_how_long_it_is_open() -> None:
    exchange = after(opened("uvwxyz", quorum=3, credits=1, goal=5), Stored("z", A), Refused("y", "no_data"))
    exchange = after(exchange, Ready("x", A, 9), Ready("w", A, 9))
    assert exchange.progress(33.34) == {
        "run": "r", "round": 1, "exchange": 0, "asked": 6, "wanted": 5, "quorum": 3, "closed": False, "left_s": 66.7,
        "answered": ["z"], "uploading": ["x"], "waiting": ["w"], "refused": ["y"], "open": ["u", "v"],
    }  # fmt: skip
    closed = after(exchange, Tick(), now_s=100.0).progress(100.5)
    assert (closed["closed"], closed["left_s"], closed["uploading"], closed["waiting"]) == (True, 0.0, [], [])


class RoundsMachine(RuleBasedStateMachine):
    """Any order of events, any delays: no client counts twice, credits are never exceeded, and the exchange ends."""

    @initialize(
        asked=st.sets(st.sampled_from("abcdef")),
        goal=st.none() | st.integers(1, 6),
        quorum=st.integers(0, 6),
        free=st.integers(1, 3),
        budget=st.sampled_from([5, 18, 100]),
    )
    def start(self, asked: set[str], goal: int | None, quorum: int, free: int, budget: int) -> None:
        self.exchange = opened("".join(asked), quorum, free, goal=goal, budget=budget)
        self.now_s = 0.0
        self.oks: list[str] = []
        self.goes: set[str] = set()
        self.closes: list[Close] = []

    def happens(self, event: Event) -> None:
        before = repr(self.exchange)
        old, was_closed = self.exchange, self.exchange.closed
        self.exchange, commands = advance(old, event, self.now_s)
        assert repr(old) == before
        for command in commands:
            if isinstance(command, Ack) and command.status == "ok":
                self.oks.append(command.cid)
                assert not was_closed
            self.closes += [command] if isinstance(command, Close) else []
            self.goes |= {command.cid} if isinstance(command, Go) else set()

    @rule(cid=st.sampled_from("abcdefg"), sha256=st.sampled_from([A, B]))
    def ready(self, cid: str, sha256: str) -> None:
        self.happens(Ready(cid, sha256, 9))

    @rule(cid=st.sampled_from("abcdefg"), sha256=st.sampled_from([A, B]))
    def stored(self, cid: str, sha256: str) -> None:
        self.happens(Stored(cid, sha256))

    @rule(cid=st.sampled_from("abcdefg"), size=st.integers(1, 9))
    def block(self, cid: str, size: int) -> None:
        self.happens(Block(cid, size))

    @rule(cid=st.sampled_from("abcdefg"))
    def refused(self, cid: str) -> None:
        self.happens(Refused(cid, "no_data"))

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.happens(Tick())

    @precondition(lambda self: not self.exchange.closed)
    @rule()
    def time_passes_until_something_is_due(self) -> None:
        self.now_s = max(self.now_s, self.exchange.wakes_at_s)
        self.happens(Tick())

    @invariant()
    def nobody_counts_twice_and_strangers_never(self) -> None:
        assert sorted(self.oks) == sorted(self.exchange.accepted)
        assert set(self.oks) <= self.exchange.asked

    @invariant()
    def credits_are_never_exceeded_and_only_the_asked_hold_one(self) -> None:
        assert len(self.exchange.uploads) <= self.exchange.credits
        held = [upload.size for upload in self.exchange.uploads.values()]
        assert len(held) == 1 or sum(held) <= self.exchange.budget
        assert set(self.exchange.uploads) | set(self.exchange.queue) | self.goes <= self.exchange.asked
        assert not set(self.exchange.uploads) & set(self.exchange.queue)
        assert not (set(self.exchange.uploads) | set(self.exchange.queue)) & set(self.exchange.accepted)

    @invariant()
    def no_more_count_than_are_wanted(self) -> None:
        assert len(self.oks) <= max(self.exchange.goal, 0)

    @invariant()
    def it_closes_once_with_exactly_the_accepted(self) -> None:
        assert len(self.closes) == self.exchange.closed
        assert not (self.exchange.closed and (self.exchange.uploads or self.exchange.queue))
        if self.closes:
            assert self.closes[0].keys == set(self.exchange.accepted)

    @invariant()
    def nobody_waits_while_a_credit_is_free(self) -> None:
        held = sum(upload.size for upload in self.exchange.uploads.values())
        free = len(self.exchange.uploads) < self.exchange.credits and held + 9 <= self.exchange.budget
        assert not (self.exchange.queue and (free or not self.exchange.uploads))

    def teardown(self) -> None:
        if hasattr(self, "exchange"):
            self.now_s = max(self.now_s, self.exchange.closes_at_s)
            self.happens(Tick())
            assert self.exchange.closed


TestRounds = RoundsMachine.TestCase
