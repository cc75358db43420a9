"""Robust(TKM) (Ghosh, Hong, Yin and Ramchandran 2019): trimmed k-means on the updates, a robust mean in each cluster.

The share `trim_clusters` of the devices, those farthest from every centroid, counts for no center in this round and is
served the nearest center. In a cluster, the `trim_updates` least and as many greatest values of each coordinate are cut
off before the mean (Yin 2018), or another robust reduce is taken. Devices count equally, since a device's number of
samples is only its own claim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.aggregation.robust import REDUCER_NAMES
from coordinator.clustering.trimmed_kmeans import trimmed_kmeans
from coordinator.strategies.common.server_options import ServerOptions
from coordinator.strategies.common.setting_checks import check_choice, setting
from coordinator.strategies.fesem import Clusters, FeSEM
from edge_client.protocol.task import F64, I64

TRIMMED_MEAN = ServerOptions(reduce="trimmed-mean")


@dataclass(frozen=True, kw_only=True, repr=False)
class TKM(FeSEM):
    """FeSEM for fleets with devices that fail or lie. Without trimming it is FeSEM(lam=0, e_step="k-means")."""

    lam: float = 0.0
    e_step: str = "k-means"
    weights: str = setting("equal", '"equal" devices, and no others', choices=("equal",))
    trim_clusters: float = setting(
        0.05, "share of the devices, farthest from all centers, that counts for none", low=0.0, high=0.49
    )
    server: ServerOptions = TRIMMED_MEAN

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("reduce", self.server.reduce, REDUCER_NAMES[1:])

    def _cluster(self, matrix: F64, a: F64, rng: np.random.Generator, init: I64 | None) -> Clusters:  # noqa: ARG002
        found = trimmed_kmeans(matrix, self.clusters, rng, trim=self.trim_clusters, restarts=self.restarts, init=init)
        return found.labels, found.kept
