"""The degree and the threshold of a cohort, against the exact tails and against drawn cohorts."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import hypergeom

from coordinator.aggregation.sum_graph import sum_parameters
from edge_client.errors import ConfigError
from edge_client.protocol.secure.parameters import threshold_of, upper_tail


@pytest.mark.parametrize(
    ("devices", "neighbours", "threshold"),
    [(100, 34, 11), (200, 54, 21), (500, 76, 31), (1000, 88, 36), (5000, 104, 42)],
)
def test_large_cohorts_have_the_degrees_of_the_hypergeometric_tails(
    devices: int, neighbours: int, threshold: int
) -> None:
    found = sum_parameters(devices)
    assert (found.neighbours, found.threshold) == (neighbours, threshold)


def test_fifty_devices_have_22_neighbours_since_20_could_all_be_removed() -> None:
    """15 missing and 5 colluding devices may be all the 20 neighbours of a device, with more than 2^-40."""
    assert threshold_of(50, 22) == 7
    assert threshold_of(50, 20) == 0
    assert 50 * upper_tail(49, 20, 20)[20] > 2**-40
    assert (sum_parameters(50).neighbours, sum_parameters(50).threshold) == (22, 7)


@pytest.mark.parametrize("devices", [5, 6, 9, 16])
def test_a_small_cohort_is_complete_and_a_majority_of_neighbours_is_needed_where_the_survivors_suffice(
    devices: int,
) -> None:
    found = sum_parameters(devices)
    assert found.neighbours == devices - 1
    assert found.threshold == min(devices - 1 - 3 * devices // 10, (devices - 1) // 2 + 1)


@pytest.mark.parametrize("devices", [5, 17, 50, 100, 333, 1000])
def test_the_bounds_hold_by_another_implementation_of_the_tails(devices: int) -> None:
    found = sum_parameters(devices)
    n, k, t = devices, found.neighbours, found.threshold
    missing, colluding = 3 * n // 10, max(1, n // 10)
    assert n * hypergeom(n - 1, missing, k).sf(k - t) <= 2**-20
    assert n * hypergeom(n - 1, colluding, k).sf(t - 1) <= 2**-40


def test_a_tail_is_the_share_of_drawn_cohorts() -> None:
    rng = np.random.default_rng(3)
    drawn = rng.hypergeometric(30, 69, 20, size=200_000)
    for x, exact in enumerate(upper_tail(99, 30, 20)):
        assert abs((drawn >= x).mean() - exact) < 0.006  # five standard deviations of a share of 200,000 draws


@pytest.mark.parametrize(("devices", "least"), [(4, 1), (9, 10), (0, 5), (100_001, 5)])
def test_a_cohort_of_the_wrong_size_is_refused_with_what_to_do(devices: int, least: int) -> None:
    with pytest.raises(ConfigError, match="hint: "):
        sum_parameters(devices, least_members=least)


@pytest.mark.parametrize(("devices", "neighbours", "least"), [(160, 44, 17), (183, 48, 19)])
def test_there_is_no_threshold_where_so_many_shares_as_may_be_missing_leave_few_enough_to_collude(
    devices: int, neighbours: int, least: int
) -> None:
    missing, colluding = 3 * devices // 10, devices // 10
    assert threshold_of(devices, neighbours) == 0
    assert devices * upper_tail(devices - 1, colluding, neighbours)[least - 1] > 2**-40
    assert devices * upper_tail(devices - 1, missing, neighbours)[neighbours - least + 1] > 2**-20


def test_a_graph_is_counted_among_the_other_devices_of_one() -> None:
    """57 devices with 22 neighbours: among 55 others in place of 56 all 22 could be removed with more than 2^-40."""
    assert threshold_of(57, 22) == 6
    assert 57 * 56 / 2 * upper_tail(56, 17 + 5, 22)[22] <= 2**-40 < 57 * 56 / 2 * upper_tail(55, 17 + 5, 22)[22]


def test_a_graph_is_refused_for_all_pairs_of_devices_between_which_it_could_fall_apart() -> None:
    """67 devices with 24 neighbours: with a third of n (n - 1) in place of a half it would be taken."""
    removed = upper_tail(66, 20 + 6, 24)[24]
    assert 67 * 66 / 3 * removed <= 2**-40 < 67 * 66 / 2 * removed
    assert threshold_of(67, 24) == 0
    assert sum_parameters(67).neighbours == 26


@pytest.mark.parametrize(("devices", "neighbours"), [(16, 15), (17, 8), (100_000, 120)])
def test_the_smallest_and_the_largest_cohorts_have_the_least_even_degree_or_are_complete(
    devices: int, neighbours: int
) -> None:
    assert sum_parameters(devices).neighbours == neighbours
