"""A profile of answers: strange answers are far off, a device can be left out, and a guide keeps it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.nearest.fleet_profiles import answer_profiles, distance_of, make_answer_profile
from edge_client.errors import Malformed
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.nearest.answer_moments import (
    AnswerLook,
    AnswerMoments,
    answer_moments,
    vector_size,
)
from edge_client.protocol.nearest.router_file import read_router, write_router
from edge_client.protocol.task import Array
from tests.support.router_guides import GUIDE, K

CLASSES = 4


def answers(n: int, *, seed: int, margin: float = 6.0) -> Array:
    """[n, CLASSES] of a model that is sure of one class by about `margin`."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(n, CLASSES)) @ np.array([[1, 0.8, 0, 0], [0, 0.6, 0, 0], [0, 0, 1, 0.8], [0, 0, 0, 0.6]])
    sure: Array = scores + margin * np.eye(CLASSES)[rng.integers(CLASSES, size=n)]
    return sure


def test_answers_of_the_centers_own_devices_are_at_distance_one() -> None:
    profile = make_answer_profile([answer_moments(answers(20_000, seed=0))])
    assert profile.distance(answers(20_000, seed=1)) == pytest.approx(1, abs=0.05)


def test_answers_that_are_less_sure_or_lost_their_correlations_are_further_off() -> None:
    profile = make_answer_profile([answer_moments(answers(2_000, seed=0))])
    usual = profile.distance(answers(500, seed=1))
    unsure = profile.distance(answers(500, seed=1, margin=3.0))
    strange = np.random.default_rng(2).permuted(answers(500, seed=1), axis=1)
    assert unsure > 1.5 * usual
    assert profile.distance(strange) > 1.2 * usual


def test_moments_of_devices_add_up_and_can_be_taken_away() -> None:
    one, other = answers(30, seed=0), answers(50, seed=1)
    both = answer_moments(np.concatenate([one, other]))
    left = both - answer_moments(other)
    for name, value in vars(answer_moments(one)).items():
        np.testing.assert_allclose(getattr(left, name), value, atol=1e-9)
    profile = make_answer_profile([answer_moments(one), answer_moments(other)])
    np.testing.assert_allclose(profile.means, make_answer_profile([both]).means)


def test_samples_and_their_moments_are_at_one_distance() -> None:
    profile = make_answer_profile([answer_moments(answers(100, seed=0))])
    strange = answers(40, seed=1, margin=2.0)
    assert distance_of(profile, answer_moments(strange)) == pytest.approx(profile.distance(strange))


def test_a_small_center_has_the_profile_of_the_fleet() -> None:
    moments = [[answer_moments(answers(20, seed=i + 10 * k)) for k in range(2)] for i in range(5)]
    found = answer_profiles(moments, np.array([0, 0, 0, 1, 1]), least=3)
    assert found is not None
    np.testing.assert_allclose(found[0].means, make_answer_profile(row[0] for row in moments[:3]).means)
    np.testing.assert_allclose(found[1].means, make_answer_profile(row[1] for row in moments).means)
    assert answer_profiles(moments[:1], np.zeros(1, int)) is None


LOOK = AnswerLook(entropy=0.5, train=answer_moments(answers(30, seed=0)), test=answer_moments(np.zeros((0, CLASSES))))


def test_a_look_is_read_back_and_counts_at_most_so_many_samples() -> None:
    read = AnswerLook.from_vector(LOOK.to_vector())
    np.testing.assert_array_equal(read.to_vector(), LOOK.to_vector())
    few = AnswerLook.from_vector(LOOK.at_most(3).to_vector())
    assert few.train.n == pytest.approx(3)
    np.testing.assert_allclose(few.train.first / few.train.n, LOOK.train.first / LOOK.train.n)


@pytest.mark.parametrize("place", ["entropy", "counts", "first", "second", "length", "nan", "beyond"])
def test_a_look_that_no_answers_have_is_refused(place: str) -> None:
    values = LOOK.to_vector()
    if place == "entropy":
        values[0] = 9.0
    elif place == "counts":
        values[1] = -1.0
    elif place == "first":
        values[1 + CLASSES] = 1e9
    elif place == "second":
        values[1 + CLASSES + CLASSES**2] = 0.0
    elif place == "nan":
        values[5] = np.nan
    elif place == "beyond":
        values = np.zeros(1 + 2 * vector_size(33))
    else:
        values = values[:-1]
    with pytest.raises(Malformed):
        AnswerLook.from_vector(values)


@pytest.mark.parametrize("size", [1, 2, 4, 2 * vector_size(CLASSES), 1 + 2 * vector_size(33)])
def test_a_look_of_a_length_that_no_number_of_classes_has_is_refused_with_its_length(size: int) -> None:
    with pytest.raises(Malformed, match=f"^bad_schema: {size} numbers are no moments"):
        AnswerLook.from_vector(np.zeros(size))


def test_a_look_of_a_model_of_as_many_classes_as_a_profile_may_have_is_read() -> None:
    none = answer_moments(np.zeros((0, 32)))
    assert AnswerLook.from_vector(AnswerLook(entropy=1.0, train=none, test=none).to_vector()).train.n == 0


def test_a_class_that_was_never_named_and_equal_answers_leave_a_finite_distance() -> None:
    same = np.tile([3.0, 0.0, 0.0, 0.0], (9, 1))
    profile = make_answer_profile([answer_moments(same)])
    assert profile.distance(same) == pytest.approx(0)
    assert np.isfinite(profile.distance(np.eye(CLASSES)))


def test_a_guide_keeps_the_profiles_of_its_centers() -> None:
    profiles = [make_answer_profile([answer_moments(answers(100, seed=k))]) for k in range(K)]
    data = write_router(replace(GUIDE, answers=profiles))
    read = read_router(data)
    assert read.answers is not None
    assert [p.distance(answers(9, seed=9)) for p in read.answers] == pytest.approx(
        [p.distance(answers(9, seed=9)) for p in profiles],
        rel=1e-4,  # float32
    )
    assert write_router(read) == data


@pytest.mark.parametrize("changed", [{"classes": CLASSES + 1}, {"classes": 33}, {"profiles": "AAAA"}])
def test_profiles_that_break_a_rule_are_malformed(changed: dict[str, object]) -> None:
    profiles = [make_answer_profile([answer_moments(answers(100, seed=k))]) for k in range(K)]
    raw = parse_json(write_router(replace(GUIDE, answers=profiles)), 1 << 20)
    raw["answers"] |= changed
    with pytest.raises(Malformed):
        read_router(canonical_json(raw))


# ---- to the last number ----


def moments(counts: list[float], first: list[list[float]], second: list[list[float]]) -> AnswerMoments:
    return AnswerMoments(counts=np.array(counts), first=np.array(first), second=np.array(second))


ZERO = [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("sums", "possible"),
    [
        (moments([0, 0], ZERO, ZERO), True),
        (moments([2**31 - 1, 0], ZERO, ZERO), True),
        (moments([2**31, 0], ZERO, ZERO), False),
        (moments([1, 0], [[1e7, 0], [0, 0]], [[1e14, 0], [0, 0]]), True),
        (moments([1, 0], [[-1e7 - 1, 0], [0, 0]], [[(1e7 + 1) ** 2, 0], [0, 0]]), False),
        (moments([2, 0], ZERO, [[2e14, 0], [0, 0]]), True),
        (moments([2, 0], ZERO, [[2.001e14, 0], [0, 0]]), False),
        (moments([1, 0], [[1, 0], [1, 0]], [[2, 0], [0, 1]]), False),  # scores of a class that was never named
        (moments([1, 1], [[1, 0], [0, 1]], [[1, 0], [0, 1]]), True),
        (moments([1, 1], [[1, 0], [0, 1]], [[1, 0], [0, 1 - 1e-10]]), True),  # rounding
        (moments([1, 1], [[1, 0], [0, 1]], [[1, 0], [0, 1 - 1e-8]]), False),
        (moments([1, 0], [[0.01, 0], [0, 0]], [[1e-4 - 5e-10, 0], [0, 0]]), True),  # as for scores of 1
        (moments([1, 0], [[1e3, 0], [0, 0]], [[1e6 - 1e-4, 0], [0, 0]]), True),  # as far as their squares go
        (moments([4, 0], [[2, 2], [0, 0]], [[2, 2.5], [2.5, 2]]), False),  # each score could be, not both
        (moments([-1, 2], ZERO, [[9, 0], [0, 9]]), False),
    ],
)
def test_sums_are_possible_where_samples_could_have_them(sums: AnswerMoments, possible: bool) -> None:  # noqa: FBT001 - a row
    assert sums.is_possible() == possible
    if possible:
        read = AnswerMoments.from_vector(sums.to_vector(), 2)
        for name, value in vars(sums).items():
            np.testing.assert_array_equal(getattr(read, name), value)
    else:
        with pytest.raises(Malformed, match="no answers"):
            AnswerMoments.from_vector(sums.to_vector(), 2)


@pytest.mark.parametrize(
    ("entropy", "read"), [(0.0, True), (-1e-9, False), (np.log(CLASSES) + 9e-4, True), (np.log(CLASSES) + 2e-3, False)]
)
def test_an_entropy_is_at_most_that_of_guessing(entropy: float, read: bool) -> None:  # noqa: FBT001 - a row
    data = replace(LOOK, entropy=entropy).to_vector()
    if read:
        assert AnswerLook.from_vector(data).entropy == entropy
    else:
        with pytest.raises(Malformed, match="entropy"):
            AnswerLook.from_vector(data)


def test_at_most_so_many_samples_are_kept_with_all_their_means() -> None:
    whole = answer_moments(answers(30, seed=0))
    few = whole.at_most(6)
    for name, value in vars(whole).items():
        np.testing.assert_allclose(getattr(few, name), value / 5)
    np.testing.assert_array_equal(whole.at_most(30).second, whole.second)
    np.testing.assert_array_equal(whole.at_most(99).counts, whole.counts)
    assert answer_moments(np.zeros((0, 2))).at_most(5).n == 0


CROSS = np.array([[5.0, 0.0], [7.0, 0.0], [6.0, 1.0], [6.0, -1.0]])  # around (6, 0), with a variance of 1/2 each


def test_a_covariance_is_shrunk_by_a_hundredth_of_its_mean_variance() -> None:
    profile = make_answer_profile([answer_moments(CROSS)])
    np.testing.assert_allclose(profile.means[0], [6.0, 0.0])
    np.testing.assert_allclose(profile.means[1], [6.0, 0.0])  # never named: the mean of all
    np.testing.assert_allclose(profile.precision, np.eye(2) / (0.5 * 1.01))
    assert profile.distance(CROSS) == pytest.approx(1 / 1.01)
    assert distance_of(profile, answer_moments(CROSS)) == pytest.approx(1 / 1.01)
    same = make_answer_profile([answer_moments(np.tile([3.0, 0.0], (9, 1)))])
    np.testing.assert_allclose(same.precision, np.eye(2) * 1e11)  # a hundredth of the least variance


def test_a_device_is_left_out_and_a_center_without_another_has_the_profile_of_all_others() -> None:
    parts = [[answer_moments(answers(20, seed=i + 10 * k)) for k in range(2)] for i in range(3)]
    at = np.array([0, 0, 1])

    def means_of(k: int, *devices: int) -> Array:
        return make_answer_profile(parts[i][k] for i in devices).means

    for without, least, wanted in (
        (None, 1, ((0, 1), (2,))),
        (0, 1, ((1,), (2,))),
        (2, 1, ((0, 1), (0, 1))),
        (0, 2, ((1,), (1, 2))),  # center 0 has two devices, of which one is left out
        (None, 3, ((0, 1, 2), (0, 1, 2))),
    ):
        found = answer_profiles(parts, at, without=without, least=least)
        assert found is not None
        for k, devices in enumerate(wanted):
            np.testing.assert_allclose(found[k].means, means_of(k, *devices))
    usual, least_one = answer_profiles(parts, at), answer_profiles(parts, at, least=1)
    assert usual is not None
    assert least_one is not None
    np.testing.assert_array_equal(usual[1].means, least_one[1].means)
    assert answer_profiles(parts[:2], at[:2]) is not None
