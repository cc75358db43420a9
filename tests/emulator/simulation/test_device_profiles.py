from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.simulation.device_profiles import DEVICE_PROFILES, DeviceProfile, draw_profiles, uniform_hash

HALF = replace(DEVICE_PROFILES[0], availability=0.5, cycle_s=100.0)
MOMENTS = st.floats(0, 1e6)
PROFILE_WITH_TIME = st.builds(
    replace,
    st.just(DEVICE_PROFILES[0]),
    availability=st.floats(0.01, 1.0),
    cycle_s=st.floats(1.0, 1e5),
)


def test_the_same_seed_draws_the_same_fleet_whatever_the_order() -> None:
    names = [f"c{i}" for i in range(20)]
    assert draw_profiles(names, 1) == draw_profiles(reversed(names), 1)
    assert draw_profiles(names, 1) != draw_profiles(names, 2)
    assert set(draw_profiles(names, 1).values()) == set(DEVICE_PROFILES)
    assert draw_profiles(names[:5], 1).items() <= draw_profiles(names, 1).items()


def test_time_grows_with_steps_models_and_bytes() -> None:
    board = DEVICE_PROFILES[0]
    assert board.work_s(10, 0, samples=100, batch=8) == 10 * board.work_s(1, 0, samples=100, batch=8) > 0
    assert board.work_s(0, 2, samples=17, batch=8) == 2 * 3 * board.evaluate_s
    assert board.up_s(1_000_000) == board.latency_s + 1.0
    assert board.down_s(0) == board.latency_s


def test_kinds_are_as_common_as_their_shares_say() -> None:
    kinds = (replace(DEVICE_PROFILES[0], share=3.0), DEVICE_PROFILES[1])
    counts = Counter(profile.name for profile in draw_profiles([f"c{i}" for i in range(2_000)], 0, kinds).values())
    assert counts["board"] / 2_000 == pytest.approx(0.75, abs=0.03)  # three standard deviations of 2,000 draws


@given(PROFILE_WITH_TIME, MOMENTS, st.integers(0, 3))
def test_whoever_is_back_is_reachable_and_never_before_the_question(
    profile: DeviceProfile, at_s: float, seed: int
) -> None:
    back_s = profile.reachable_s("c", at_s, seed=seed)
    # It is away once in a cycle, and once more at once where two cycles meet.
    assert at_s <= back_s <= at_s + 2 * profile.cycle_s
    assert profile.reachable_s("c", at_s, seed=seed) == back_s
    just_after = back_s * (1 + 1e-9) + 1e-9  # the sum of cycle, phase and absence may round below the moment it means
    assert profile.reachable_s("c", just_after, seed=seed) <= just_after + profile.cycle_s


@given(PROFILE_WITH_TIME, MOMENTS, st.floats(0, 1e4))
def test_a_later_question_is_never_answered_with_an_earlier_moment(
    profile: DeviceProfile, at_s: float, more: float
) -> None:
    earlier, later = (profile.reachable_s("c", s, seed=0) for s in (at_s, at_s + more))
    assert earlier <= later + 1e-9 * (1 + later)  # where cycles meet, a sum of three numbers may round either way


@pytest.mark.parametrize("availability", [0.1, 0.5, 0.9])
def test_the_share_of_time_that_a_device_is_reachable_is_its_availability(availability: float) -> None:
    profile = replace(HALF, availability=availability)
    for who in ("a", "b"):
        here = [profile.reachable_s(who, s, seed=1) == s for s in np.arange(0, 20_000, 1.0)]
        assert np.mean(here) == pytest.approx(availability, abs=0.01)  # 200 cycles, in each a step of 1 s at either end


def test_at_any_moment_that_share_of_the_fleet_is_reachable() -> None:
    for at_s in (0.0, 50.0, 100.0):
        here = [HALF.reachable_s(f"c{i}", at_s, seed=0) == at_s for i in range(2_000)]
        assert np.mean(here) == pytest.approx(0.5, abs=0.034)  # three standard deviations


def test_always_there_and_never_there_ask_no_random_number() -> None:
    for at_s in (0.0, 1.5, 1e9):
        assert DEVICE_PROFILES[0].reachable_s("c", at_s, seed=0) == at_s
        assert replace(HALF, availability=0.0).reachable_s("c", at_s, seed=0) == np.inf


def test_tasks_are_dropped_as_often_as_said_each_with_a_part_done() -> None:
    flaky = replace(DEVICE_PROFILES[0], dropout=0.3)
    parts = [flaky.silent_after("c", number, 0, seed=0) for number in range(2_000)]
    dropped = np.array([part for part in parts if part is not None])
    assert len(dropped) / 2_000 == pytest.approx(0.3, abs=0.031)  # three standard deviations
    assert 0 <= dropped.min() < 0.05
    assert 0.95 < dropped.max() < 1
    assert all(DEVICE_PROFILES[0].silent_after("c", number, 0, seed=0) is None for number in range(100))
    assert all(replace(flaky, dropout=1.0).silent_after("c", n, 0, seed=0) is not None for n in range(100))


def test_draws_follow_from_their_names_alone() -> None:
    draws = [uniform_hash(*by) for by in ((0, "a"), (0, "b"), (1, "a"), (0, "a", 1))]
    assert len(set(draws)) == 4
    assert draws[0] == uniform_hash(0, "a")
    assert all(0 <= draw < 1 for draw in draws)


@pytest.mark.parametrize(
    "wrong",
    [{"availability": 1.1}, {"dropout": -0.1}, {"step_s": -1.0}, {"up_bytes_s": 0.0}, {"cycle_s": 0.0}, {"share": 0.0}],
)
def test_a_device_that_time_cannot_be_counted_for_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"device|positive|0 to 1"):
        replace(DEVICE_PROFILES[0], **wrong)  # type: ignore[arg-type]  # one field of its own type
