"""Robust(TKM) (Ghosh, Hong, Yin and Ramchandran 2019): trimmed k-means on the updates, a robust mean in each cluster.

A share `trim_clusters` of the devices, those far from everybody, counts for no center in this round; they are served
the center nearest to them. In a cluster, each coordinate's `trim_updates` least and as many greatest values are cut off
before the mean, or its median is taken (Yin 2018). Nobody counts by samples, which are what a device says of itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.aggregate import aggregate, reducer
from coordinator.clustering.trimmed import trimmed_kmeans
from coordinator.strategies.fesem import F64, I64, Clusters, FeSEM
from coordinator.strategies.parts import Updates, check, one_of
from edge_client.protocol.task import Array, Schema


@dataclass(frozen=True, kw_only=True)
class TKM(FeSEM):
    """FeSEM for fleets with devices that fail or lie. Without trimming it is FeSEM(lam=0, e_step="k-means")."""

    lam: float = 0.0
    e_step: str = "k-means"
    trim_clusters: float = 0.05
    trim_updates: float = 0.2
    reduce: str = "trimmed-mean"

    def __post_init__(self) -> None:
        """Refuse settings that cannot work for any fleet."""
        super().__post_init__()
        one_of("weights", self.weights, ("equal",))
        one_of("reduce", self.reduce, ("trimmed-mean", "median"))
        check("trim-clusters", self.trim_clusters, least=0.0, most=0.49)
        check("trim-updates", self.trim_updates, least=0.0, most=0.49)

    def _cluster(self, matrix: F64, a: F64, rng: np.random.Generator, init: I64 | None) -> Clusters:  # noqa: ARG002
        found = trimmed_kmeans(matrix, self.clusters, rng, trim=self.trim_clusters, restarts=self.restarts, init=init)
        return found.labels, found.kept

    def _m_step(self, centers: Array, updates: Updates, R: F64, a: F64, schema: Schema) -> Array:
        robust = reducer(self.reduce, trim=self.trim_updates)
        return aggregate(centers, updates.rows, R, a, reduce=robust, n_params=schema.n_params, n=updates.n)
