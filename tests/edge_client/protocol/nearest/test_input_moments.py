"""Moments add up, and a fleet's profile tells inputs that it knows from noise, reversed axes and lost order."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.nearest.fleet_profiles import leave_one_out, make_profile
from coordinator.nearest.learn_from_replies import same_features
from edge_client.errors import Malformed
from edge_client.protocol.nearest.input_moments import (
    InputMoments,
    count_features,
    input_features,
    moments_of,
)

CHANNELS, TIMES = 3, 40


def waves(seed: int, n: int = 30) -> np.ndarray:
    """Three channels of a slow wave around a level, each with amplitudes of its own: [n, 3, 40]."""
    rng = np.random.default_rng(seed)
    phase, speed = rng.uniform(0, 2 * np.pi, (n, 1, 1)), rng.uniform(0.1, 0.3, (n, 1, 1))
    level, height = np.array([[0.0], [1.0], [4.0]]), np.array([[2.0], [0.5], [1.0]])
    wave = height * np.sin(phase + speed * np.arange(TIMES))
    found: np.ndarray = level + wave + 0.1 * rng.normal(size=(n, CHANNELS, TIMES))
    return found


FLEET = [moments_of(waves(seed)) for seed in range(5)]


def test_the_moments_of_devices_add_up_and_can_be_taken_away() -> None:
    x = waves(0)
    whole, one, other = moments_of(x), moments_of(x[:10]), moments_of(x[10:])
    for found, wanted in (((one + other), whole), ((whole - other), one)):
        assert found.n == wanted.n
        np.testing.assert_allclose(found.first, wanted.first, atol=1e-9)
        np.testing.assert_allclose(found.second, wanted.second, atol=1e-9)


def test_independent_inputs_of_the_fleet_are_at_distance_one() -> None:
    x = np.random.default_rng(0).normal(size=(2000, 2))  # two values: no autocorrelation
    moments = moments_of(x)
    assert make_profile([moments]).distance(moments) == pytest.approx(1, abs=0.02)  # without the floor it is 1


def test_noise_reversed_channels_and_lost_order_are_far_off() -> None:
    profile = make_profile(FLEET)
    known = [profile.distance(moments_of(waves(seed))) for seed in range(5, 25)]
    x, rng = waves(99), np.random.default_rng(0)
    strange = {
        "noise": rng.normal(x.mean(), x.std(), size=x.shape),
        "reversed": x[:, ::-1],
        "permuted": x[..., rng.permutation(TIMES)],
        "permuted each": rng.permuted(x, axis=2),
    }
    for name, inputs in strange.items():
        assert profile.distance(moments_of(inputs)) > 1.5 * max(known), name


def test_a_device_is_measured_without_itself() -> None:
    far = moments_of(waves(7) + 3)
    without = leave_one_out([*FLEET, far])
    assert without[-1] is not None
    assert without[-1].distance(far) == pytest.approx(make_profile(FLEET).distance(far))
    assert leave_one_out([far]) == [None]


@given(st.integers(1, 3), st.integers(1, 90))
def test_wide_inputs_are_folded_and_short_axes_left_out(channels: int, times: int) -> None:
    features = input_features(np.ones((2, channels, times)))
    assert features.shape[1] == min(64, channels * times) + (channels >= 3) + (times >= 3)
    assert np.isfinite(features).all()


def test_a_pixel_that_was_always_empty_does_not_decide() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(200, 5)), np.zeros((200, 1))], axis=1)
    profile, other = make_profile([moments_of(x)]), x[:50] + np.eye(6)[5] * 0.01
    assert profile.distance(moments_of(other)) < 2


def test_a_vector_is_read_back_and_checked() -> None:
    vector = FLEET[0].to_vector()
    read = InputMoments.from_vector(vector)
    assert read.n == FLEET[0].n
    np.testing.assert_array_equal(read.second, FLEET[0].second)
    for wrong in (vector[:-1], np.append(-1.0, vector[1:]), np.append(0.5, vector[1:]), vector * np.nan, vector[:0]):
        with pytest.raises(Malformed):
            InputMoments.from_vector(wrong)


@pytest.mark.parametrize("lie", ["a sum", "a product", "no variance", "one direction"])
def test_moments_that_no_samples_have_are_refused(lie: str) -> None:
    n, first, second = FLEET[0].n, FLEET[0].first.copy(), FLEET[0].second.copy()
    if lie == "a sum":
        first[0] = 1e200
    elif lie == "a product":
        second[0, 1] = second[1, 0] = 1e200
    elif lie == "no variance":  # the mean square is below the square of the mean
        far = int(np.abs(first).argmax())
        second[far, far] = 0.5 * first[far] ** 2 / n
    else:  # each pair could be, all together could not
        second = np.outer(first, first) / n + np.eye(len(first)) - 0.9 * (1 - np.eye(len(first)))
    with pytest.raises(Malformed, match="samples"):
        InputMoments.from_vector(InputMoments(n=n, first=first, second=second).to_vector())


def test_moments_of_many_samples_take_little_memory_beside_them() -> None:
    x = np.random.default_rng(0).random((4_096, 1_024), dtype=np.float32)
    tracemalloc.start()
    found = moments_of(x)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 * x.nbytes
    half = moments_of(x[:1_000]) + moments_of(x[1_000:])
    assert found.n == half.n == 4_096
    np.testing.assert_allclose(found.to_vector(), half.to_vector(), rtol=1e-12)


def test_moments_of_too_many_samples_keep_their_means() -> None:
    many = InputMoments(n=2**30, first=FLEET[0].first, second=FLEET[0].second)
    few = many.at_most(300)
    assert few.n == 300
    np.testing.assert_allclose(few.first / few.n, many.first / many.n, rtol=1e-12)  # float64's rounding
    assert few.at_most(1_000) is few


@pytest.mark.parametrize("x", [np.zeros((3, 5)), np.full((40, 9), 3e38), np.eye(6), np.full((2, 3, 4), 7.0)])
def test_moments_of_extreme_samples_are_taken(x: np.ndarray) -> None:
    assert InputMoments.from_vector(moments_of(x).to_vector()).n == len(x)


def test_inputs_of_another_form_are_refused_or_left_out() -> None:
    small = moments_of(np.ones((4, 5)))
    with pytest.raises(Malformed, match="features"):
        make_profile(FLEET).distance(small)
    parts = {"a": FLEET[0], "b": small, "c": FLEET[1]}
    assert set(same_features(parts)) == {"a", "c"}
    assert same_features({}) == {}


# ---- to the last number ----


def one_feature(n: float, first: float, second: float) -> np.ndarray:
    return np.array([n, first, second])


@pytest.mark.parametrize(
    ("vector", "read"),
    [
        (one_feature(1, 0, 0), True),
        (one_feature(0, 0, 0), False),
        (one_feature(2**31 - 1, 0, 0), True),
        (one_feature(2**31, 0, 0), False),
        (one_feature(1.5, 0, 0), False),
        (one_feature(np.inf, 0, 0), False),
        (one_feature(1, 1e7, 1e14), True),
        (one_feature(1, 1.001e7, 1.002002e14), False),
        (one_feature(2, 0, 2e14), True),
        (one_feature(2, 0, 2.001e14), False),
        (one_feature(1, 1, 1 - 1e-10), True),  # rounding
        (one_feature(1, 1, 1 - 1e-8), False),
    ],
)
def test_moments_are_read_where_samples_could_have_them(vector: np.ndarray, read: bool) -> None:  # noqa: FBT001 - a row
    if read:
        np.testing.assert_array_equal(InputMoments.from_vector(vector).to_vector(), vector)
    else:
        with pytest.raises(Malformed, match="bad_schema"):
            InputMoments.from_vector(vector)


@pytest.mark.parametrize("features", [1, 2, 67, 68])
def test_numbers_say_how_many_features_they_are_of(features: int) -> None:
    numbers = 1 + features + features * (features + 1) // 2
    assert count_features(numbers) == features
    for wrong in (numbers - 1, numbers + 1):
        with pytest.raises(Malformed, match=f"cannot have {wrong} numbers"):
            count_features(wrong)


@pytest.mark.parametrize("numbers", [0, 1, 1 + 69 + 69 * 70 // 2])
def test_of_no_features_or_more_than_a_sample_has_there_are_no_moments(numbers: int) -> None:
    with pytest.raises(Malformed, match="cannot have"):
        count_features(numbers)


def test_at_most_so_many_samples_are_kept_with_all_their_means() -> None:
    few = FLEET[0].at_most(10)
    assert few.n == 10
    np.testing.assert_allclose(few.first, FLEET[0].first / 3)
    np.testing.assert_allclose(few.second, FLEET[0].second / 3)
    assert FLEET[0].at_most(30) is FLEET[0]


def test_the_features_are_values_of_any_size_and_how_alike_neighbours_are_along_each_axis() -> None:
    values = np.array([[1e6, -1e6, 1e6, -1e6], [0.0, 0.0, 1.0, 1.0]])
    found = input_features(values)
    np.testing.assert_allclose(found[:, :4], np.arcsinh(values))
    np.testing.assert_allclose(found[:, 4], [-1.0, 1 / 3], rtol=1e-6)  # opposite; two pairs of three alike
    assert input_features(np.ones((2, 3, 3, 3, 3, 3))).shape == (2, 64 + 4)  # of the first four axes
    assert input_features(np.ones((2, 2, 3))).shape == (2, 6 + 1)  # an axis of two has no neighbours but one
    assert input_features(np.zeros((1, 5)))[0, 5] == 0.0  # no variance


def test_wide_samples_are_folded_with_signs_and_every_value_counts_once() -> None:
    wide = np.eye(100)
    folded = input_features(np.sinh(wide))[:, :64]
    np.testing.assert_allclose(np.abs(folded).sum(axis=1), 1.0)
    assert {-1.0, 1.0} <= {float(value) for value in np.round(folded.ravel(), 9)}
    assert len(np.flatnonzero(np.abs(folded).sum(axis=0))) > 40  # of 64 places, by lot
    # the hash of PROTOCOL.md 12: places and signs of the first columns, as every client has them
    assert [
        (int(row.argmax() if row.max() > 0.5 else row.argmin()), float(np.round(row.sum()))) for row in folded[:4]
    ] == FOLDS


def by_hand(i: int) -> tuple[int, float]:
    mixed = (i * 0x9E3779B1 + 12345) % 2**32
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77 % 2**32
    mixed ^= mixed >> 13
    return (mixed >> 1) % 64, 1.0 if mixed & 1 else -1.0


FOLDS = [by_hand(i) for i in range(4)]


def test_a_profile_has_the_spreads_and_the_shrunk_correlations_of_its_features() -> None:
    """Two features of variance 1 and 4 with a correlation of a half; 0.001 of the mean variance is added to each."""
    second = np.array([[1.0, 1.0], [1.0, 4.0]])
    profile = make_profile(
        [InputMoments(n=10, first=np.array([20.0, 0.0]), second=10 * (second + np.diag([4.0, 0.0])))]
    )
    np.testing.assert_allclose(profile.mean, [2.0, 0.0])
    spread = np.sqrt([1.0 + 0.0025, 4.0 + 0.0025])
    np.testing.assert_allclose(profile.spread, spread)
    correlation = 0.998 * 1.0 / spread.prod()
    np.testing.assert_allclose(np.linalg.inv(profile.precision), [[1.0, correlation], [correlation, 1.0]])
    nothing = make_profile([InputMoments(n=10, first=np.zeros(2), second=np.zeros((2, 2)))])
    np.testing.assert_allclose(nothing.spread, [1e-6, 1e-6])


def test_where_as_many_devices_have_either_number_of_features_the_greater_one_is_usual() -> None:
    small = moments_of(np.ones((4, 5)))
    for names in ("ab", "ba"):
        parts = dict(zip(names, (FLEET[0], small), strict=True))
        assert [len(part.first) for part in same_features(parts).values()] == [len(FLEET[0].first)]
    assert leave_one_out([FLEET[0], FLEET[1]])[0] is not None
