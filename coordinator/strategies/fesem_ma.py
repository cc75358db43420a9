"""FeSEM-MA: FeSEM that matches the hidden units of its devices before it averages them (after FedMA, Wang 2020).

    c_k = mean_i P_i w_i,   P_i = the order of hidden units of w_i that is nearest to c_k, layer by layer from the input

clustering/neuron_matching.py finds the order by Hungarian matching. Before models are compared, their units are put
into the order of the common start. Widths do not change; FedMA's new units and its retraining are left out.
Matching helps where networks differ by an order of units; devices that train from one common start rarely do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.clustering.neuron_matching import align_neurons, layer_chain
from coordinator.strategies.base import Fleet, State
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.fesem import FeSEM
from edge_client.protocol.task import F64, Array, Flat, Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class FeSEMMA(FeSEM):
    """FeSEM for networks whose layers form a plain chain; others are refused with ConfigError."""

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:
        layer_chain(schema)
        return super().begin(model, schema, fleet, rng)

    def _points(self, vectors: Array, state: State, schema: Schema) -> Array:
        return super()._points(align_neurons(vectors, state.extra["start"], schema), state, schema)

    def _m_step(self, centers: Array, updates: ClientUpdates, R: F64, a: F64, schema: Schema) -> Array:
        return self.server.aggregate(
            centers, updates, R, a, schema, align=lambda rows, center: align_neurons(rows, center, schema)
        )
