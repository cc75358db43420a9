"""The laws of rounds that wait for no device: weights, staleness, who may be asked, and the replay of an order."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds.asynchronous.options import Asynchronous, check_asynchronous
from coordinator.rounds.asynchronous.training import (
    Rules,
    Taken,
    Training,
    begin_training,
    buffer_size,
    hand_out,
    moved_row,
    patience,
    release,
    round_target,
    served_state,
    staleness_weight,
    take,
    task_again,
)
from coordinator.strategies.base import State
from coordinator.strategies.registry import make_method
from edge_client.protocol.task import Array, ClientId, Fit, Probe, Reply, Task
from tests.support.softmax_program import schema

SCHEMA = schema()
FLEET = {f"d{i}": 10 + i for i in range(8)}
Moment = tuple[int, int, bool]  # which of those at work, with which update, or whether it lets the task go


def everybody(_: ClientId) -> bool:
    return True


def rules(method: str = "fedavg", *, fleet: dict[str, int] = FLEET, concurrency: int = 4, **options: int) -> Rules:
    strategy = check_asynchronous(make_method(method), fleet)
    chosen = Asynchronous(concurrency=concurrency, **{"buffer": 3, "max_staleness": 5, **options})
    return Rules(strategy=strategy, options=chosen, schema=SCHEMA, fleet=fleet, seed=0)


def first(centers: int = 1, assignment: dict[str, int] | None = None) -> Training:
    rows = np.random.default_rng(1).standard_normal((centers, SCHEMA.size))
    return begin_training(State(centers=rows, assignment=assignment or {}, extra={"start": rows[0]}))


def answer(training: Training, by: Rules, who: ClientId, update: int) -> tuple[Training, Taken]:
    """The device sends an update of its own, or its losses."""
    handed, numbers = training.at_work[who], np.random.default_rng(update)
    if handed.start is None:
        return take(training, by, who, Reply(n=FLEET[who], losses=numbers.random(len(training.versions))), {})
    model = handed.start + 0.1 * numbers.standard_normal(SCHEMA.size)
    return take(training, by, who, Reply(n=FLEET[who], update=model), {"delta": 0.1})


def play(by: Rules, moments: list[Moment], training: Training) -> list[Training]:
    """The states after each event; devices get their tasks between the events."""
    states = []
    for pick, update, lets_go in moments:
        training, _, _ = hand_out(training, by, 1, everybody)
        states.append(training)
        who = sorted(training.at_work)[pick % len(training.at_work)]
        training = release(training, who) if lets_go else answer(training, by, who, update)[0]
        states.append(training)
    return states


MOMENTS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 99), st.sampled_from((False, False, True))), max_size=40)
METHOD = st.sampled_from(("fedavg", "fedprox", "fesem", "ifca", "hypcluster"))


def a_start(method: str) -> Training:
    if method.startswith("fed"):
        return first()
    return first(2, {who: i % 2 for i, who in enumerate(FLEET)})


@given(moments=MOMENTS, method=METHOD, concurrency=st.integers(1, 8), buffer=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_no_device_has_two_tasks_or_two_updates_and_no_more_than_concurrency_are_at_work(
    moments: list[Moment], method: str, concurrency: int, buffer: int
) -> None:
    by = rules(method, concurrency=concurrency, buffer=buffer)
    for training in play(by, moments, a_start(method)):
        waiting = Counter(who for some in training.buffers for who in some)
        assert len(training.at_work) <= concurrency
        assert not waiting.keys() & training.at_work.keys()
        assert all(count == 1 for count in waiting.values())
        for k, some in enumerate(training.buffers):
            assert len(some) < max(2, buffer_size(training, by, k) + 1)


@given(moments=MOMENTS, method=METHOD)
@settings(max_examples=40, deadline=None)
def test_the_same_order_of_the_same_replies_gives_the_same_bits(moments: list[Moment], method: str) -> None:
    once, again = (play(rules(method), moments, a_start(method)) for _ in range(2))
    for mine, theirs in zip(once, again, strict=True):
        np.testing.assert_array_equal(mine.state.centers, theirs.state.centers)
        assert mine.state.assignment == theirs.state.assignment
        assert mine.at_work.keys() == theirs.at_work.keys()
        assert [h.seed for h in mine.at_work.values()] == [h.seed for h in theirs.at_work.values()]


@given(moments=MOMENTS, method=METHOD, most=st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_staleness_is_counted_in_versions_and_never_exceeds_its_limit(
    moments: list[Moment], method: str, most: int
) -> None:
    by = rules(method, max_staleness=most)
    for training in play(by, moments, a_start(method)):
        for handed in training.at_work.values():
            if handed.center is not None:
                assert 0 <= training.versions[handed.center] - handed.version <= most
        assert all(entry.staleness <= most for some in training.buffers for entry in some.values())


@given(stale=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_a_version_is_the_center_and_the_weighted_mean_of_the_discounted_steps(stale: list[int]) -> None:
    rng = np.random.default_rng(len(stale))
    center, n = rng.standard_normal(SCHEMA.size), rng.integers(1, 50, len(stale))
    starts, steps = (rng.standard_normal((len(stale), SCHEMA.size)) for _ in range(2))
    starts[[tau == 0 for tau in stale]] = center  # the same version, the same model
    rows = [
        moved_row(center, start + step, start, tau, n_params=SCHEMA.n_params)
        for start, step, tau in zip(starts, steps, stale, strict=True)
    ]
    weights = np.array([staleness_weight(tau) for tau in stale])
    expected = center + (n * weights) @ steps / n.sum()
    np.testing.assert_allclose(n @ np.stack(rows) / n.sum(), expected, rtol=1e-12, atol=1e-12)
    assert staleness_weight(3) == 1 / math.sqrt(4)


def test_running_statistics_stay_between_the_centers_and_the_devices() -> None:
    """A difference to an old center could make a variance negative."""
    center, start, model = np.array([1.0, 0.5]), np.array([1.0, 9.0]), np.array([2.0, 1.0])
    row = moved_row(center, model, start, 3, n_params=1)
    np.testing.assert_allclose(row, [1.5, 0.75])


def test_a_device_that_left_its_center_pulls_the_new_one_towards_its_model() -> None:
    center, model = np.array([1.0, 1.0]), np.array([3.0, 5.0])
    np.testing.assert_allclose(moved_row(center, model, None, 3, n_params=2), [2.0, 3.0])


@given(order=st.permutations(sorted(FLEET)))
@settings(max_examples=20)
def test_fresh_updates_make_the_same_center_in_any_order_of_arrival(order: list[str]) -> None:
    by = rules(concurrency=8, buffer=8)
    training, _, _ = hand_out(first(), by, 1, everybody)
    for who in order:
        training, taken = answer(training, by, who, int(who[1:]))
    assert taken.made == (0,)
    assert training.versions == (1,)
    before = first().state.centers[0]
    steps = np.stack([0.1 * np.random.default_rng(i).standard_normal(SCHEMA.size) for i in range(8)])
    n = np.array([FLEET[f"d{i}"] for i in range(8)])
    np.testing.assert_allclose(training.state.centers[0], before + n @ steps / n.sum(), rtol=1e-12)


def test_one_device_never_fills_a_buffer_alone_however_fast_it_is() -> None:
    by, training = rules(concurrency=2, buffer=2), first()
    training, _, _ = hand_out(training, by, 1, lambda who: who in ("d0", "d1"))
    training, taken = answer(training, by, "d0", 1)
    assert taken.what == "counted"
    assert not taken.made
    training, tasks, _ = hand_out(training, by, 1, lambda who: who in ("d0", "d1"))
    assert not tasks  # d0 waits for a version that somebody else completes
    training, taken = answer(training, by, "d1", 2)
    assert taken.made == (0,)
    _, tasks, _ = hand_out(training, by, 1, lambda who: who in ("d0", "d1"))
    assert sorted(tasks) == ["d0", "d1"]


def test_an_update_that_nobody_asked_for_changes_nothing() -> None:
    by = rules()
    training, _, _ = hand_out(first(), by, 1, everybody)
    idle = next(who for who in FLEET if who not in training.at_work)
    after, taken = take(training, by, idle, Reply(n=1, update=np.zeros(SCHEMA.size)), {})
    assert taken.what == "unknown"
    assert after == training
    once, _ = answer(training, by, min(training.at_work), 1)
    twice, taken = take(once, by, min(training.at_work), Reply(n=1, update=np.zeros(SCHEMA.size)), {})
    assert taken.what == "unknown"
    assert twice == once


def test_a_task_whose_center_is_too_old_is_stopped_and_its_device_is_free() -> None:
    by = rules(concurrency=3, buffer=2, max_staleness=0)
    training, _, _ = hand_out(first(), by, 1, lambda who: who in ("d0", "d1", "d2"))
    training, _ = answer(training, by, "d0", 0)
    training, taken = answer(training, by, "d1", 1)
    assert taken.made == (0,)
    assert taken.stopped == ("d2",)
    assert "d2" not in training.at_work


def test_an_outlier_in_a_buffer_is_left_out_of_the_version_and_named() -> None:
    by = rules(concurrency=4, buffer=4)
    training, _, _ = hand_out(first(), by, 1, lambda who: who in ("d0", "d1", "d2", "d3"))
    for who in ("d0", "d1", "d2"):
        training, _ = answer(training, by, who, 1)
    far = training.at_work["d3"].start
    assert far is not None
    training, taken = take(training, by, "d3", Reply(n=10, update=far + 50.0), {"delta": 50.0})
    assert taken.made == (0,)
    assert list(taken.refused) == ["d3"]
    assert np.abs(training.state.centers - first().state.centers).max() < 1


def test_an_outlier_in_a_buffer_of_two_is_found_by_the_updates_before_it() -> None:
    by = rules(concurrency=4, buffer=2)
    training, _, _ = hand_out(first(), by, 1, lambda who: who in ("d0", "d1", "d2", "d3"))
    for who in ("d0", "d1", "d2"):
        training, _ = answer(training, by, who, 1)
    before, far = training.state.centers, training.at_work["d3"].start
    assert far is not None
    training, taken = take(training, by, "d3", Reply(n=10, update=far + 50.0), {"delta": 50.0})
    assert list(taken.refused) == ["d3"]
    assert np.abs(training.state.centers - before).max() < 1
    assert list(training.recent) == ["d0", "d1", "d2"]


def test_the_buffers_are_emptied_where_nobody_else_can_come() -> None:
    """Three devices of eight are there, and five updates are wanted."""
    by, there = rules(concurrency=3, buffer=5), ("d0", "d1", "d2")
    training, _, _ = hand_out(first(), by, 1, there.__contains__)
    for i, who in enumerate(there):
        training, taken = answer(training, by, who, i)
        assert not taken.made
    training, tasks, made = hand_out(training, by, 1, there.__contains__)
    assert [taken.made for taken in made] == [(0,)]
    assert sorted(tasks) == sorted(there)


def test_a_center_whose_other_devices_are_gone_moves_by_those_that_are_left() -> None:
    """Two of the second center's three devices never come; the others go on without an end, and so does d0."""
    by = rules("fesem", concurrency=4, buffer=8, max_staleness=1)
    training = first(2, {who: int(who in ("d0", "d1", "d2")) for who in FLEET})
    assert buffer_size(training, by, 1) == 3
    waits, made_at = None, []
    for i in range(400):
        training, _, made = hand_out(training, by, 1, lambda who: who not in ("d1", "d2"))
        waits = training.handed if waits is None and "d0" in training.buffered else waits
        made_at += [training.handed for taken in made if taken.made == (1,)]
        who = sorted(training.at_work)[i % len(training.at_work)]
        near = training.at_work[who].start
        assert near is not None
        training, _ = take(training, by, who, Reply(n=FLEET[who], update=near + 1e-3), {"delta": 0.1})
    assert waits is not None
    assert training.versions[1] == len(made_at) > 2
    assert made_at[0] >= waits + patience(by) - by.options.concurrency
    assert training.versions[0] > training.versions[1]


def test_a_center_is_full_at_its_devices_share_of_the_buffer() -> None:
    by = rules("fesem", concurrency=8, buffer=4)
    training = first(2, {who: int(who in ("d0", "d1")) for who in FLEET})
    assert [buffer_size(training, by, k) for k in range(2)] == [3, 2]  # six and two of eight devices
    assert round_target(by) == 4
    assert round_target(rules(concurrency=8, buffer=100)) == len(FLEET)


def test_a_center_of_one_device_is_full_with_its_update_and_one_of_none_with_that_of_a_device_that_comes() -> None:
    training = first(3, {who: int(who == "d0") for who in FLEET})
    for buffer, sizes in ((4, [4, 1, 1]), (8, [7, 1, 1]), (1, [2, 1, 1])):
        by = rules("fesem", concurrency=8, buffer=buffer)
        assert [buffer_size(training, by, k) for k in range(3)] == sizes
    gone = replace(by, fleet={"d0": 10})  # of devices that left none counts
    assert [buffer_size(training, gone, k) for k in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("what", ["older than it may be since the run began again", "nothing"])
def test_a_reply_that_is_no_update_or_came_too_late_frees_its_device_and_is_not_counted(what: str) -> None:
    by = rules(concurrency=3, buffer=2)
    training, _, _ = hand_out(first(), by, 1, lambda who: who in ("d0", "d1", "d2"))
    for who in ("d0", "d1"):
        training, _ = answer(training, by, who, 0)
    if what == "nothing":
        after, taken = take(training, by, "d2", Reply(n=1, losses=np.zeros(1)), {})
    else:
        after, taken = answer(training, replace(by, options=replace(by.options, max_staleness=0)), "d2", 2)
    assert (taken.what, taken.staleness, "d2" in after.at_work, after.buffered) == ("stale", 1, False, frozenset())
    _, taken = answer(training, replace(by, options=replace(by.options, max_staleness=1)), "d2", 2)
    assert (taken.what, taken.staleness) == ("counted", 1)


def test_an_update_moves_the_center_that_is_nearest_to_it_and_not_the_one_that_it_began_at() -> None:
    """It began at center 0, which has three versions since, and is nearest to center 1 now."""
    by = rules("fesem", concurrency=8, buffer=8)
    training, _, _ = hand_out(first(2, dict.fromkeys(FLEET, 0)), by, 1, everybody)
    before = training.state.centers
    model = before[1] + 0.01
    training, taken = take(replace(training, versions=(3, 0)), by, "d0", Reply(n=10, update=model), {"delta": 0.1})
    assert (taken.what, taken.staleness, taken.made) == ("counted", 3, (1,))
    assert training.state.assignment["d0"] == 1
    np.testing.assert_array_equal(training.state.centers[0], before[0])
    np.testing.assert_allclose(training.state.centers[1], before[1] + 0.5 * 0.01, rtol=1e-9)  # s(3), towards the model


def test_tasks_are_numbered_in_their_order_and_each_has_a_seed_of_its_own() -> None:
    by = rules(concurrency=3, buffer=8)
    training, tasks, _ = hand_out(first(), by, 1, everybody)
    assert [training.at_work[who].number for who in tasks] == [0, 1, 2]
    assert training.handed == 3
    training, _ = answer(training, by, next(iter(tasks)), 0)
    training, more, _ = hand_out(training, by, 1, everybody)
    ((who, task),) = more.items()
    assert (training.at_work[who].number, training.handed) == (3, 4)
    assert task == task_again(training, by, who)
    assert len({handed.seed for handed in training.at_work.values()}) == 3
    lots = {tuple(hand_out(first(), by, number, everybody)[1]) for number in range(1, 9)}
    assert len(lots) > 2  # by lot, and another in each round


def test_a_center_repeats_a_share_of_its_last_move_from_its_third_version_on() -> None:
    moved: dict[float, list[Array]] = {}
    for momentum in (0.0, 0.5):
        by = rules(concurrency=8, buffer=2)
        by = replace(by, strategy=check_asynchronous(make_method("fedavg", **{"server-momentum": momentum}), FLEET))
        training, _, _ = hand_out(first(), by, 1, everybody)
        centers = moved.setdefault(momentum, [])
        for who in ("d0", "d1", "d2", "d3", "d4", "d5"):
            training, taken = answer(training, by, who, int(who[1:]))
            centers += [training.state.centers] if taken.made else []
    plain, going = moved[0.0], moved[0.5]
    assert [bool((a == b).all()) for a, b in zip(plain, going, strict=True)] == [True, True, False]
    np.testing.assert_allclose(going[2] - plain[2], 0.5 * (plain[1] - plain[0]), rtol=1e-6, atol=1e-9)


def test_of_one_center_every_device_of_the_fleet_is_served_it_and_of_several_each_its_own() -> None:
    by, training = rules(), first()
    assert served_state(training, by).assignment == dict.fromkeys(FLEET, 0)
    several = a_start("fesem")
    assert served_state(several, rules("fesem")) is several.state


def test_the_fleet_may_grow_and_shrink_between_any_two_events() -> None:
    by = rules("fesem", concurrency=8)
    training = first(2, {who: i % 2 for i, who in enumerate(FLEET)})
    training, _, _ = hand_out(training, by, 1, everybody)
    left = replace(by, fleet={who: n for who, n in FLEET.items() if who != "d0"} | {"new": 5})
    training, taken = answer(training, left, "d0", 1)
    assert taken.what == "unknown"
    assert "d0" not in training.at_work
    training, tasks, _ = hand_out(training, left, 2, everybody)
    assert list(tasks) == ["new"]
    assert isinstance(tasks["new"], Probe)  # no center yet
    training, taken = take(training, left, "new", Reply(n=5, losses=np.array([2.0, 1.0])), {})
    assert isinstance(taken.task, Fit)
    np.testing.assert_array_equal(taken.task.start, training.state.centers[1])
    model = training.state.centers[1] + 0.01
    training, taken = take(training, left, "new", Reply(n=5, update=model), {"delta": 0.1})
    assert taken.what == "counted"
    assert training.state.assignment["new"] == 1


@pytest.mark.parametrize("centers", [1, 17])
def test_a_newcomer_of_fesem_begins_at_the_only_center_or_at_the_start_where_a_probe_has_no_room(centers: int) -> None:
    by = rules("fesem", concurrency=8)
    training = first(centers, {who: 0 for who in FLEET if who != "d0"})
    training = replace(training, state=replace(training.state, centers=training.state.centers + 1))
    training, tasks, _ = hand_out(training, by, 1, everybody)
    task, started = tasks["d0"], {1: training.state.centers[0], 17: training.state.extra["start"]}
    assert isinstance(task, Fit)
    np.testing.assert_array_equal(task.start, started[centers])
    assert (task.mu > 0) == (centers == 1)
    assert task == task_again(training, by, "d0")
    training, taken = take(training, by, "d0", Reply(n=10, update=training.state.centers[-1]), {"delta": 0.1})
    assert (taken.what, training.state.assignment["d0"]) == ("counted", centers - 1)


def test_a_device_of_ifca_tells_its_losses_and_then_trains_the_newest_version_of_its_choice() -> None:
    by = rules("ifca", concurrency=2)
    training, tasks, _ = hand_out(a_start("ifca"), by, 1, everybody)
    who, other = sorted(tasks)
    assert isinstance(tasks[who], Probe)
    training, taken = take(training, by, who, Reply(n=10, losses=np.array([2.0, 1.0])), {})
    task: Task | None = taken.task
    assert taken.what == "asked"
    assert isinstance(task, Fit)
    assert task.center == 1
    np.testing.assert_array_equal(task.start, training.state.centers[1])
    assert training.at_work.keys() == {who, other}
