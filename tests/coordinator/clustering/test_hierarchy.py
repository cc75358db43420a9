from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import AgglomerativeClustering

from coordinator.clustering.gram import gram_matrix
from coordinator.clustering.hierarchy import LINKAGES, METRICS, agglomerative, bipartition, condensed_distances, cosines
from coordinator.rounds.metrics import ari


def zero_gram(points: np.ndarray) -> np.ndarray:
    return gram_matrix(points, np.zeros_like(points[0]))


@given(n=st.integers(2, 7), seed=st.integers(0, 9_999))
def test_no_bipartition_has_a_smaller_greatest_cosine_between_its_sides(n: int, seed: int) -> None:
    cosine = cosines(zero_gram(np.random.default_rng(seed).standard_normal((n, 3))))
    sides, cross = bipartition(cosine)
    every = (np.array(s) for s in itertools.product([0, 1], repeat=n) if 0 < sum(s) < n)
    assert cross == pytest.approx(min(cosine[np.ix_(s == 0, s == 1)].max() for s in every))
    assert cross == cosine[np.ix_(sides == 0, sides == 1)].max()
    assert sides[0] == 0


def test_opposite_groups_are_the_two_sides_for_either_linkage() -> None:
    rng = np.random.default_rng(0)
    truth = np.array([0, 1, 1, 0, 1, 0])
    points = np.where(truth, -1.0, 1.0)[:, None] * rng.standard_normal(20) + 0.3 * rng.standard_normal((6, 20))
    for linkage in ("single", "complete"):
        sides, cross = bipartition(cosines(zero_gram(points)), linkage)
        assert sides.tolist() == truth.tolist()
        assert cross < 0


def test_equal_cosines_still_make_two_sides() -> None:
    sides, cross = bipartition(np.ones((4, 4)))
    assert set(sides.tolist()) == {0, 1}
    assert cross == 1.0


def test_a_point_at_zero_has_no_direction() -> None:
    cosine = cosines(zero_gram(np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])))
    np.testing.assert_allclose(cosine, [[1, 0, 0, 0], [0, 1, 0, -1], [0, 0, 1, 0], [0, -1, 0, 1]])


@pytest.mark.parametrize(
    ("metric", "linkage"), [(m, link) for m in METRICS for link in LINKAGES if link != "ward" or m == "l2"]
)
def test_it_is_scikit_learns_agglomerative_clustering(metric: str, linkage: str) -> None:
    points = np.random.default_rng(3).standard_normal((25, 4))
    theirs, threshold = {"cosine": ("cosine", 0.6), "l2": ("euclidean", 2.0), "l1": ("manhattan", 3.0)}[metric]
    model = AgglomerativeClustering(None, metric=theirs, linkage=linkage, distance_threshold=threshold)
    expected = model.fit_predict(points)
    found = agglomerative(condensed_distances([points], metric), linkage=linkage, threshold=threshold)
    assert ari(expected.tolist(), found.tolist()) == 1.0


@pytest.mark.parametrize("metric", METRICS)
def test_an_endless_threshold_is_one_cluster_and_none_is_everybody_alone(metric: str) -> None:
    points = np.random.default_rng(1).standard_normal((6, 3))
    for threshold, clusters in ((np.inf, 1), (0.0, 6)):
        found = agglomerative(condensed_distances([points], metric), linkage="average", threshold=threshold)
        assert found.max() + 1 == clusters
    assert agglomerative(condensed_distances([points[:1]], metric), linkage="average", threshold=0.0).tolist() == [0]
    still = agglomerative(condensed_distances([np.zeros((2, 3))], metric), linkage="average", threshold=1.0)
    assert still.tolist() == [0, 0]
