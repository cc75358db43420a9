from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.clustering.gram import GramMatrix, gram_matrix, squared_distances
from coordinator.clustering.numpy_backend import COLUMN_BLOCK
from edge_client.errors import ConfigError


@given(n=st.integers(1, 8), d=st.sampled_from([1, 3, COLUMN_BLOCK - 1, COLUMN_BLOCK + 5]), seed=st.integers(0, 99))
def test_it_is_the_direct_product_of_the_differences(n: int, d: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, pivot = rng.standard_normal((n, d)), rng.standard_normal(d)
    direct = (points - pivot) @ (points - pivot).T
    matrix = gram_matrix(points, pivot)
    np.testing.assert_allclose(matrix, direct, atol=1e-9 * d)
    assert (matrix == matrix.T).all()


def test_rows_may_arrive_one_by_one() -> None:
    rng = np.random.default_rng(0)
    points = rng.standard_normal((4, 7))
    grown = GramMatrix(np.zeros(7), capacity=4)
    for i, point in enumerate(points):
        assert grown.add(point) == i
        np.testing.assert_allclose(grown.matrix, points[: i + 1] @ points[: i + 1].T, atol=1e-12)
    with pytest.raises(ValueError, match="room"):
        grown.add(points[0])


def test_distances_do_not_depend_on_the_pivot_and_are_never_negative() -> None:
    points = np.random.default_rng(1).standard_normal((6, 20))
    points[1] = points[0]
    every = np.arange(6)
    direct = ((points[:, None] - points[None]) ** 2).sum(axis=2)
    for pivot in (None, np.zeros(20), points[2]):
        distance = squared_distances(gram_matrix(points, pivot), every, every)
        np.testing.assert_allclose(distance, direct, atol=1e-12)
        assert (distance >= 0).all()


def test_small_differences_of_large_float32_weights_survive() -> None:
    rng = np.random.default_rng(2)
    base = 8.5 / np.sqrt(10_000) * rng.standard_normal(10_000)
    points = (base + 5e-5 * rng.standard_normal((5, 10_000))).astype(np.float32)
    every = np.arange(5)
    exact = ((points[:, None].astype(np.float64) - points[None]) ** 2).sum(axis=2)
    distance = squared_distances(gram_matrix(points), every, every)
    away = ~np.eye(5, dtype=bool)
    # Float32 products of small differences are good to 1e-5; of the raw weights they would be wrong by far more.
    np.testing.assert_allclose(distance[away], exact[away], rtol=1e-5)


@pytest.mark.parametrize("length", [1e-1, 1e-2, 1e-3, 1e-4])
def test_updates_of_norm_1e_4_around_weights_of_norm_10_keep_their_distances(length: float) -> None:
    rng, n, d, every = np.random.default_rng(3), 20, 29_034, np.arange(20)
    center, updates = rng.standard_normal(d), rng.standard_normal((n, d))
    sent = (10 / np.linalg.norm(center) * center).astype(np.float32)
    updates *= length / np.linalg.norm(updates, axis=1, keepdims=True)
    points = (sent + updates).astype(np.float32)
    away = (points.astype(np.float64) - sent).astype(np.float64)
    exact = squared_distances(away @ away.T, every, every)
    apart = ~np.eye(n, dtype=bool)
    distance = squared_distances(gram_matrix(points, sent), every, every)
    # The differences to the pivot are exact; what is lost are digits of their float32 products: 1e-7 was seen.
    np.testing.assert_allclose(distance[apart], exact[apart], rtol=2e-6)
    raw = squared_distances((points @ points.T).astype(np.float64), every, every)
    assert np.abs(raw[apart] / exact[apart] - 1).max() > 100 * 2e-6  # what the pivot is for


def test_a_fleet_for_whose_matrix_this_machine_has_no_memory_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"compare 10,000,000 models with each other takes 800000 GB") as refused:
        GramMatrix(np.zeros(3), 10_000_000)
    assert "fraction-train" in str(refused.value.hint)
