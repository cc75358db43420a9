from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import silhouette_score

from coordinator.clustering.gram import gram_matrix, squared_distances
from coordinator.clustering.silhouette import silhouette


@settings(max_examples=40)
@given(n=st.integers(4, 20), k=st.integers(2, 4), seed=st.integers(0, 999))
def test_the_silhouette_is_scikit_learns(n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, labels = rng.standard_normal((n, 3)), rng.integers(k, size=n)
    distances = np.sqrt(squared_distances(gram_matrix(points), np.arange(n), np.arange(n)))
    np.fill_diagonal(distances, 0.0)
    if 1 < len(set(labels.tolist())) < n:
        expected = silhouette_score(distances, labels, metric="precomputed")
        assert silhouette(distances, labels) == pytest.approx(float(expected))


def test_a_single_cluster_and_points_all_alone_have_no_silhouette() -> None:
    distances = np.ones((3, 3)) - np.eye(3)
    assert silhouette(distances, np.zeros(3, np.int64)) == 0.0
    assert silhouette(distances, np.arange(3)) == 0.0
    assert silhouette(np.zeros((4, 4)), np.array([0, 0, 1, 1])) == 0.0
