from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.rounds.exchange_rules import CREDIT_IDLE_S, GO_REPEAT_S, LEAST_PACE, OpenExchange

A, B = "a" * 64, "b" * 64


def opened(
    asked: str = "xyz",
    quorum: int = 2,
    credits: int = 8,  # noqa: A002 - the protocol's word
    *,
    goal: int | None = None,
    budget: float = float("inf"),
) -> OpenExchange:
    return OpenExchange(
        asked=set(asked), goal=goal, quorum=quorum, now_s=0.0, deadline_s=100.0, credits=credits, budget=budget
    )


def offered(exchange: OpenExchange, *cids: str, size: int = 9, now_s: float = 0.0) -> OpenExchange:
    for cid in cids:
        exchange.offer(cid, size, now_s)
    return exchange


def accepted(exchange: OpenExchange, *cids: str) -> OpenExchange:
    for cid in cids:
        exchange.accept({cid: A}, 1.0)
    return exchange


def test_the_first_update_of_a_client_counts_and_no_other() -> None:
    exchange = opened()
    assert (exchange.status("x", A), exchange.countable({"x": A})) == ("", ["x"])
    exchange.accept({"x": A}, 1.0)
    assert (exchange.status("x", A), exchange.status("x", B)) == ("dup", "superseded")
    assert exchange.countable({"x": A}) == exchange.countable({"x": B}) == []
    assert exchange.accepted == {"x": A}


def test_what_is_told_beside_the_updates_counts_and_does_not_end_the_exchange() -> None:
    exchange = OpenExchange(asked="abuvwx", goal=2, beside="ab", quorum=1, now_s=0.0, deadline_s=100.0)
    assert exchange.progress(0.0)["wanted"] == 4
    accepted(exchange, "a", "u")
    assert not exchange.is_over(1.0)
    assert exchange.countable({"v": A, "b": A, "w": A}) == ["v", "b"]
    assert accepted(exchange, "v").is_over(1.0)
    assert exchange.accepted.keys() == set("auv")
    again = OpenExchange(
        asked="abuvwx", goal=2, beside="ab", quorum=1, now_s=0.0, deadline_s=9.0, accepted=exchange.accepted
    )
    assert again.complete


def test_a_client_that_was_not_asked_is_rejected() -> None:
    exchange = opened()
    assert (exchange.status("stranger", A), exchange.countable({"stranger": A})) == ("rejected", [])
    assert exchange.refuse("stranger", "no_data", 1.0) == []
    assert (exchange.accepted, exchange.refused) == ({}, {})


def test_everybodys_answer_ends_the_exchange_and_a_refusal_is_an_answer() -> None:
    exchange = accepted(opened(), "x")
    exchange.refuse("y", "no_data", 1.0)
    assert not exchange.is_over(1.0)
    assert accepted(exchange, "z").is_over(2.0)
    assert exchange.accepted.keys() == set("xz")


def test_of_more_devices_than_wanted_the_first_to_answer_end_the_exchange() -> None:
    exchange = opened("vwxyz", goal=3)
    exchange.refuse("v", "no_data", 1.0)
    assert not accepted(exchange, "x", "y").is_over(1.0)
    assert exchange.countable(dict.fromkeys("wz", A)) == ["w"]
    assert accepted(exchange, "w").is_over(2.0)
    exchange.close()
    assert exchange.status("z", B) == "late"


def test_where_too_many_refuse_to_reach_the_goal_everybodys_answer_ends_it() -> None:
    exchange = opened("xyz", goal=2)
    exchange.refuse("x", "no_data", 1.0)
    exchange.refuse("y", "no_data", 1.0)
    assert not exchange.is_over(1.0)
    assert accepted(exchange, "z").is_over(2.0)


def test_uploads_hold_no_more_bytes_than_the_budget_but_one_may_always_go_on() -> None:
    exchange = opened(budget=20)
    assert exchange.offer("x", 30, 1.0) == ["x"]
    assert list(offered(exchange, "y", "z").uploads) == ["x"]
    assert exchange.accept({"x": A}, 2.0) == ["y", "z"]


def test_it_is_over_at_the_deadline() -> None:
    exchange = accepted(opened(), "x")
    assert (exchange.is_over(99.9), exchange.is_over(100.0)) == (False, True)


def test_after_closing_everything_new_is_late_and_what_was_stored_stays_a_duplicate() -> None:
    exchange = offered(accepted(opened(), "x"), "z")
    exchange.close()
    assert (exchange.status("y", B), exchange.countable({"y": B}), exchange.status("x", A)) == ("late", [], "dup")
    assert (exchange.tick(999.0), exchange.refuse("y", "no_data", 999.0)) == ([], [])
    assert (exchange.uploads, exchange.refused, exchange.is_over(999.0)) == ({}, {}, False)


def test_uploads_wait_for_a_credit_and_get_it_first_come_first_served() -> None:
    exchange = opened(credits=1)
    assert exchange.offer("x", 9, 1.0) == ["x"]
    assert exchange.offer("y", 9, 1.0) == []
    offered(exchange, "z")
    assert exchange.accept({"x": A}, 2.0) == ["y"]
    assert exchange.refuse("y", "no_data", 2.0) == ["z"]


def test_once_it_is_complete_no_client_is_told_to_upload() -> None:
    """The bytes of such an upload would count in a simulation, and no device sends them."""
    exchange = offered(opened(credits=1, goal=1), "x", "y")
    assert exchange.accept({"x": A}, 2.0) == []


def test_a_repeated_offer_goes_on_and_keeps_its_place() -> None:
    exchange = offered(opened(credits=1), "x", "y", "z", "y")
    assert list(exchange.queue) == ["y", "z"]
    assert exchange.offer("x", 9, 2.0) == ["x"]


def test_a_silent_upload_is_told_to_go_on_and_then_loses_its_credit() -> None:
    exchange = offered(opened(credits=1), "x", "y")
    assert exchange.tick(GO_REPEAT_S - 0.1) == []
    assert exchange.tick(GO_REPEAT_S) == ["x"]
    assert exchange.tick(CREDIT_IDLE_S) == ["y"]
    assert list(exchange.uploads) == ["y"]


def test_it_says_when_time_alone_will_change_something() -> None:
    exchange = opened()
    assert exchange.wakes_at_s == 100.0
    offered(exchange, "x")
    due: list[float] = []
    while len(due) < 5:
        due.append(exchange.wakes_at_s)
        exchange.tick(due[-1])
    assert due == [8.0, 16.0, 24.0, 30.0, 100.0]
    exchange.close()
    assert exchange.wakes_at_s == float("inf")


def test_blocks_keep_a_credit_alive() -> None:
    exchange = offered(opened(), "x")
    exchange.heard("x", 1, CREDIT_IDLE_S - 1)
    exchange.heard("y", 1, CREDIT_IDLE_S - 1)
    exchange.tick(CREDIT_IDLE_S + 1)
    assert list(exchange.uploads) == ["x"]


def test_a_slow_upload_keeps_its_credit_until_another_one_waits_and_then_takes_turns() -> None:
    exchange = offered(opened(credits=1), "x", size=100)
    for now_s in (20.0, 40.0, 60.0):
        exchange.heard("x", 1, now_s)
        exchange.tick(now_s)
    assert list(exchange.uploads) == ["x"]
    assert offered(exchange, "y", size=100, now_s=60.0).tick(60.0) == ["y"]
    assert list(exchange.queue) == ["x"]
    assert exchange.accept({"y": B}, 61.0) == ["x"]


def test_an_upload_at_the_least_pace_is_not_interrupted() -> None:
    exchange = offered(opened(credits=1), "x", "y", size=100)
    pace = 100.0 / LEAST_PACE / 100  # seconds per byte
    for second in range(1, 24):
        exchange.heard("x", round(1 / pace), float(second))
        exchange.tick(float(second))
    assert list(exchange.uploads) == ["x"]
    exchange.tick(exchange.wakes_at_s)
    assert list(exchange.uploads) == ["x"]  # the reminder, after eight seconds of silence
    exchange.tick(CREDIT_IDLE_S + 23)
    assert list(exchange.uploads) == ["y"]


def test_an_offer_without_blocks_does_not_prolong_a_credit() -> None:
    exchange = offered(offered(opened(credits=1), "x", "y"), "x", now_s=CREDIT_IDLE_S - 1)
    exchange.tick(CREDIT_IDLE_S)
    assert list(exchange.uploads) == ["y"]


def test_a_larger_update_in_the_place_of_an_offered_one_waits_for_its_bytes() -> None:
    exchange = offered(opened(budget=20), "x", "y")
    assert exchange.offer("x", 15, 2.0) == []
    assert (list(exchange.uploads), list(exchange.queue)) == (["y"], ["x"])
    assert exchange.accept({"y": A}, 3.0) == ["x"]


def test_a_client_that_refused_may_still_answer() -> None:
    exchange = opened()
    exchange.refuse("x", "unavailable", 1.0)
    assert offered(exchange, "x").refused == {}
    exchange.refuse("x", "unavailable", 1.0)
    accepted(exchange, "x")
    assert (exchange.accepted, exchange.refused) == ({"x": A}, {})


def test_a_refusal_after_an_accepted_update_changes_nothing() -> None:
    exchange = accepted(opened(), "x")
    assert exchange.refuse("x", "internal", 1.0) == []
    assert (exchange.accepted, exchange.refused) == ({"x": A}, {})


def test_a_restart_remembers_who_answered_and_is_over_if_that_was_everybody() -> None:
    again = OpenExchange(asked="xy", quorum=1, now_s=50.0, deadline_s=10.0, accepted={"x": A}, refused={"y": "no_data"})
    assert again.is_over(50.0)


def test_an_exchange_that_asks_nobody_is_over_at_once() -> None:
    assert opened(asked="").is_over(0.0)


def test_impossible_exchanges_are_refused() -> None:
    with pytest.raises(ValueError, match="credits"):
        opened(credits=0)
    with pytest.raises(ValueError, match="quorum"):
        opened(quorum=-1)
    how: dict[str, Any] = {"asked": "x", "quorum": 0, "now_s": 0, "deadline_s": 1}
    with pytest.raises(ValueError, match="not asked"):
        OpenExchange(**how, accepted={"y": A})
    with pytest.raises(ValueError, match="not asked"):
        OpenExchange(**how, refused={"y": "no_data"})
    with pytest.raises(ValueError, match="accepted and refused"):
        OpenExchange(**how, accepted={"x": A}, refused={"x": "no_data"})
    assert OpenExchange(**how, accepted={"x": A}, credits=1).quorum == 0


def test_without_other_settings_32_uploads_of_any_size_go_on_at_once_and_all_are_wanted() -> None:
    cids = [f"d{i}" for i in range(33)]
    exchange = offered(OpenExchange(asked=cids, quorum=0, now_s=0.0, deadline_s=100.0), *cids, size=2**40)
    assert (len(exchange.uploads), list(exchange.queue), exchange.goal) == (32, ["d32"], 33)
    assert opened("xyz", goal=5).goal == 3


def test_uploads_that_fill_the_budget_exactly_go_on_together() -> None:
    exchange = offered(opened(budget=18), "x", "y", "z")
    assert (list(exchange.uploads), list(exchange.queue)) == (["x", "y"], ["z"])
    assert list(offered(opened(budget=17), "x", "y").uploads) == ["x"]


@pytest.mark.parametrize("is_block", [True, False])
def test_a_reminder_comes_eight_seconds_after_the_last_block_and_the_last_word_to_the_client(*, is_block: bool) -> None:
    exchange = offered(opened(), "x")
    if is_block:
        exchange.heard("x", 1, 5.0)
    else:
        offered(exchange, "x", now_s=5.0)
    assert exchange.wakes_at_s == 13.0
    assert exchange.tick(12.9) == []
    assert exchange.tick(13.0) == ["x"]


def test_while_another_waits_a_quarter_of_the_time_for_a_whole_upload_is_enough_and_not_a_moment_more() -> None:
    """100 s: 30 s to begin, and a second for each of 25 bytes."""
    exchange = offered(opened(credits=1), "x", size=25)
    exchange.heard("x", 1, 20.0)
    exchange.heard("x", 2, 29.0)
    assert exchange.wakes_at_s == 37.0  # a reminder
    offered(exchange, "y", now_s=29.0)
    assert exchange.wakes_at_s == 33.0
    assert (exchange.tick(32.9), list(exchange.uploads)) == ([], ["x"])
    assert (exchange.tick(33.0), list(exchange.queue)) == (["y"], ["x"])


def test_it_shows_who_has_answered_who_uploads_who_waits_and_how_long_it_is_open() -> None:
    exchange = accepted(opened("uvwxyz", quorum=3, credits=1, goal=5), "z")
    exchange.refuse("y", "no_data", 1.0)
    assert offered(exchange, "x", "w").progress(33.34) == {
        "asked": 6, "wanted": 5, "quorum": 3, "closed": False, "left_s": 66.7,
        "answered": ["z"], "uploading": ["x"], "waiting": ["w"], "refused": ["y"], "open": ["u", "v"],
    }  # fmt: skip
    exchange.close()
    closed = exchange.progress(100.5)
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

    def goes_on(self, granted: list[str]) -> None:
        """As its drivers do."""
        self.goes.update(granted)
        if self.exchange.is_over(self.now_s):
            self.exchange.close()

    @rule(cid=st.sampled_from("abcdefg"), sha256=st.sampled_from([A, B]))
    def offers(self, cid: str, sha256: str) -> None:
        if not self.exchange.status(cid, sha256):
            self.goes_on(self.exchange.offer(cid, 9, self.now_s))

    @rule(updates=st.dictionaries(st.sampled_from("abcdefg"), st.sampled_from([A, B])))
    def updates_arrive(self, updates: dict[str, str]) -> None:
        counted = self.exchange.countable(updates)
        assert not (counted and self.exchange.closed)
        self.oks += counted
        self.goes_on(self.exchange.accept({cid: updates[cid] for cid in counted}, self.now_s))

    @rule(cid=st.sampled_from("abcdefg"), size=st.integers(1, 9))
    def block(self, cid: str, size: int) -> None:
        self.exchange.heard(cid, size, self.now_s)

    @rule(cid=st.sampled_from("abcdefg"))
    def refuses(self, cid: str) -> None:
        self.goes_on(self.exchange.refuse(cid, "no_data", self.now_s))

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.goes_on(self.exchange.tick(self.now_s))

    @precondition(lambda self: not self.exchange.closed)
    @rule()
    def time_passes_until_something_is_due(self) -> None:
        self.now_s = max(self.now_s, self.exchange.wakes_at_s)
        self.goes_on(self.exchange.tick(self.now_s))

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
    def what_is_closed_has_no_uploads(self) -> None:
        assert not (self.exchange.closed and (self.exchange.uploads or self.exchange.queue))

    @invariant()
    def nobody_waits_while_a_credit_is_free(self) -> None:
        held = sum(upload.size for upload in self.exchange.uploads.values())
        free = len(self.exchange.uploads) < self.exchange.credits and held + 9 <= self.exchange.budget
        assert not (self.exchange.queue and (free or not self.exchange.uploads))

    def teardown(self) -> None:
        if hasattr(self, "exchange"):
            assert self.exchange.closed or self.exchange.is_over(self.exchange.closes_at_s)


TestRounds = RoundsMachine.TestCase
