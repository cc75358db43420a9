"""What every method promises, in float64 on a small problem. A new method is one more row of the registry."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.runs import one_round, round_rng
from coordinator.strategies.base import Exchange, Replies, State, drive
from coordinator.strategies.registry import METHODS, Setting, make
from edge_client.dataset import Local
from edge_client.protocol.task import Fit, Reply
from tests.softmax import devices_of, grouped_fleet, play, start_of

LOCAL = grouped_fleet(6, 2)
SMALL: dict[str, Setting] = {"local-steps": 4, "batch-size": 8}
CLUSTERED = {"fesem"}
every_method = pytest.mark.parametrize("name", sorted(METHODS))


def centers(name: str, k: int = 2) -> dict[str, Setting]:
    return {**SMALL, "clusters": k} if name in CLUSTERED else SMALL


def copied(state: State) -> State:
    return State(
        centers=state.centers.copy(),
        assignment=dict(state.assignment),
        extra={name: value.copy() for name, value in state.extra.items()},
    )


def same(a: State, b: State) -> bool:
    return (
        np.array_equal(a.centers, b.centers)
        and dict(a.assignment) == dict(b.assignment)
        and a.extra.keys() == b.extra.keys()
        and all(np.array_equal(a.extra[name], b.extra[name]) for name in a.extra)
    )


@every_method
@pytest.mark.parametrize("rounds", [0, 2])
def test_a_silent_fleet_leaves_every_center_as_it_was(name: str, rounds: int) -> None:
    method, devices = make(name, **centers(name)), devices_of(LOCAL)
    state = play(method, LOCAL, rounds=rounds)
    after = drive(method.round(state, devices.program.schema, devices.fleet, round_rng(0, 9)), lambda _: {})
    assert same(after, state)


@every_method
def test_one_silent_device_costs_nobody_else(name: str) -> None:
    state = play(make(name, **centers(name)), LOCAL, silent=["d03"])
    assert np.isfinite(state.centers).all()
    assert set(state.assignment) >= set(LOCAL) - {"d03"}


@every_method
def test_more_centers_than_devices_is_no_error(name: str) -> None:
    few = dict(list(LOCAL.items())[:2])
    state = play(make(name, **centers(name, k=5)), few)
    assert np.isfinite(state.centers).all()
    assert set(state.assignment) == set(few)


@every_method
def test_one_device_is_a_fleet(name: str) -> None:
    one = {"d00": LOCAL["d00"]}
    state = play(make(name, **centers(name)), one)
    assert state.assignment == {"d00": 0}
    assert not np.array_equal(state.centers[0], start_of())


@every_method
def test_the_input_state_is_left_as_it_was(name: str) -> None:
    method, devices = make(name, **centers(name)), devices_of(LOCAL)
    state = play(method, LOCAL, rounds=1)
    before = copied(state)
    drive(
        method.round(state, devices.program.schema, devices.fleet, round_rng(0, 2)),
        lambda exchange: {c: devices.answer(c, task) for c, task in exchange.items()},
    )
    assert same(state, before)


@every_method
def test_a_replay_of_stored_replies_asks_the_same_and_ends_the_same(name: str) -> None:
    method, devices = make(name, **centers(name)), devices_of(LOCAL)
    schema, fleet = devices.program.schema, devices.fleet
    state = play(method, LOCAL, rounds=1)
    log: list[tuple[Exchange, Replies]] = []

    def live(exchange: Exchange) -> Replies:
        log.append((exchange, {c: devices.answer(c, task) for c, task in exchange.items()}))
        return log[-1][1]

    def stored(exchange: Exchange) -> Replies:
        asked, replies = log.pop(0)
        assert sorted(exchange) == sorted(asked)
        for c, task in exchange.items():
            for field, value in vars(task).items():
                np.testing.assert_equal(value, getattr(asked[c], field))
        return replies

    first = drive(one_round(method, state, schema, fleet, round_rng(0, 2), batch=8), live)
    again = drive(one_round(method, copied(state), schema, fleet, round_rng(0, 2), batch=8), stored)
    assert same(first[0], again[0])
    assert first[1] == again[1]


@every_method
def test_the_order_in_which_devices_are_listed_or_answer_is_irrelevant(name: str) -> None:
    method = make(name, **centers(name))
    backwards = dict(reversed(LOCAL.items()))
    assert same(play(method, LOCAL), play(method, backwards))


@every_method
def test_renamed_devices_end_with_the_same_centers_up_to_their_order(name: str) -> None:
    # Full batches, since seeds follow names; sums are then taken in another order, hence the tolerance.
    method = make(name, **{**centers(name), "batch-size": 1_000})
    order = np.random.default_rng(1).permutation(len(LOCAL))
    names = dict(zip(sorted(LOCAL), [sorted(LOCAL)[i] for i in order], strict=True))
    renamed: dict[str, Local] = {names[c]: local for c, local in LOCAL.items()}
    first, second = play(method, LOCAL), play(method, renamed)
    k = {first.assignment[c]: second.assignment[names[c]] for c in LOCAL}
    assert len(set(k.values())) == len(k)
    for old, new in k.items():
        np.testing.assert_allclose(first.centers[old], second.centers[new], rtol=1e-9)


@every_method
def test_permuting_the_centers_of_a_state_permutes_the_result_and_nothing_else(name: str) -> None:
    method, devices = make(name, **centers(name)), devices_of(LOCAL)
    state = play(method, LOCAL, rounds=2)
    order = np.arange(len(state.centers))[::-1]
    permuted = State(
        centers=state.centers[order],
        assignment={c: int(order[k]) for c, k in state.assignment.items()},
        extra=state.extra,
    )
    results = [
        drive(
            one_round(method, s, devices.program.schema, devices.fleet, round_rng(0, 3), batch=8),
            lambda exchange: {c: devices.answer(c, task) for c, task in exchange.items()},
        )
        for s in (state, permuted)
    ]
    (one, report), (other, other_report) = results
    np.testing.assert_allclose(one.centers[order], other.centers, rtol=1e-12)
    assert {c: int(order[k]) for c, k in one.assignment.items()} == other.assignment
    assert report.accuracy == other_report.accuracy
    assert report.f1 == other_report.f1
    assert report.per_device == other_report.per_device


@every_method
def test_float32_models_stay_float32(name: str) -> None:
    method, devices = make(name, **centers(name)), devices_of(LOCAL)
    schema, fleet = devices.program.schema, devices.fleet
    state = method.begin(start_of().astype(np.float32), schema, fleet, round_rng(0, 0))
    for number in (1, 2):

        def ask(exchange: Exchange) -> Replies:
            tasks = {c: t for c, t in exchange.items() if isinstance(t, Fit)}
            assert all(np.asarray(t.start).dtype == np.float32 for t in tasks.values())
            rng = np.random.default_rng(0)
            return {c: Reply(n=9, update=rng.standard_normal(schema.size).astype(np.float32)) for c in tasks}

        state = drive(method.round(state, schema, fleet, round_rng(0, number)), ask)
        assert state.centers.dtype == np.float32


@every_method
def test_every_device_and_every_stranger_is_served_a_mixture_whose_weights_sum_to_one(name: str) -> None:
    method = make(name, **centers(name))
    for rounds in (0, 2):
        state = play(method, LOCAL, rounds=rounds)
        for who in [*LOCAL, "stranger", None]:
            mixture = method.predictor(state, who)
            assert sum(weight for weight, _ in mixture) == pytest.approx(1.0)
            assert all(model.shape == (devices_of(LOCAL).program.schema.size,) for _, model in mixture)
