"""How many samples count of a device: what it says, up to a multiple of the lower median."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds.sample_weights import MAX_SAMPLES_RATIO, max_samples, weighed_fleet

fleets = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 2**31), min_size=1)


@settings(max_examples=30)
@given(announced=fleets, ratio=st.floats(1, 100))
def test_each_device_counts_with_its_samples_up_to_the_bound_and_in_its_place(
    announced: dict[str, int], ratio: float
) -> None:
    most = max_samples(announced.values(), ratio)
    weighed = weighed_fleet(announced, ratio)
    assert list(weighed) == list(announced)
    assert all(weighed[cid] == min(n, most) for cid, n in announced.items())


@settings(max_examples=30)
@given(honest=st.lists(st.integers(1, 1_000), min_size=1, max_size=8), lie=st.integers(0, 2**31))
def test_half_of_the_fleet_may_announce_anything_and_the_bound_stays_that_of_honest_devices(
    honest: list[int], lie: int
) -> None:
    assert max_samples([*honest, *[lie] * len(honest)], 10.0) <= 10 * max(honest)


def test_by_default_a_device_counts_with_at_most_ten_times_the_median() -> None:
    assert weighed_fleet({"a": 40, "b": 60, "c": 2**31}, MAX_SAMPLES_RATIO) == {"a": 40, "b": 60, "c": 600}


def test_a_fleet_without_samples_still_counts_one_and_a_fleet_without_devices_none() -> None:
    assert max_samples([0, 0, 5], 10.0) == 1
    assert weighed_fleet({}, 10.0) == {}
