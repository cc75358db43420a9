from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.clustering import trimmed_kmeans as trimmed
from coordinator.clustering.gram import gram_matrix
from coordinator.clustering.kmeans import kmeans
from coordinator.clustering.trimmed_kmeans import trimmed_kmeans
from coordinator.rounds.metrics import ari


@settings(max_examples=40)
@given(n=st.integers(1, 25), k=st.integers(1, 5), seed=st.integers(0, 9_999), warm=st.booleans())
def test_without_trimming_it_is_k_means_draw_for_draw(n: int, k: int, seed: int, warm: bool) -> None:  # noqa: FBT001
    rng = np.random.default_rng(seed)
    matrix, init = gram_matrix(rng.standard_normal((n, 3))), rng.integers(k, size=n) if warm else None
    plain = kmeans(matrix, k, np.random.default_rng(seed), restarts=3, init=init)
    found = trimmed_kmeans(matrix, k, np.random.default_rng(seed), trim=0.0, restarts=3, init=init)
    assert found.labels.tolist() == plain.labels.tolist()
    assert found.objective == plain.objective
    assert found.kept.all()


@settings(max_examples=40)
@given(n=st.integers(4, 25), k=st.integers(1, 4), percent=st.integers(0, 45), seed=st.integers(0, 9_999))
@example(n=100, k=2, percent=29, seed=0)  # 0.29 * 100 is below 29
def test_as_many_as_asked_are_trimmed_and_none_of_them_is_nearer_than_a_kept_one(
    n: int, k: int, percent: int, seed: int
) -> None:
    trim = percent / 100
    points = np.random.default_rng(seed).standard_normal((n, 3))
    found = trimmed_kmeans(gram_matrix(points), k, np.random.default_rng(seed), trim=trim, restarts=4)
    assert (~found.kept).sum() == percent * n // 100
    used = [j for j in range(k) if (found.kept & (found.labels == j)).any()]
    centers = np.stack([points[found.kept & (found.labels == j)].mean(axis=0) for j in used])
    d2 = ((points[:, None] - centers) ** 2).sum(axis=2)
    assert d2[found.kept].min(axis=1).sum() == pytest.approx(found.objective, abs=1e-9)
    assert [used[j] for j in d2.argmin(axis=1)] == found.labels.tolist()
    if not found.kept.all():
        assert d2[~found.kept].min() >= d2[found.kept].min(axis=1).max() - 1e-9


@pytest.mark.parametrize("together", [True, False])
def test_far_outliers_take_no_center_from_the_groups(together: bool) -> None:  # noqa: FBT001
    rng = np.random.default_rng(0)
    truth = np.arange(24) % 3
    good = 5.0 * rng.standard_normal((3, 6))[truth] + 0.5 * rng.standard_normal((24, 6))
    bad = 300.0 * rng.standard_normal((1 if together else 6, 6)) + 0.5 * rng.standard_normal((6, 6))
    points = np.concatenate([good, bad])
    matrix = gram_matrix(points)
    found = trimmed_kmeans(matrix, 3, np.random.default_rng(1), trim=0.2)
    assert found.kept.tolist() == [True] * 24 + [False] * 6
    assert ari(truth.tolist(), found.labels[:24].tolist()) == 1.0
    plain = kmeans(matrix, 3, np.random.default_rng(1))
    assert ari(truth.tolist(), plain.labels[:24].tolist()) < 0.6


def test_who_is_trimmed_when_the_sweeps_run_out_is_of_a_cluster_that_still_has_a_kept_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trimmed, "MAX_LLOYD_SWEEPS", 1)
    points = np.array([[3.0], [3.0], [1.0], [1.0], [2.0], [1.0], [2.0], [0.0], [3.0], [3.0]])
    found = trimmed_kmeans(gram_matrix(points), 4, np.random.default_rng(3064), trim=0.45, restarts=1)
    assert points[~found.kept].ravel().tolist() == [1.0, 1.0, 1.0, 0.0]  # a cluster of their own, of whom none is kept
    assert set(found.labels[~found.kept]) <= set(found.labels[found.kept])


@pytest.mark.parametrize("wrong", [{"k": 0}, {"trim": 0.5}, {"trim": -0.1}, {"restarts": 0}])
def test_what_cannot_be_clustered_is_refused(wrong: dict[str, float]) -> None:
    asked = {"k": 1, "trim": 0.1, "restarts": 1, **wrong}
    with pytest.raises(ValueError, match="need"):
        trimmed_kmeans(np.eye(2), rng=np.random.default_rng(0), **asked)  # type: ignore[arg-type]
