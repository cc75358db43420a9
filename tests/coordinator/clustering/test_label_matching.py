from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from coordinator.clustering.label_matching import canonical_labels, match_labels


@given(old=st.integers(1, 5), new=st.integers(1, 5), seed=st.integers(0, 999))
def test_the_matching_has_the_least_total_distance(old: int, new: int, seed: int) -> None:
    distances = np.random.default_rng(seed).random((old, new))
    if new > old:
        with pytest.raises(ValueError, match="old clusters"):
            match_labels(distances)
        return
    found = match_labels(distances)
    best = min(distances[list(p), range(new)].sum() for p in itertools.permutations(range(old), new))
    assert len(set(found.tolist())) == new
    assert distances[found, range(new)].sum() == pytest.approx(best)


def test_a_shuffled_clustering_gets_its_old_names_back() -> None:
    centers = np.array([[0.0], [5.0], [9.0]])
    order = np.array([2, 0, 1])
    assert (match_labels((centers - centers[order].T) ** 2) == order).all()


@given(old=st.integers(1, 5), new=st.integers(1, 5), seed=st.integers(0, 999))
def test_the_matching_is_scipys_with_equal_distances_too(old: int, new: int, seed: int) -> None:
    distances = np.random.default_rng(seed).integers(0, 6, (max(old, new), new)).astype(np.float64)
    theirs = linear_sum_assignment(distances.T)[1]
    assert match_labels(distances).tolist() == theirs.tolist()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.permutations(range(5)))
def test_canonical_labels_depend_on_the_partition_only(labels: list[int], names: list[int]) -> None:
    first = canonical_labels(np.array(labels))
    assert (first == canonical_labels(np.array(names)[labels])).all()
    assert first[0] == 0
    assert all(first[i] <= max(first[:i]) + 1 for i in range(1, len(first)))
