"""FedAvg that also counts updates that arrived after their round: w <- mean of the w_i by n_i, late ones by s n_i.

A late update was trained from the center of an earlier round. s is FedAsync's staleness weight (Xie 2019, polynomial,
a = 1/2) for one round: (1 + 1)^(-1/2). A device that answers in this round has no late update counted. In a simulation
no update is late, and this is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.strategies.base import Replies, late_replies
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.common.setting_checks import setting
from coordinator.strategies.common.updates import ClientUpdates
from edge_client.protocol.task import Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class FedAvgLate(FedAvg):
    """One model for all devices, from punctual and late updates."""

    late_weight: float = setting(0.71, "weight of an update that came after its round", low=0.0, high=1.0)

    def _updates(self, replies: Replies, schema: Schema) -> ClientUpdates:
        now, before = (ClientUpdates.from_replies(some, schema.size) for some in (replies, late_replies(replies)))
        return ClientUpdates(
            clients=(*now.clients, *before.clients),
            rows=now.rows.then(before.rows),
            n=np.concatenate([now.n, self.late_weight * before.n]),
        )
