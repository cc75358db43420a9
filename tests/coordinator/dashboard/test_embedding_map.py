"""The map of a fleet: right where it can be checked, the same whatever is pressed together, and never upside down."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from coordinator.dashboard import embedding_map as surveys
from coordinator.dashboard.embedding_map import EmbeddingMap, make_embedding_map, principal_axes
from edge_client.protocol.task import Array


def fleet(n: int, width: int, *, clusters: int = 3, seed: int = 0) -> tuple[Array, Array, dict[str, int]]:
    """Models [n, width] about centers [clusters, width], and who belongs where."""
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((clusters, width)).astype(np.float32)
    models = centers[np.arange(n) % clusters] + 0.1 * rng.standard_normal((n, width)).astype(np.float32)
    return models, centers, {f"d{i}": i % clusters for i in range(n)}


def surveyed(
    models: Array, centers: Array, assignment: dict[str, int], before: EmbeddingMap | None = None
) -> EmbeddingMap:
    named = ((f"d{i}", model) for i, model in enumerate(models))
    return make_embedding_map(named, centers, assignment, count=len(models), before=before)


def test_the_axes_are_the_principal_components() -> None:
    from sklearn.decomposition import PCA

    models, *_ = fleet(30, 50)
    rows = (models - models.mean(axis=0)).astype(np.float32)
    axes, shares = principal_axes(rows)
    known = PCA(n_components=2, svd_solver="full").fit(models.astype(np.float64))
    assert np.abs((axes.T @ known.components_.T)[[0, 1], [0, 1]]) == pytest.approx([1, 1], abs=1e-4)  # float32
    assert shares == pytest.approx(tuple(known.explained_variance_ratio_), abs=1e-5)


def test_a_crowd_has_the_same_axes_without_a_gram_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    models, *_ = fleet(60, 50)
    rows = (models - models.mean(axis=0)).astype(np.float32)
    exact, shares = principal_axes(rows)
    monkeypatch.setattr(surveys, "GRAM_MAX_DEVICES", 5)
    axes, again = principal_axes(rows)
    assert np.abs(np.diag(exact.T @ axes)) == pytest.approx([1, 1], abs=1e-4)
    assert again == pytest.approx(shares, abs=1e-5)


@pytest.mark.parametrize("most", [10, 512])
def test_a_map_takes_the_memory_of_its_sketches(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took six times as much: float64 copies of all of them, to square them."""
    monkeypatch.setattr(surveys, "GRAM_MAX_DEVICES", most)
    models, centers, assignment = fleet(120, 40_000)
    tracemalloc.start()
    try:
        surveyed(models, centers, assignment)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.3 * models.nbytes * surveys.MAX_SKETCH_SIZE / 40_000 + 4e6


def test_distances_and_cosines_are_exact_and_clusters_lie_apart() -> None:
    models, centers, assignment = fleet(12, 400)
    found = surveyed(models, centers, assignment)
    expected = np.linalg.norm(models[:, None] - centers[None], axis=2)
    assert found.distances == pytest.approx(expected, rel=1e-5)
    assert found.distance("d4") == pytest.approx(expected[4], abs=1e-5)
    assert found.distance("stranger") is None
    unit = centers / np.linalg.norm(centers, axis=1, keepdims=True)
    assert found.cosines == pytest.approx(unit @ unit.T, abs=1e-6)
    assert found.silhouette is not None
    assert found.silhouette > 0.8
    assert dict(zip(found.devices, found.assigned, strict=True)) == assignment


def test_pressed_models_give_nearly_the_same_map(monkeypatch: pytest.MonkeyPatch) -> None:
    models, centers, assignment = fleet(24, 3_000)
    exact = surveyed(models, centers, assignment)
    monkeypatch.setattr(surveys, "MAX_SKETCH_SIZE", 512)
    pressed = surveyed(models, centers, assignment, before=exact)
    reach = np.abs(exact.device_positions).max()
    # an inner product of s signs is off by about 1 / sqrt(s) of the lengths: 4 % here, and half as much on average
    assert np.abs(pressed.device_positions - exact.device_positions).max() < 0.15 * reach
    assert pressed.distances == pytest.approx(exact.distances)


def test_a_map_is_turned_to_lie_on_the_one_before() -> None:
    models, centers, assignment = fleet(12, 40)
    first = surveyed(models, centers, assignment)
    mirror = np.diag([1.0, -1.0])
    turned = EmbeddingMap(
        devices=first.devices,
        assigned=first.assigned,
        device_positions=first.device_positions @ mirror,
        center_positions=first.center_positions @ mirror,
        distances=first.distances,
        cosines=first.cosines,
        silhouette=None,
        shares=first.shares,
    )
    again = surveyed(models, centers, assignment, before=turned)
    assert again.device_positions == pytest.approx(turned.device_positions, abs=1e-5)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_fleet_of_hardly_anybody_has_a_map_too(count: int) -> None:
    models, centers, assignment = fleet(count, 20, clusters=1)
    found = surveyed(models, centers, assignment)
    assert found.device_positions.shape == (count, 2)
    assert np.isfinite(found.device_positions).all()
    assert found.silhouette is None
    told = found.to_json()
    assert len(told["xy"]) == len(told["assigned"]) == count
    assert told["cosine"] == [[1.0]]


def test_devices_that_all_sent_the_same_lie_in_one_place() -> None:
    same = np.ones((5, 30), np.float32)
    found = surveyed(same, same[:1], {})
    assert not found.device_positions.any()
    assert found.shares == (0.0, 0.0)
