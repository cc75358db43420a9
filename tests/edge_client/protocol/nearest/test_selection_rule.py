"""One rule chooses a center, whatever was measured: the least distance, the lower number on a tie, or none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import Malformed
from edge_client.protocol.nearest.selection_rule import (
    MAX_ALTERNATIVES,
    choose_by_distance,
    choose_by_votes,
    sketch_distance,
)

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


def test_the_answer_to_near_names_the_center_and_the_next_ones_and_the_fit_where_it_is_known() -> None:
    told = {"center": 1, "distance": 0.25, "alternatives": [{"center": 0, "distance": 0.5}]}
    assert choose_by_distance([0.5, 0.25], 1.0).to_json() == told
    assert choose_by_distance([0.5, 0.25], 1.0, lambda _: "badly").to_json() == told | {"fit": "badly"}
