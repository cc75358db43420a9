"""Both backends promise the same: products of points and of a matrix."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.clustering import host_fallback
from coordinator.clustering.backend import Backend, default_device, select_backend
from coordinator.clustering.gram import GramMatrix, gram_matrix
from coordinator.clustering.host_fallback import HostFallback
from coordinator.clustering.kmeans import kmeans
from coordinator.clustering.numpy_backend import COLUMN_BLOCK, TILE_ROWS
from coordinator.clustering.torch_backend import TorchBackend, TorchPoints, TorchProducts

DEVICES = ["cpu", "torch-cpu", "full-gpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def where(request: pytest.FixtureRequest) -> Backend:
    if request.param == "full-gpu":
        return full_gpu(request.getfixturevalue("monkeypatch"))
    return select_backend(request.param)


def full_gpu(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A GPU whose memory ends at every third operation; what is stored before is copied to the host."""
    count = itertools.count(1)

    def limited(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - an operation of the backend
            if not next(count) % 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return operation(*args, **options)

        return run

    for owner, names in (
        (TorchBackend, ("points", "products")),
        (TorchPoints, ("put", "grow", "inner_products")),
        (TorchProducts, ("rows", "multiply")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, limited(getattr(owner, name)))
    return HostFallback(TorchBackend("cpu"))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("n", "d"), [(1, 1), (2, 3), (TILE_ROWS, 5), (TILE_ROWS + 1, COLUMN_BLOCK), (3 * TILE_ROWS - 1, COLUMN_BLOCK + 7)]
)
def test_the_gram_matrix_is_the_exact_one(where: Backend, dtype: type[np.floating[Any]], n: int, d: int) -> None:
    rng = np.random.default_rng(0)
    points, pivot = rng.standard_normal((n, d)).astype(dtype), rng.standard_normal(d).astype(dtype)
    away = (points - pivot).astype(np.float64)
    # Sums of 2,048 float32 products are good to about 1e-6 of the lengths; of float64 ones to 1e-14.
    close = 2e-6 if dtype is np.float32 else 1e-13
    np.testing.assert_allclose(gram_matrix(points, pivot, where=where), away @ away.T, rtol=0, atol=close * 2 * (d + 9))


def test_products_are_numpys_to_1e_9(where: Backend) -> None:
    rng = np.random.default_rng(1)
    half = rng.standard_normal((20, 20))
    matrix, left, index = half + half.T, rng.standard_normal((7, 20)), rng.integers(20, size=5)
    held = where.products(matrix)
    np.testing.assert_allclose(held.rows(index), matrix[index], atol=1e-9)
    np.testing.assert_allclose(held.multiply(left), left @ matrix, atol=1e-9)
    np.testing.assert_allclose(held.multiply(left[:, :5], index), left[:, :5] @ matrix[index], atol=1e-9)


def test_k_means_is_the_same_clustering_everywhere(where: Backend) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        points, a = rng.standard_normal((60, 5)), rng.random(60) + 0.1
        here = kmeans(gram_matrix(points), 4, np.random.default_rng(seed), weights=a, where=select_backend("cpu"))
        there = kmeans(gram_matrix(points, where=where), 4, np.random.default_rng(seed), weights=a, where=where)
        assert there.labels.tolist() == here.labels.tolist()
        assert there.objective == pytest.approx(here.objective, rel=1e-9)


def test_room_can_be_made_and_what_was_there_stays(where: Backend) -> None:
    points = np.random.default_rng(2).standard_normal((40, 9))
    grown = GramMatrix(np.zeros(9), 3, where=where)
    for point in points:
        if grown.n == grown.capacity:
            grown.grow(2 * grown.n)
        grown.add(point)
    np.testing.assert_allclose(grown.matrix, points @ points.T, atol=1e-12)


@settings(max_examples=30)
@given(
    n=st.integers(2, 3 * TILE_ROWS),
    d=st.sampled_from([1, 10, 650, COLUMN_BLOCK + 362]),
    looks=st.sets(st.integers(0, 3 * TILE_ROWS)),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_who_came_when_and_when_somebody_looked_changes_no_bit(
    n: int, d: int, looks: set[int], order: object, dtype: type[np.floating[Any]]
) -> None:
    points = np.random.default_rng(n).standard_normal((n, d)).astype(dtype)
    coming = list(range(n))
    order.shuffle(coming)  # type: ignore[attr-defined]
    grown = GramMatrix(np.zeros(d, dtype), n + 5, where=select_backend("cpu"))
    for count, i in enumerate(coming):
        grown.add(points[i])
        if count in looks:
            assert grown.matrix.shape == (count + 1, count + 1)
    found = grown.submatrix(np.argsort(coming))
    placed = GramMatrix(np.zeros(d, dtype), n, where=select_backend("cpu"))
    for i in coming:
        assert placed.add(points[i], at=i) == i
    np.testing.assert_array_equal(placed.submatrix(np.arange(n)), found)
    np.testing.assert_array_equal(found, gram_matrix(points, np.zeros(d, dtype), where=select_backend("cpu")))
    assert (found == found.T).all()


def test_the_choice_of_a_device_is_the_same_all_along() -> None:
    assert default_device() == default_device() == ("cuda" if torch.cuda.is_available() else "cpu")


def test_what_is_stored_when_the_memory_ends_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host_fallback._tell_once.cache_clear()
    points = np.random.default_rng(3).standard_normal((12, 4))
    held = full_gpu(monkeypatch).points(6, 4, points.dtype)
    for i in range(6):
        held.put(i, points[i])
    held.grow(12)
    for i in range(6, 12):
        held.put(i, points[i])
    np.testing.assert_allclose(held.inner_products(0, 12), points @ points.T, atol=1e-12)
    assert caplog.messages == ["the GPU has no memory for the clustering: the host does it"]


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(KeyError):
        select_backend("tpu")
