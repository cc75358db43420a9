"""However few devices are given their task at once: all are served, and nothing that is learned depends on it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.silence import Misses
from coordinator.runtime.exchange.task_window import TaskWindow, line_of
from coordinator.storage.exchange_store import ExchangeKey
from tests.support.virtual_federation import TOPICS, Federation, Outcome, Spy
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, WiredCoordinator

KEY = ExchangeKey("run1", 1, 0)


@given(
    size=st.integers(1, 8),
    devices=st.integers(1, 40),
    events=st.lists(st.one_of(st.integers(0, 39), st.just("quiet"), st.sampled_from([1.0, 4.0, 11.0])), max_size=99),
)
def test_at_most_the_window_begins_within_a_place_s_time_and_every_device_gets_its_task_once(
    size: int, devices: int, events: list[int | str | float]
) -> None:
    cids = [f"d{i}" for i in range(devices)]
    window, now_s, begun, answered = TaskWindow(size), 0.0, dict[str, float](), set[str]()
    window.put(cids)

    def hand_out() -> None:
        for cid in window.take(now_s):
            assert cid not in begun
            assert cid not in answered
            begun[cid] = now_s
        assert sum(now_s - since_s < 10.0 for cid, since_s in begun.items() if cid not in answered) <= size

    hand_out()
    for event in [*events, *[10.0, "quiet"] * devices]:
        if isinstance(event, float):
            now_s += event
        elif event == "quiet":
            window.free(now_s, quiet=True)
        else:
            answered.add(f"d{event}")  # also one that waits: it had its task from an earlier process
            window.leave(f"d{event}")
        hand_out()
    assert begun.keys() | answered >= set(cids)


def test_a_coordinator_that_does_not_keep_up_hands_out_no_more() -> None:
    window = TaskWindow(2)
    window.put("abc")
    assert window.take(0.0) == ["a", "b"]
    window.free(50.0, quiet=False)
    assert window.take(50.0) == []
    window.leave("b")
    assert window.take(50.0) == ["c"]


def test_devices_that_never_let_it_rest_keep_the_others_waiting_for_a_minute_at_most() -> None:
    window = TaskWindow(2)
    window.put("abc")
    assert window.take(0.0) == ["a", "b"]
    window.free(60.0, quiet=False)
    assert window.take(60.0) == ["c"]


def test_a_place_is_taken_back_after_ten_seconds_in_quiet_and_after_a_minute_in_any_case() -> None:
    for quiet, after_s in ((True, 10.0), (False, 60.0)):
        window = TaskWindow(2)
        window.put("abcd")
        assert window.take(1.0) == ["a", "b"]
        window.leave("a")
        assert window.take(2.0) == ["c"]
        window.free(0.9 + after_s, quiet=quiet)
        assert window.take(0.9 + after_s) == []
        window.free(1.0 + after_s, quiet=quiet)
        assert window.take(1.0 + after_s) == ["d"]  # that of b; c has its own for a second more


def test_a_device_that_comes_again_waits_behind_the_others() -> None:
    window = TaskWindow(1)
    window.put("ab")
    assert window.take(0.0) == ["a"]
    window.put("a")
    assert window.take(0.0) == ["b"]
    assert window.line == ["a"]


@given(st.sets(st.text("abcdef", min_size=1, max_size=3), max_size=30), st.sets(st.text("abc", max_size=2)))
def test_the_line_has_every_device_once_the_silent_ones_last_and_no_order_that_favours_a_name(
    cids: set[str], silent: set[str]
) -> None:
    line = line_of(KEY, cids, silent)
    assert sorted(line) == sorted(cids)
    assert [cid in silent for cid in line] == sorted(cid in silent for cid in line)


def test_the_first_in_line_differ_from_exchange_to_exchange() -> None:
    cids = [f"d{i:02d}" for i in range(20)]
    first = Counter(line_of(KEY._replace(exchange=number), cids, ())[0] for number in range(400))
    assert len(first) == 20
    assert max(first.values()) < 60  # 20 are expected, with a deviation of 4.4


@pytest.fixture(scope="module")
def at_once(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Federation.of(tmp_path_factory.mktemp("at-once"), devices=6).play().outcome()


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_window_changes_no_bit_and_is_never_exceeded(tmp_path: Path, window: int, at_once: Outcome) -> None:
    fed = Federation.of(tmp_path, devices=6, task_window=window)
    spy = Spy(fed.world.broker)
    assert fed.play().outcome() == at_once
    most, at_work = 0, set[str]()
    for event in spy.heard():
        route = TOPICS.parse(event.topic)
        if route.kind == "t" and b'"k":"task"' in event.payload:
            at_work.add(str(route.cid))
        elif route.kind == "t" and b'"k":"ack"' in event.payload:
            at_work.discard(str(route.cid))
        most = max(most, len(at_work))
    assert most == window
    assert not spy.said("err")
    assert not spy.said("nack")


def test_a_device_that_keeps_silent_does_not_keep_the_others_from_their_tasks(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=5, rounds=2, task_window=1, quorum=0.8, deadline_s=120.0)
    fed.start_mute_device("d99")
    fed.start(4)
    fed.finish()
    for round_ in fed.rounds():
        assert sorted(round_["per_device"]) == ["d00", "d01", "d02", "d03"]
    fed.world.end()


def test_who_has_not_been_asked_is_shown_apart_from_those_at_work(tmp_path: Path) -> None:
    coordinator = WiredCoordinator(tmp_path, VirtualClock(), 0, len(DEVICES), task_window=1)
    coordinator.ask(KEY, None)
    live = coordinator.dispatcher.exchange.live
    assert live is not None
    (told,) = [cid for cid, _ in coordinator.said()]
    assert live.progress()["open"] == [told]
    assert live.progress()["unasked"] == sorted(set(DEVICES) - {told})
    coordinator.store.close()


def test_an_answer_and_a_refusal_make_room_for_the_next_device_at_once(tmp_path: Path) -> None:
    coordinator = WiredCoordinator(tmp_path, VirtualClock(), 0, len(DEVICES), task_window=1)
    coordinator.ask(KEY, None)
    (first, _), *more = coordinator.said()
    assert not more
    coordinator.announce(first, 0, KEY)
    (_, ack), (second, task) = coordinator.said()
    assert (ack["k"], task["k"]) == ("ack", "task")
    assert second != first
    coordinator.hear(second, "nack", re=task["id"], code="unavailable", **KEY._asdict())
    ((third, _),) = coordinator.said()
    assert third not in (first, second)
    coordinator.store.close()


def test_a_device_whose_turn_never_came_has_not_missed_the_exchange(tmp_path: Path) -> None:
    clock = VirtualClock()
    coordinator = WiredCoordinator(tmp_path, clock, 0, len(DEVICES), task_window=1)
    coordinator.ask(KEY, None)
    live = coordinator.dispatcher.exchange.live
    assert live is not None
    (told,) = [cid for cid, _ in coordinator.said()]
    clock.time_s += coordinator.config.round.deadline_s
    live.tick()
    assert live.closed
    assert coordinator.context.misses == {told: Misses(1, 4)}
    coordinator.store.close()
