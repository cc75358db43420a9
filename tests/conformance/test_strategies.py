"""What every method promises, in float64 on a small problem. A new method is one more row of the registry.

A method outside of the registry: `pytest tests/conformance --method module:Class` (conftest.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import nan

import numpy as np
import pytest

from coordinator.rounds.round import round_rng, run_round
from coordinator.storage import state_codec
from coordinator.strategies.base import Exchange, Replies, State, drive, takes_newcomers
from coordinator.strategies.registry import METHODS, Setting, make_method, method_settings
from edge_client.errors import ConfigError
from edge_client.protocol.task import Fit, Flat, OwnModel, Probe, Reply
from tests.support.methods import CASES, MethodWorld, build, copied, members_of, same, world
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

LOCAL = grouped_fleet(6, 2)
OTHER = grouped_fleet(6, 2, seed=1)  # the same numbers of samples, other samples
every_method = pytest.mark.every_method(CASES)


@cache
def _played(name: str, rounds: int) -> MethodWorld:
    if rounds == 0:
        return world(build(name), LOCAL)
    fleet = played(name, rounds - 1)
    fleet.round()
    return fleet


def played(name: str, rounds: int) -> MethodWorld:
    """A world of LOCAL after `rounds` rounds, which are played once for all tests; what a test changes is its own."""
    known = _played(name, rounds)
    devices = devices_of(LOCAL, members=members_of(known.strategy))
    devices.own.update(known.devices.own)
    return MethodWorld(build(name), devices, copied(known.state), number=rounds)


# silence and absence


@every_method
@pytest.mark.parametrize("rounds", [0, 2])
def test_a_silent_fleet_leaves_every_center_and_every_assignment_as_it_was(name: str, rounds: int) -> None:
    fleet = played(name, rounds)
    before = fleet.state
    fleet.round(silent=LOCAL)
    np.testing.assert_array_equal(fleet.state.centers, before.centers)
    assert fleet.state.assignment == before.assignment


@every_method
def test_a_device_that_never_answers_weighs_nothing_and_is_served_all_the_same(name: str) -> None:
    worlds = [world(build(name), local) for local in (LOCAL, {**LOCAL, "d03": OTHER["d03"]})]
    for fleet in worlds:
        reports = [fleet.round(silent=["d03"]) for _ in range(3)]
        assert set(reports[-1].per_device) == set(LOCAL) - {"d03"}
        assert fleet.served("d03")
    assert same(worlds[0].state, worlds[1].state)


@every_method
def test_a_fleet_may_grow_between_rounds_and_new_devices_are_asked_and_served(name: str) -> None:
    late, strategy = {"d04", "d05"}, build(name)
    assert takes_newcomers(strategy)
    before = world(strategy, {cid: local for cid, local in LOCAL.items() if cid not in late}, rounds=2)
    after = MethodWorld(strategy, devices_of(LOCAL, members=members_of(strategy)), before.state, number=2)
    after.devices.own.update(before.devices.own)
    reports = [after.round() for _ in range(3)]
    assert set(reports[0].per_device) == set(LOCAL)
    assert all(after.served(cid) for cid in late)
    asked = {cid for exchange in after.exchanges[:-1] for cid in exchange}
    assert late <= asked or "select" in name  # FedSoft draws the devices of each center


@every_method
def test_a_device_that_answers_only_the_first_exchange_costs_nobody_else(name: str) -> None:
    fleet = played(name, 1)

    def ask(exchange: Exchange) -> Replies:
        asked.append(exchange)
        return {c: fleet.devices.answer(c, t) for c, t in exchange.items() if len(asked) == 1 or c != "d03"}

    asked: list[Exchange] = []
    after = drive(fleet.strategy.round(fleet.state, fleet.schema, fleet.fleet, round_rng(0, 2)), ask)
    assert np.isfinite(after.centers).all()
    assert MethodWorld(fleet.strategy, fleet.devices, after).served("d03")


@every_method
def test_half_of_the_fleet_trains_in_an_exchange_and_the_others_keep_their_centers(name: str) -> None:
    fleet = played(name, 2)
    half, before = MethodWorld(build(name, {"fraction-train": 0.5}), fleet.devices, fleet.state), fleet.state
    half.round()
    asked = {c for exchange in half.exchanges[:-1] for c in exchange}
    fits = [sum(isinstance(task, Fit) for task in exchange.values()) for exchange in half.exchanges[:-1]]
    assert max(fits) == 3 if any(fits) else len(asked) == 3  # without fits, gradients are what trains
    for c in set(LOCAL) - asked:
        assert half.state.assignment.get(c) == before.assignment.get(c)
    assert np.isfinite(half.state.centers).all()


@every_method
def test_devices_come_and_go(name: str) -> None:
    fleet = world(build(name), LOCAL)
    early = {c: n for c, n in fleet.fleet.items() if c != "d05"}
    late = {c: n for c, n in fleet.fleet.items() if c != "d00"}
    for present in (early, early, late, late):
        report = fleet.round(fleet=present)
        assert set(report.per_device) == set(present)
        assert all(set(exchange) <= set(present) for exchange in fleet.exchanges)
    assert np.isfinite(fleet.state.centers).all()
    assert fleet.served("d05")


# few devices, many centers


@every_method
def test_more_centers_than_devices_is_no_error_and_an_empty_center_keeps_its_values(name: str) -> None:
    fleet = world(build(name, k=5), {c: LOCAL[c] for c in ("d00", "d01")}, rounds=2)
    before = fleet.state
    fleet.round()
    assert np.isfinite(fleet.state.centers).all()
    assert set(fleet.state.assignment) <= {"d00", "d01"}
    if fleet.state.assignment and len(fleet.state.centers) == len(before.centers) and hard(fleet):
        empty = sorted(set(range(len(before.centers))) - set(fleet.state.assignment.values()))
        now, then = (state.centers[empty][:, fleet.own_places] for state in (fleet.state, before))
        np.testing.assert_array_equal(now, then)


@every_method
def test_one_device_is_a_fleet_and_learns(name: str) -> None:
    fleet = world(build(name), {"d00": LOCAL["d00"]})
    first, last = [fleet.round().accuracy.micro for _ in range(6)][::5]
    assert first is not None
    assert last is not None
    assert last >= first
    assert not np.array_equal(fleet.served("d00")[0][1], start_of())


@every_method
def test_centers_keep_their_numbers_from_round_to_round(name: str) -> None:
    fleet = world(build(name, {"local-steps": 10}), LOCAL, rounds=4)
    for _ in range(2):
        before = fleet.state
        fleet.round()
        after = fleet.state
        assert after.assignment == before.assignment
        moved = np.linalg.norm(after.centers[:, None] - before.centers, axis=2)
        if after.assignment:  # where no device belongs to a center, all may come to be the same one
            assert moved.argmin(axis=1).tolist() == list(range(len(moved)))


@every_method
def test_held_out_samples_are_tested_on_and_decide_nothing(name: str) -> None:
    others = {c: replace(local, test=OTHER[c].test) for c, local in LOCAL.items()}
    known, other = played(name, 3), world(build(name), others, rounds=3)
    assert same(known.state, other.state)
    assert known.devices.own.keys() == other.devices.own.keys()
    for slot, model in known.devices.own.items():
        np.testing.assert_array_equal(model, other.devices.own[slot])


# what replay and storage need


@every_method
def test_the_input_state_is_left_as_it_was(name: str) -> None:
    fleet = played(name, 1)
    state, before = fleet.state, copied(fleet.state)
    fleet.round()
    assert same(state, before)


@every_method
def test_a_replay_of_stored_replies_asks_the_same_and_ends_the_same(name: str) -> None:
    fleet = played(name, 1)
    log: list[tuple[Exchange, Replies]] = []

    def live(exchange: Exchange) -> Replies:
        log.append((exchange, {c: fleet.devices.answer(c, task) for c, task in exchange.items()}))
        return log[-1][1]

    def stored(exchange: Exchange) -> Replies:
        asked, replies = log.pop(0)
        assert sorted(exchange) == sorted(asked)
        for c, task in exchange.items():
            for field, value in parts(task).items():
                np.testing.assert_equal(value, parts(asked[c])[field])
        return replies

    def play(state: State, ask: object) -> tuple[State, object]:
        generator = run_round(fleet.strategy, state, fleet.schema, fleet.fleet, round_rng(0, 2), batch=8)
        return drive(generator, ask)  # type: ignore[arg-type]  # one of the two above

    first = play(fleet.state, live)
    again = play(state_codec.decode_state(state_codec.encode_state(fleet.state)), stored)
    assert not log
    assert same(first[0], again[0])
    assert first[1] == again[1]


@every_method
def test_a_state_survives_being_stored(name: str) -> None:
    for rounds in (0, 3):
        state = played(name, rounds).state
        assert same(state_codec.decode_state(state_codec.encode_state(state)), state)


@every_method
def test_float32_models_stay_float32(name: str) -> None:
    fleet = world(build(name), LOCAL)
    method, schema = fleet.strategy, fleet.schema
    start = start_of(members=members_of(method)).astype(np.float32)
    state = method.begin(start, schema, fleet.fleet, round_rng(0, 0))

    def ask(exchange: Exchange) -> Replies:
        assert {v.dtype for task in exchange.values() for v in vectors(task)} <= {np.dtype(np.float32)}
        return {c: rounded(fleet.devices.answer(c, task)) for c, task in exchange.items()}

    for number in (1, 2, 3):
        state = drive(method.round(state, schema, fleet.fleet, round_rng(0, number)), ask)
        assert state.centers.dtype == np.float32


# who is who


@every_method
def test_the_order_in_which_devices_are_listed_or_answer_is_irrelevant(name: str) -> None:
    assert same(played(name, 3).state, world(build(name), dict(reversed(LOCAL.items())), rounds=3).state)


@every_method
def test_everybody_is_served_a_mixture_whose_weights_sum_to_one(name: str) -> None:
    for rounds in (0, 2):
        fleet = played(name, rounds)
        for who in [*LOCAL, "stranger", None]:
            mixture = fleet.served(who)
            assert sum(weight for weight, _ in mixture) == pytest.approx(1.0)
            assert all(weight >= 0 and model.shape == (fleet.schema.size,) for weight, model in mixture)


@every_method
def test_a_group_of_devices_is_served_better_than_chance(name: str) -> None:
    fleet = world(build(name, {"local-steps": 6}), LOCAL)
    accuracies = [fleet.round().accuracy.micro for _ in range(4)]
    assert accuracies[-1] is not None
    assert accuracies[-1] > 0.4  # of four classes; two groups write them differently, so that one model gets about half


# settings


@pytest.mark.every_method(sorted(METHODS))
def test_a_setting_that_cannot_work_is_refused_with_a_hint(name: str, key: str) -> None:
    value = method_settings(make_method(name))[key]
    bad: list[Setting] = ["nonsense"] if isinstance(value, str) else [-1] if isinstance(value, int) else [nan, -1.0]
    for wrong in bad:
        with pytest.raises(ConfigError) as refused:
            make_method(name, **{key: wrong})
        assert refused.value.hint


def hard(fleet: MethodWorld) -> bool:
    """Whether every device is served the center that it belongs to, and nothing else."""
    own = {c: fleet.state.centers[k] for c, k in fleet.state.assignment.items()}
    return set(own) == set(fleet.fleet) and all(
        len(fleet.served(c)) == 1 and np.array_equal(fleet.served(c)[0][1], center) for c, center in own.items()
    )


def parts(task: Fit | Probe) -> dict[str, object]:
    """A task's fields, with the models that a device keeps itself as pairs."""
    fields = dict(vars(task))
    if isinstance(task, Probe):
        fields["models"] = [(m.slot, m.init) if isinstance(m, OwnModel) else m for m in task.models]
    return fields


def vectors(task: Fit | Probe) -> list[Flat]:
    """The models and linear terms that a task carries."""
    if isinstance(task, Probe):
        named = [m.init if isinstance(m, OwnModel) else m for m in task.models]
    else:
        named = [v for v in (task.start, task.init, task.anchor, task.linear) if not isinstance(v, str)]
    return [v for v in named if v is not None]


def rounded(reply: Reply) -> Reply:
    """As it arrives over the wire, in float32."""
    update, grad = (None if v is None else v.astype(np.float32) for v in (reply.update, reply.grad))
    return replace(reply, update=update, grad=grad)
