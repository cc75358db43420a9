"""FedGroup (Duan 2021): devices are grouped once by the directions of their first updates, then FedAvg per group.

    EDC_ij = cos(dw_i, v_j)      v_1..v_K the first right singular vectors of all dw_i

Cold start: 20 devices per group train from w0, and k-means clusters their rows of EDC. Groups begin at w0, as FedAvg
does. A device that comes later trains from w0 once and joins the group whose first updates' mean direction has the
greatest cosine with its own update; long updates count no more than short ones. Devices do not move afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from coordinator.clustering.cosine_kmeans import principal_cosines
from coordinator.clustering.gram import gram_matrix
from coordinator.clustering.kmeans import kmeans
from coordinator.clustering.label_matching import canonical_labels
from coordinator.strategies.base import Fleet, RequireAll, Round, State
from coordinator.strategies.common.center_tree import SplitTree, TreeOfCenters, split_leaf
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.setting_checks import RESTARTS, described, setting
from coordinator.strategies.common.updates import ClientUpdates
from edge_client.protocol.task import Fit, Flat, Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class FedGroup(TreeOfCenters):
    """K permanent groups; fewer when the cold start shows fewer."""

    clusters: int = field(default=3, kw_only=False, metadata=described("number of centers", low=1))
    per_group: int = setting(  # the paper's, like the 50 steps
        20, "devices for each group whose first updates start the groups", low=1
    )
    first_steps: int = setting(50, "steps of SGD in a device's first update, by which it is grouped", low=1)
    restarts: int = setting(20, **RESTARTS)

    def _prepare(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """The cold start, repeated until a device answers it."""
        if len(SplitTree.from_state(state).models):
            return state
        count = min(len(fleet), self.per_group * self.clusters)
        asked = sorted(sorted(fleet)[i] for i in rng.choice(len(fleet), size=count, replace=False))
        seeds = TaskSeeds.from_rng(rng)
        replies = yield RequireAll({c: self._first(state.centers[0], seeds.of(c)) for c in asked})
        updates = ClientUpdates.from_replies(replies, schema.size)
        if not updates.clients:
            return state
        points = self._points(updates.rows, state.centers[0], schema)
        edc = principal_cosines(gram_matrix(points, np.zeros(points.width, updates.rows[0].dtype)), self.clusters)
        labels = canonical_labels(kmeans(gram_matrix(edc), self.clusters, rng, restarts=self.restarts).labels)
        return split_leaf(state, 0, dict(zip(updates.clients, labels.tolist(), strict=True)), points)

    def _first(self, model: Flat, seed: int) -> Fit:
        return self.fit(start=model, seed=seed, steps=self.first_steps)
