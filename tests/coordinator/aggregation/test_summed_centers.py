"""Centers and k-means from the words of a sum: what the words say, and nothing where no device or no weight is."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.aggregation.summed_centers import centers_of_sums, cluster_sums
from edge_client.protocol.summed_task import SumScale

SCALE = SumScale(bits=32, devices=4, clip=2.0)
CENTERS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


@pytest.mark.parametrize(
    ("weight", "devices", "moves"), [(4, 2, True), (4, 0, False), (0, 2, False), (-4, 2, False), (-4, -2, False)]
)
def test_a_center_moves_where_devices_with_a_weight_are_in_its_sum(weight: int, devices: int, moves: bool) -> None:  # noqa: FBT001 - a row
    words = SCALE.modulo(np.array([2, -6, weight, devices]))
    moved, counts = centers_of_sums(CENTERS, words, SCALE, [1], step=0.5)
    assert counts.tolist() == [0, devices, 0]
    np.testing.assert_array_equal(moved[[0, 2]], CENTERS[[0, 2]])
    # half of the way: clip 2, the mean of the words 2 / 4 and -6 / 4
    np.testing.assert_array_equal(moved[1], CENTERS[1] + 0.5 * 2 * np.array([0.5, -1.5]) if moves else CENTERS[1])


def test_each_block_is_of_the_center_that_it_was_asked_for() -> None:
    words = SCALE.modulo(np.array([[2, 2, 1, 1], [4, 4, 2, 1]]).ravel())
    moved, counts = centers_of_sums(CENTERS, words, SCALE, [2, 0])
    assert counts.tolist() == [1, 0, 1]
    assert moved.tolist() == [[5.0, 6.0], [3.0, 4.0], [9.0, 10.0]]


def test_the_words_of_k_means_are_shifts_squares_and_counts_of_each_cluster() -> None:
    levels = SCALE.levels
    words = SCALE.modulo(np.array([levels, -levels, 2 * levels, 3, 0, 0, 0, 0]))
    sums = cluster_sums((1, 2, 2), words, SCALE)
    np.testing.assert_allclose(sums.shifts, [[[2.0, -2.0], [0.0, 0.0]]])
    np.testing.assert_allclose(sums.squares, [[8.0, 0.0]])
    assert sums.counts.tolist() == [[3.0, 0.0]]
