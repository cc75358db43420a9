"""FedDANE (Li 2019): FedAvg whose devices correct their own gradient by the fleet's.

    g    = sum_{i in S} (n_i / n_S) grad f_i(w)
    w_i  = argmin_v f_i(v) + <g - grad f_i(w), v - w> + (mu / 2) ||v - w||^2     started at w, i in S'
    w   <- sum_{i in S'} (n_i / n_S') w_i

S and S' are two independent draws. One exchange asks both for their gradients: g averages over S alone, the linear
term needs that of every i in S'. A member of S' without a gradient is not asked to fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coordinator.strategies.base import Fleet, RequireAll, Round, State, some_replies
from coordinator.strategies.baselines.fedprox import FedProx
from coordinator.strategies.baselines.fedsgd import gradient_probe, gradient_updates
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.numbered_fleet import all_of_one_center
from edge_client.protocol.task import Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class FedDANE(FedProx):
    """One model for all devices; mu = 0 is the authors' choice for convex problems."""

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """Two exchanges: gradients, then fits. Without a gradient from S the round changes nothing."""
        averaged, fitted = (self.cohort(fleet, rng) for _ in range(2))
        seeds, center = TaskSeeds.from_rng(rng), state.centers[0]
        asked = sorted({*averaged, *fitted})
        replies = yield RequireAll({c: gradient_probe(center, batch=self.batch_size, seed=seeds.of(c)) for c in asked})
        of_s, of_fitted = (gradient_updates(some_replies(replies, who), schema) for who in (averaged, fitted))
        if not of_s.clients or not of_fitted.clients:
            return state
        zero, ones = np.zeros((1, schema.size), of_s.rows[0].dtype), np.ones((len(of_s.clients), 1))
        common = self.server.aggregate(zero, of_s, ones, of_s.n, schema)[0]
        linear = {c: common - row for c, row in zip(of_fitted.clients, of_fitted.rows, strict=True)}
        replies = yield {c: replace(self._task(center, seeds.of(c)), linear=linear[c]) for c in of_fitted.clients}
        centers = self._reduce(state.centers, ClientUpdates.from_replies(replies, schema.size), schema)
        return replace(state, centers=centers, assignment=all_of_one_center(fleet))
