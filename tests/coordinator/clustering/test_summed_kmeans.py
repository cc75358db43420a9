"""k-means over the devices' own words: sums of whole numbers by cluster, with the gate of five devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.aggregation.summed_centers import cluster_sums
from coordinator.clustering.gram import gram_matrix
from coordinator.clustering.kmeans import kmeans
from coordinator.clustering.summed_kmeans import ClusterSums, settled, summed_kmeans
from coordinator.strategies.base import drive
from edge_client.protocol.summed_task import SummedFit, SumScale, Words
from edge_client.protocol.task import F64
from edge_client.training.summed import TrainedChoice, contribution

LEAST = 5
DEVICES, GROUPS, WIDTH = 100, 10, 8


def fleet_points(seed: int) -> F64:
    """[100, 8] points in ten groups of which some are close to each other."""
    rng = np.random.default_rng(seed)
    middle = rng.standard_normal((GROUPS, WIDTH))
    return middle[np.arange(DEVICES) % GROUPS] + 0.2 * rng.standard_normal((DEVICES, WIDTH))


def words_of(points: F64) -> Callable[[tuple[F64, bool]], ClusterSums]:
    """What the server gets: the sum of the words of each device, around centroids of which the small are closed."""
    scale = SumScale(bits=32, devices=len(points), clip=10.0)

    def stage(name: Literal["count", "points"], centroids: F64, is_open: NDArray[np.bool_], *, dealt: bool) -> Words:
        parts = []
        for seed, point in enumerate(points):
            whole: dict[str, Any] = {"start": point, "steps": 1, "lr": 0.1, "batch": 1, "centers": point[None]}
            how: dict[str, Any] = {
                "points": centroids,
                "points_open": is_open,
                "dealt": dealt,
                "compare": ((0, WIDTH),),
            }
            task = SummedFit(**whole, **how, stage=name, choose="nearest", open=(0,), scale=scale, seed=seed)
            reply = contribution(
                task, TrainedChoice(models=point[None], weights=np.ones(1), order=None), np.random.default_rng(0)
            )
            assert reply.words is not None
            parts.append(reply.words)
        total: Words = np.add.reduce(parts, dtype=np.uint32)
        return total

    def ask(asked: tuple[F64, bool]) -> ClusterSums:
        centroids, dealt = asked
        every = np.ones(centroids.shape[:2], dtype=np.bool_)
        counts = stage("count", centroids, every, dealt=dealt).reshape(every.shape)
        return cluster_sums(centroids.shape, stage("points", centroids, counts >= LEAST, dealt=dealt), scale)

    return ask


def distances(points: F64, centroids: F64) -> F64:
    d2: F64 = ((points[:, None] - centroids[None]) ** 2).sum(axis=2)
    return d2


def test_k_means_over_sums_is_as_good_as_k_means_that_sees_the_points() -> None:
    for seed in range(3):
        points = fleet_points(seed)
        found = drive(summed_kmeans(np.zeros(WIDTH), GROUPS, np.random.default_rng(seed)), words_of(points))
        assert found is not None
        clear = kmeans(gram_matrix(points), GROUPS, np.random.default_rng(seed)).objective
        # Lloyd's steps alone end at 1.25 to 3.5 times the clear objective on these points.
        assert distances(points, found.points[0]).min(axis=1).sum() < 1.01 * clear


def test_the_scatter_that_sums_give_is_the_sum_of_squares_around_the_new_centroids() -> None:
    points = fleet_points(0)
    centroids = points[:GROUPS][None]
    after = settled(centroids, words_of(points)((centroids, False)))
    labels = distances(points, centroids[0]).argmin(axis=1)
    for k in range(GROUPS):
        own = points[labels == k]
        if len(own) >= LEAST:
            # 1e7 levels for a square of 100: each word is off by 1e-5 at most.
            assert after.scatter[0, k] == pytest.approx(((own - own.mean(axis=0)) ** 2).sum(), abs=1e-3)
            np.testing.assert_allclose(after.points[0, k], own.mean(axis=0), atol=1e-5)


def test_a_sum_that_is_not_made_ends_the_search() -> None:
    steps = summed_kmeans(np.zeros(WIDTH), GROUPS, np.random.default_rng(0))
    next(steps)
    with pytest.raises(StopIteration) as done:
        steps.send(None)
    assert done.value.value is None
