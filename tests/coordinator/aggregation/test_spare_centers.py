"""Spare centers: empty ones become halves of the greatest, and all are merged into the wanted number."""

from __future__ import annotations

import numpy as np

from coordinator.aggregation.spare_centers import merged, refilled


def test_an_empty_center_becomes_one_half_of_the_greatest_and_the_halves_stand_on_either_side() -> None:
    start, centers = np.full(50, 1.0), np.stack([np.full(50, 3.0), np.full(50, -1.0), np.full(50, 9.0)])
    found = refilled(centers, np.array([24, 9, 0]), start, least=5, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(found[1], centers[1])
    np.testing.assert_allclose((found[0] + found[2]) / 2, centers[0])
    np.testing.assert_allclose(np.linalg.norm(found[2] - centers[0]), 0.1 * np.linalg.norm(centers[0] - start))


def test_both_halves_have_the_buffers_of_the_center_whose_scale_is_not_that_of_its_parameters() -> None:
    """A variance near zero would become negative, and the parameters would move as far as the statistics have."""
    start, centers = np.zeros(60), np.stack([np.full(60, 3.0), np.full(60, 9.0)])
    centers[0, 50:] = [*np.full(9, 1e4), 1e-9]
    some = np.arange(60) < 50
    found = refilled(centers, np.array([24, 0]), start, least=5, rng=np.random.default_rng(0), moves=some)
    np.testing.assert_array_equal(found[:, 50:], centers[[0, 0], 50:])
    np.testing.assert_allclose(np.linalg.norm(found[1] - centers[0]), 0.1 * np.linalg.norm(centers[0, :50]))


def test_no_half_may_expect_fewer_devices_than_the_gate() -> None:
    centers, counts = np.arange(12.0).reshape(4, 3), np.array([19, 0, 0, 0])
    found = refilled(centers, counts, np.zeros(3), least=5, rng=np.random.default_rng(0))
    assert [bool((a != b).any()) for a, b in zip(found, centers, strict=True)] == [True, True, False, False]


def test_halves_are_halved_again_while_each_half_expects_the_gate() -> None:
    centers = np.arange(12.0).reshape(4, 3) + 1
    for devices, changed in ((40, 4), (39, 2)):  # 20 and 20, then four of 10
        counts = np.array([devices, 0, 0, 0])
        found = refilled(centers, counts, np.zeros(3), least=10, rng=np.random.default_rng(0))
        assert (found != centers).any(axis=1).sum() == changed


def test_a_center_is_split_where_each_half_expects_exactly_the_gate() -> None:
    centers = np.arange(6.0).reshape(2, 3) + 1
    for devices, split in ((10, True), (9, False)):
        found = refilled(centers, np.array([devices, 0]), np.zeros(3), least=5, rng=np.random.default_rng(0))
        assert bool((found != centers).any()) == split


def test_centers_of_one_cluster_are_merged_by_their_devices_and_an_empty_cluster_keeps_its_spare() -> None:
    centers = np.array([[0.0, 5.0], [1.0, 7.0], [10.0, 1.0], [50.0, 50.0]])
    spare = np.full((3, 2), -1.0)
    found, counts = merged(centers, np.array([3, 1, 4, 0]), centers[:, :1], spare[:2], np.random.default_rng(0))
    assert {tuple(row): n for row, n in zip(found.tolist(), counts.tolist(), strict=True)} == {
        (0.25, 5.5): 4,
        (10.0, 1.0): 4,
    }
    found, counts = merged(centers[2:], np.array([4, 0]), centers[2:], spare, np.random.default_rng(0))
    assert sorted(counts.tolist()) == [0, 0, 4]
    assert (found == -1.0).all(axis=1).sum() == 2
