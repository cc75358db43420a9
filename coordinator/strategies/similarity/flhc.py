"""FL+HC (Briggs, Fan and Andras 2020): FedAvg, one hierarchical clustering of all updates, then FedAvg per cluster.

After `warm_up` rounds the whole fleet is asked once. Clusters are joined bottom-up while their distance is at most
`threshold`; scipy's distance of two clusters for linkage "ward" is sqrt(2 n m / (n + m)) times that of their means.
Devices do not move afterwards. A device that was away then trains once from that round's model and joins the cluster
whose updates' mean direction has the greatest cosine with its own update; long updates count no more than short ones.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from coordinator.aggregation.centers import COLUMN_BLOCK
from coordinator.aggregation.rows import column_blocks
from coordinator.clustering.hierarchy import LINKAGES, METRICS, agglomerative, condensed_distances
from coordinator.strategies.base import State
from coordinator.strategies.common.center_tree import TreeOfCenters, split_leaf
from coordinator.strategies.common.setting_checks import WARM_UP, setting
from coordinator.strategies.common.updates import ClientUpdates
from edge_client.errors import ConfigError
from edge_client.protocol.task import ClientId, Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class FLHC(TreeOfCenters):
    """The number of clusters follows from the threshold; above the greatest distance it is FedAvg."""

    warm_up: int = setting(3, **WARM_UP)  # few for short runs; 10 to 20 are usual
    metric: str = setting("cosine", 'distance of two updates: "cosine", "l2" or "l1"', choices=tuple(METRICS))
    linkage: str = setting(
        "average",
        'how clusters are joined: "single", "complete", "average", or "ward" with the metric l2',
        choices=LINKAGES,
    )
    threshold: float = setting(  # of the cosine distance: clusters whose updates point apart on average stay apart
        1.0, "distance above which clusters are not joined", low=0.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linkage == "ward" and self.metric != "l2":
            raise ConfigError(f"linkage ward with metric {self.metric}", hint="ward needs metric l2")

    def _needs_whole_fleet(self, state: State) -> bool:
        return _rounds(state) == self.warm_up

    def _grow(self, state: State, schema: Schema, updates: ClientUpdates, expected: Collection[ClientId]) -> State:  # noqa: ARG002
        before = _rounds(state)
        out = replace(state, extra={**state.extra, "round": np.array([before + 1])})
        if before != self.warm_up:
            return out
        points = self._points(updates.rows, state.centers[0], schema)
        read, blocks = points.by_columns(), column_blocks(0, points.width, len(points), COLUMN_BLOCK)
        labels = agglomerative(
            condensed_distances(map(read, blocks), self.metric), linkage=self.linkage, threshold=self.threshold
        )
        sides = dict(zip(updates.clients, labels.tolist(), strict=True))
        return split_leaf(out, 0, sides, points) if labels.max() > 0 else out


def _rounds(state: State) -> int:
    return int(state.extra.get("round", np.zeros(1))[0])
