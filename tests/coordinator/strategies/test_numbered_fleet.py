from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.storage.state_codec import decode_state, encode_state
from coordinator.strategies.base import State
from coordinator.strategies.common.assignment import serving_center
from coordinator.strategies.common.sampling import sample_cohort
from coordinator.strategies.numbered_fleet import (
    DeviceNames,
    NumberedAssignment,
    NumberedFleet,
    all_of_one_center,
    mean_samples,
    members_of_centers,
    reassigned,
)

SIZES = st.lists(st.integers(1, 99), min_size=1, max_size=40)


def numbered(sizes: list[int]) -> NumberedFleet:
    return NumberedFleet(np.array(sizes))


@given(st.integers(1, 120))
def test_names_are_sorted_and_tell_the_number(count: int) -> None:
    names = DeviceNames(count)
    assert list(names) == sorted(names)
    assert [names.number(who) for who in names] == list(range(count))
    assert len(set(names)) == len(names) == count


@pytest.mark.parametrize("stranger", ["device-20", "device-7", "device-007", "device-+7", "device-٠٧", "new-07", "", 7])
def test_another_name_is_no_device(stranger: object) -> None:
    assert stranger not in DeviceNames(20)
    assert stranger not in NumberedFleet(np.ones(20, np.int64))


@given(SIZES, st.floats(0.01, 1.0), st.integers(0, 9))
def test_a_numbered_fleet_is_the_same_as_a_listed_one(sizes: list[int], fraction: float, seed: int) -> None:
    fleet = numbered(sizes)
    listed = dict(fleet)
    assert fleet == listed
    assert mean_samples(fleet) == mean_samples(listed)
    drawn = [sample_cohort(each, fraction, np.random.default_rng(seed)) for each in (fleet, listed)]
    assert drawn[0] == drawn[1]
    assert dict(all_of_one_center(fleet)) == all_of_one_center(listed)


@given(SIZES, st.lists(st.dictionaries(st.integers(0, 39), st.integers(0, 4)), max_size=4))
def test_a_numbered_assignment_is_the_same_as_a_listed_one(sizes: list[int], moves: list[dict[int, int]]) -> None:
    fleet = numbered(sizes)
    ours, listed = reassigned(fleet, {}, {}), dict[str, int]()
    for move in moves:
        chosen = {fleet.names[at % len(fleet)]: center for at, center in move.items()}
        before = dict(ours)
        after, listed = reassigned(fleet, ours, chosen), {**listed, **chosen}
        assert dict(ours) == before
        ours = after
    assert dict(ours) == listed
    assert len(ours) == len(listed)
    assert members_of_centers(ours) == members_of_centers(listed)
    for who in (*fleet, None):
        assert serving_center(ours, who) == serving_center(listed, who)


def test_a_stored_state_has_its_numbered_assignment_again() -> None:
    assignment = reassigned(numbered([3] * 50), {}, {"device-07": 2, "device-49": 0})
    state = decode_state(encode_state(State(centers=np.zeros((3, 2)), assignment=assignment)))
    assert isinstance(state.assignment, NumberedAssignment)
    assert dict(state.assignment) == {"device-07": 2, "device-49": 0}
