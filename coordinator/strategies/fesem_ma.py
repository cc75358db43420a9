"""FeSEM-MA: FeSEM that matches the hidden units of its devices before it averages them (after FedMA, Wang 2020).

Layer by layer from the input, the units of each model are put into the order of the center's units that they resemble
most (clustering/neuron_matching.py); before models are compared, into that of the common start. Widths stay as they
are; FedMA's new units and its retraining are left out. It helps where networks differ by an order of units; devices
that train from one common start rarely do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.clustering.neuron_matching import align_neurons, layer_chain
from coordinator.strategies.base import Fleet, State
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.fesem import FeSEM
from edge_client.protocol.task import F64, Array, Flat, Schema


@dataclass(frozen=True, kw_only=True)
class FeSEMMA(FeSEM):
    """FeSEM for networks whose layers form a plain chain; others are refused with ConfigError."""

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:
        """As FeSEM, for a chain."""
        layer_chain(schema)
        return super().begin(model, schema, fleet, rng)

    def _points(self, vectors: Array, state: State, schema: Schema) -> Array:
        return super()._points(align_neurons(vectors, state.extra["start"], schema), state, schema)

    def _m_step(self, centers: Array, updates: ClientUpdates, R: F64, a: F64, schema: Schema) -> Array:
        return self.server.aggregate(
            centers, updates, R, a, schema, align=lambda rows, center: align_neurons(rows, center, schema)
        )
