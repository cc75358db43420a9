"""CLoVE (Bhatia, Papadis, Kodialam, Lakshman, Chakrabarty, ICML 2026): devices are grouped by their losses.

    l_i = (f_i(c_1), ..., f_i(c_K))                                 on all local training samples, inference mode
    groups of devices = k-means on the vectors l_i of the cohort
    group g trains center m(g), m one to one:   min_m sum_g sum_{i in g} l_i[m(g)]
    c_k <- sum_{m(g(i)) = k} n_i w_i / sum_{m(g(i)) = k} n_i

It is IFCA with another choice: where one center fits all devices best at first, IFCA gives it all of them, and here
they still come apart. The least loss, and the group that a device is in, may be of different centers.

A vector of losses is a device's word, and k-means gives a far point a group of its own, which takes a center from the
others. So losses count up to a bound h only, and as gaps to it, which are shortened to a common length:

    g_i = max(h - l_i, 0),    l_i <- h - g_i min(1, r / ||g_i||)

h and r are quantiles `cap` of the devices' greatest losses and of the lengths ||g_i||. At most a share 1 - `cap` of the
devices is changed by either, whatever K is; 1.0 changes none, as in the paper. Its authors stop grouping when no device
has moved for three rounds; here each round groups anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.clustering.kmeans import kmeans
from coordinator.clustering.label_matching import match_labels
from coordinator.strategies.base import Fleet, Replies
from coordinator.strategies.common.assignment import capped_losses, told_losses
from coordinator.strategies.common.setting_checks import RESTARTS, setting
from coordinator.strategies.ifca import IFCA
from coordinator.strategies.plans.asynchronous_plan import AsynchronousPlan, whole_rounds
from coordinator.strategies.plans.sum_plan import SumPlan, single_updates
from edge_client.protocol.task import ClientId


@dataclass(frozen=True, kw_only=True, repr=False)
class CLoVE(IFCA):
    """`clusters` models for the fleet; devices with alike losses at all of them train the same one."""

    weights: str = "samples"
    start: str = "redraw"
    restarts: int = setting(20, **RESTARTS)
    cap: float = setting(  # the quantile of the devices beyond which no loss, and no vector of losses, counts
        0.9,
        "share of the devices whose losses count as they are; greater ones are cut to theirs; 1 cuts none",
        low=0.5,
        high=1.0,
    )

    @property
    def clusters_together(self) -> bool:
        """k-means compares the devices' losses."""
        return True

    def sum_plan(self, fleet: Fleet) -> SumPlan:  # noqa: ARG002 - the interface's
        """None: k-means needs the losses of each device. Raises ConfigError."""
        raise single_updates(self, "k-means compares the losses of single devices", "use ifca, where a device chooses")

    def asynchronous_plan(self, fleet: Fleet) -> AsynchronousPlan:  # noqa: ARG002 - the interface's
        """None: the groups are those of a cohort. Raises ConfigError."""
        raise whole_rounds("clove", "its groups are found among the losses of a whole cohort")

    def choose(self, replies: Replies, rng: np.random.Generator) -> dict[ClientId, int]:
        """The center of the group of each device that told its losses [K]."""
        told = told_losses(replies)
        if not told:
            return {}
        losses = capped_losses(np.stack([*told.values()]), self.cap)
        labels = kmeans(losses @ losses.T, self.clusters, rng, restarts=self.restarts).labels
        groups = np.unique(labels)
        totals = np.stack([losses[labels == g].sum(axis=0) for g in groups], axis=1)  # [K, groups]
        center = dict(zip(groups.tolist(), match_labels(totals).tolist(), strict=True))
        return {c: center[int(g)] for c, g in zip(told, labels, strict=True)}
