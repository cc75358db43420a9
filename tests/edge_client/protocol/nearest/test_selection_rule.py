"""One rule chooses a center, whatever was measured: the least distance, the lower number on a tie, or none."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import Malformed
from edge_client.protocol.nearest.selection_rule import (
    MAX_ALTERNATIVES,
    choose_by_distance,
    guessing_loss,
    sketch_distance,
)
from export.serve.nearest import choose_by_votes
from tests.support.softmax_program import program

distances = st.lists(st.floats(0, 10), min_size=1, max_size=20)


@given(distances, st.floats(0, 10))
def test_the_nearest_center_is_chosen_when_it_is_near_enough(given: list[float], abstain: float) -> None:
    choice = choose_by_distance(given, abstain)
    assert choice.center == (int(np.argmin(given)) if min(given) <= abstain else None)
    assert choice.distance == min(given)
    told = [distance for _, distance in choice.alternatives]
    assert told == sorted(told)
    assert len(told) <= MAX_ALTERNATIVES
    assert choice.center not in [center for center, _ in choice.alternatives]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any))
def test_most_votes_win(votes: list[int]) -> None:
    choice = choose_by_votes(votes)
    assert choice.center == votes.index(max(votes))
    assert choice.distance == pytest.approx(1 - max(votes) / sum(votes))


def test_no_votes_choose_nothing() -> None:
    with pytest.raises(Malformed, match="no sample"):
        choose_by_votes([0, 0])


def test_a_sketch_finds_the_nearest_of_its_length() -> None:
    sketches = np.array([[0.0, 0.0], [3.0, 4.0]])
    assert choose_by_distance(sketch_distance(np.array([3.0, 3.0]), sketches), 2.0).center == 1
    assert choose_by_distance(sketch_distance(np.array([30.0, 30.0]), sketches), 2.0).center is None
    with pytest.raises(Malformed, match="3 numbers"):
        choose_by_distance(sketch_distance(np.ones(3), sketches), 2.0)


def test_a_negative_loss_is_no_measurement() -> None:
    assert choose_by_distance([-1.0, 0.5], 1.0).center is None


def test_a_loss_of_the_users_own_may_be_below_zero() -> None:
    choice = choose_by_distance([-0.5, -2.0, 1.0], guessing_loss(replace(program(), own_loss=True)))
    assert (choice.center, choice.distance) == (1, -2.0)
    assert choice.alternatives == ((0, -0.5), (2, 1.0))


def test_the_answer_to_near_names_the_center_and_the_next_ones_and_the_fit_where_it_is_known() -> None:
    told = {"center": 1, "distance": 0.25, "alternatives": [{"center": 0, "distance": 0.5}]}
    assert choose_by_distance([0.5, 0.25], 1.0).to_json() == told
    assert choose_by_distance([0.5, 0.25], 1.0, lambda _: "badly").to_json() == told | {"fit": "badly"}


def test_at_most_eight_others_are_told_and_none_that_was_not_measured() -> None:
    many = choose_by_distance([0.5 + k for k in range(12)], 1.0)
    assert [k for k, _ in many.alternatives] == list(range(1, 9))
    odd = choose_by_distance([-1.0, 0.5, math.inf, 0.0, math.nan], 1.0)
    assert (odd.center, odd.distance) == (None, 0.0)
    assert odd.alternatives == ((3, 0.0), (1, 0.5))


@pytest.mark.parametrize(
    ("distances", "abstain", "center"),
    [
        ([1.0], 1.0, 0),
        ([1.0], 0.999, None),
        ([0.0], 0.0, 0),
        ([math.inf], math.inf, None),
        ([2.0, 2.0], 2.0, 0),
    ],
)
def test_a_center_at_the_limit_fits_and_one_infinitely_far_never(
    distances: list[float], abstain: float, center: int | None
) -> None:
    choice = choose_by_distance(distances, abstain)
    assert choice.center == center
    assert choice.fit == (None if center is not None else "none")


def test_a_fit_is_asked_of_the_least_distance_alone_and_none_leaves_every_center_as_an_alternative() -> None:
    asked: list[float] = []

    def none(distance: float) -> str:
        asked.append(distance)
        return "none"

    choice = choose_by_distance([0.5, 0.25], 1.0, none)
    assert (choice.center, choice.fit, choice.alternatives) == (None, "none", ((1, 0.25), (0, 0.5)))
    assert choose_by_distance([0.5, 0.25], 0.1, none).fit == "none"
    assert asked == [0.25]


def test_guessing_loses_the_logarithm_of_the_classes_and_where_no_class_is_guessed_no_loss_is_too_high() -> None:
    plain = program()
    assert guessing_loss(plain) == pytest.approx(math.log(4))
    for other in (replace(plain, own_loss=True), replace(plain, loss="squared-error", target=(1,))):
        assert guessing_loss(other) == pytest.approx(1.8446743e19)


def test_the_distance_of_sketches_is_the_root_of_the_mean_square() -> None:
    points = np.array([[0.0, 0.0], [3.0, 4.0]])
    np.testing.assert_allclose(sketch_distance(np.zeros(2), points), [0.0, math.sqrt(25 / 2)])
    with pytest.raises(Malformed, match="1 numbers, the centers' have 2"):
        sketch_distance(np.zeros(1), points)


@pytest.mark.parametrize("votes", [[0, 1], [1, 0]])
def test_one_vote_is_enough(votes: list[int]) -> None:
    choice = choose_by_votes(votes)
    assert (choice.center, choice.distance) == (votes.index(1), 0.0)
    assert choice.alternatives == ((votes.index(0), 1.0),)
