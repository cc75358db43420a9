from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.clustering.cosine_kmeans import assign_by_cosine, principal_cosines, unit_means
from coordinator.clustering.gram import gram_matrix


@given(n=st.integers(1, 8), d=st.integers(1, 10), k=st.integers(1, 4), seed=st.integers(0, 999))
def test_the_cosines_are_those_to_numpys_singular_vectors(n: int, d: int, k: int, seed: int) -> None:
    points = np.random.default_rng(seed).standard_normal((n, d))
    found = principal_cosines(gram_matrix(points, np.zeros(d)), k)
    _, _, vectors = np.linalg.svd(points, full_matrices=False)
    length = np.linalg.norm(points, axis=1)[:, None]
    expected = np.abs(points @ vectors[:k].T / length)  # the sign of a singular vector is free
    assert found.shape == (n, k)
    np.testing.assert_allclose(np.abs(found[:, : len(vectors)]), expected, atol=1e-6)
    np.testing.assert_allclose(found[:, len(vectors) :], 0.0, atol=1e-6)


def test_means_count_directions_not_lengths_and_are_found_again() -> None:
    points = np.array([[1.0, 0.0], [100.0, 0.0], [0.0, -2.0], [0.0, 0.0]], np.float32)
    means = unit_means(points, np.array([0, 0, 2, 2]), 3)
    assert means.dtype == np.float32
    np.testing.assert_allclose(means, [[1, 0], [0, 0], [0, -1]])
    assert assign_by_cosine(np.array([[5.0, 1.0], [1.0, -5.0]]), means).tolist() == [0, 2]
