from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.models.members import SumLayout
from coordinator.strategies.base import State
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.momentum import VELOCITY_KEY, apply_momentum, reset_velocity
from edge_client.protocol.task import Array
from tests.support.methods import CASES, MethodWorld, build, copied, same, world
from tests.support.softmax_program import grouped_fleet

BETA = 0.5
LOCAL = grouped_fleet(6, 2)
N = 3  # parameters of the states below, which have one buffer more


def state(*centers: list[float], velocity: Array | None = None) -> State:
    return State(centers=np.array(centers, np.float64), extra={} if velocity is None else {VELOCITY_KEY: velocity})


def test_the_first_move_is_not_made_again_and_the_second_is() -> None:
    one = apply_momentum(state([0, 0, 0, 0]), state([4, 4, 4, 4]), beta=BETA, n_params=N)
    assert one.centers.tolist() == [[4, 4, 4, 4]]
    two = apply_momentum(one, State(centers=one.centers + 2.0, extra=one.extra), beta=BETA, n_params=N)
    assert two.centers.tolist() == [[6, 6, 6, 6]]
    three = apply_momentum(two, State(centers=two.centers + 1.0, extra=two.extra), beta=BETA, n_params=N)
    assert three.centers.tolist() == [[8, 8, 8, 7]]  # the buffer only goes where the method put it
    assert three.extra[VELOCITY_KEY].tolist() == [[2, 2, 2]]


def test_a_center_that_nobody_trained_stays_and_keeps_its_velocity_and_a_new_one_has_none() -> None:
    before = state([1, 1, 1, 0], [5, 5, 5, 0], velocity=np.array([[2.0, 2, 2], [4, 4, 4]]))
    after = State(centers=np.array([[1.0, 1, 1, 0], [5, 5, 6, 0], [7, 7, 7, 0]]), extra=before.extra)
    found = apply_momentum(before, after, beta=BETA, n_params=N)
    assert found.centers.tolist() == [[1, 1, 1, 0], [7, 7, 8, 0], [7, 7, 7, 0]]
    assert found.extra[VELOCITY_KEY].tolist() == [[2, 2, 2], [2, 2, 3], [0, 0, 0]]


def test_a_center_that_is_first_trained_later_does_not_make_its_jump_again() -> None:
    begun = state([0, 0, 0, 0], [0, 0, 0, 0])
    one = apply_momentum(begun, state([4, 4, 4, 0], [0, 0, 0, 0]), beta=BETA, n_params=N)
    jump = np.array([[0.0, 0, 0, 0], [6, 6, 6, 0]])
    two = apply_momentum(one, State(centers=one.centers + jump, extra=one.extra), beta=BETA, n_params=N)
    three = apply_momentum(two, State(centers=two.centers + 1.0, extra=two.extra), beta=BETA, n_params=N)
    assert three.centers[:, :N].tolist() == [[5, 5, 5], [7, 7, 7]]
    assert three.extra[VELOCITY_KEY].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_method_that_carries_nothing_on_has_momentum_too() -> None:
    moving = state([1, 1, 1, 0], velocity=np.ones((1, N)))
    found = apply_momentum(moving, State(centers=moving.centers + 1.0), beta=BETA, n_params=N)
    assert found.centers[:, :N].tolist() == [[2.5, 2.5, 2.5]]


def test_a_center_that_is_halted_begins_anew_and_no_other() -> None:
    moving = state([1, 1, 1, 0], [2, 2, 2, 0], velocity=np.ones((2, N)))
    after = State(centers=moving.centers + 1.0, extra=reset_velocity(moving.extra, 0))
    assert apply_momentum(moving, after, beta=BETA, n_params=N).extra[VELOCITY_KEY].tolist() == [
        [0, 0, 0],
        [1.5, 1.5, 1.5],
    ]
    assert moving.extra[VELOCITY_KEY].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert reset_velocity({}, 0) == {}


def error_after(rounds: int, *, step: float, beta: float) -> float:
    """Of a method each of whose rounds multiplies the error by 1 - step."""
    now = state([1, 1, 1, 0], velocity=np.zeros((1, N)))
    for _ in range(rounds):
        now = apply_momentum(now, State(centers=(1 - step) * now.centers, extra=now.extra), beta=beta, n_params=N)
    return float(abs(now.centers).max())


@given(st.floats(0.01, 1.99), st.floats(0.2, 0.9))
def test_where_the_roots_are_complex_an_error_shrinks_by_the_root_of_beta(step: float, beta: float) -> None:
    """Polyak 1964: both roots of z^2 - (1 + beta - step) z + beta then have that modulus, whatever the step."""
    assume((1 + beta - step) ** 2 < 3.9 * beta)
    assert error_after(200, step=step, beta=beta) <= 100 * beta**100


def test_rounds_that_overshoot_or_creep_settle_sooner() -> None:
    for step in (1.95, 0.05):
        plain, coasting = (error_after(40, step=step, beta=beta) for beta in (0.0, BETA))
        assert coasting < plain / 2


MAKING_CENTERS = [case for case in CASES if isinstance(build(case), LocalSgd) and case != "nonfed"]
with_the_setting = pytest.mark.parametrize("case", MAKING_CENTERS)


@with_the_setting
def test_a_round_of_any_method_is_its_own_and_then_part_of_each_centers_last_move(case: str) -> None:
    fleet = world(build(case, {"server-momentum": BETA}), LOCAL, rounds=3)
    start = copied(fleet.state)
    plain = MethodWorld(build(case, {"server-momentum": 0.0}), fleet.devices, start, number=fleet.number)
    kept = dict(fleet.devices.own)
    fleet.round()
    fleet.devices.own.clear()
    fleet.devices.own.update(kept)
    plain.round()
    k, n = len(start.centers), fleet.schema.n_params
    trained = (plain.state.centers[:k] != start.centers).any(axis=1)
    assert trained.any() or case == "femam"  # the third round of femam is that of personal models
    expected = plain.state.centers.copy()
    if trained.any():
        before = np.nan_to_num(plain.state.extra[VELOCITY_KEY])  # of a center that this round split there is none
        expected[:k, :n][trained] += BETA * before[trained]
    np.testing.assert_array_equal(fleet.state.centers, expected)
    assert fleet.state.assignment == plain.state.assignment


@pytest.mark.parametrize(
    ("case", "held"), [("femam level-rounds=2", 2), ("cam common=false warm-up=2 start=redraw", 2), ("cam", 9)]
)
def test_in_a_sum_of_models_a_member_that_is_held_stays_and_the_common_one_is_that_of_all_centers(
    case: str, held: int
) -> None:
    """After `held` rounds the common member is not trained any more."""
    fleet = world(build(case, {"server-momentum": BETA}, k=3), LOCAL, rounds=2)
    common = SumLayout(fleet.schema, fleet.members).places[0]
    for number in range(3, 6):
        before = fleet.state.centers[0, common]
        fleet.round()
        after = fleet.state.centers[:, common]
        assert (after == after[0]).all()
        assert (after[0] == before).all() == (number > held)


def test_the_first_move_of_a_groups_member_is_not_made_again_though_the_common_one_moved_before() -> None:
    fleet = world(build("cam-wecfl common=false warm-up=2", {"server-momentum": BETA}, k=2), LOCAL, rounds=3)
    group = np.flatnonzero(fleet.own_places[: fleet.schema.n_params])
    assert (fleet.state.extra[VELOCITY_KEY][:, group] == 0).all()


@with_the_setting
def test_a_silent_fleet_moves_no_center_and_a_replay_is_exact(case: str) -> None:
    method = build(case, {"server-momentum": BETA})
    fleet, again = (world(method, LOCAL, rounds=3) for _ in range(2))
    assert same(fleet.state, again.state)
    fleet.round(silent=LOCAL)
    np.testing.assert_array_equal(fleet.state.centers, again.state.centers)
    np.testing.assert_array_equal(fleet.state.extra.get(VELOCITY_KEY, 0), again.state.extra.get(VELOCITY_KEY, 0))
