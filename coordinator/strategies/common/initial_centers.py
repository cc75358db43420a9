"""K models that differ before training, for methods whose devices compare them: IFCA, FedEM, FedSoft."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from coordinator.aggregation.centers import one_hot
from coordinator.clustering.gram import gram_matrix
from coordinator.clustering.kmeans import kmeans
from coordinator.strategies.base import Fleet, RequireAll, Round, State
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.representation import represent_rows
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.setting_checks import described, setting
from coordinator.strategies.common.updates import ClientUpdates
from edge_client.protocol.task import I64, MAX_MODELS, Array, Flat, Schema

START_MODES = ("groups", "k-means", "redraw")


def initial_centers(model: Flat, schema: Schema, k: int, rng: np.random.Generator) -> Array:
    """[k, schema.size] different models to begin with: the common one, then k - 1 drawn anew, tensor by tensor.

    Each parameter tensor is drawn from the normal distribution with the mean and the spread of its values in `model`;
    a tensor of equal values (a bias of zeros, a norm's weight of ones) and the buffers stay as they are.
    """
    out = np.tile(model, (k, 1))
    for tensor in schema.tensors:
        values = model[schema.slices[tensor.name]].astype(np.float64)
        if tensor.role == "p" and np.ptp(values) > 0:
            drawn = rng.normal(values.mean(), values.std(), size=(k - 1, tensor.size))
            out[1:, schema.slices[tensor.name]] = drawn.astype(model.dtype)
    return out


@dataclass(frozen=True, kw_only=True, repr=False)
class MultiStartSgd(LocalSgd):
    """`clusters` models that every device compares, and which therefore must differ before training.

    start "groups": in the first round the devices are dealt into random groups, and each group's mean by samples after
    one fit from the common model is a start (as IFCA does for FEMNIST, over 20 rounds); these are about equally good.
    "k-means": the same with the groups that WeCFL's first clustering finds in the devices' last layers; a device rarely
    leaves such a group, since no other start serves its labels. "redraw": the common model and others drawn by
    `initial_centers`, without an exchange; all devices may then choose the one that is best by chance.
    """

    clusters: int = field(default=3, kw_only=False, metadata=described("number of centers", low=1, high=MAX_MODELS))
    start: str = setting(  # "redraw" may leave all devices with one center (experiment ifca-starts)
        "groups", 'how centers begin apart: "groups", "k-means" or "redraw"', choices=START_MODES
    )

    @property
    def clusters_together(self) -> bool:
        """Whether the starts are clusters of updates; in later rounds each device chooses by its own data."""
        return self.start == "k-means"

    @property
    def compared_centers(self) -> int:
        return self.clusters

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:  # noqa: ARG002 - the interface's
        """Different centers, and the common model in `extra`; no device has a center yet."""
        due = {"ungrouped": np.array(1)} if self.start != "redraw" and self.clusters > 1 else {}
        return State(centers=initial_centers(model, schema, self.clusters, rng), extra={"start": model.copy(), **due})

    def separate_starts(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """The exchange that makes starts of groups, in the first round only; each round yields from this first."""
        if "ungrouped" not in state.extra:
            return state
        clients, seeds = sorted(fleet), TaskSeeds.from_rng(rng)
        dealt = dict(zip(clients, rng.permutation(len(clients)) % self.clusters, strict=True))
        common = state.extra["start"]
        replies = yield RequireAll({c: self.fit(start=common, slot="start", seed=seeds.of(c)) for c in clients})
        updates = ClientUpdates.from_replies(replies, schema.size)
        if not updates.clients:
            return state
        alike = self.start == "k-means"
        labels = self._alike(common, updates, schema, rng) if alike else np.array([dealt[c] for c in updates.clients])
        R = one_hot(labels, self.clusters)
        means = self.server.aggregate(np.tile(common, (self.clusters, 1)), updates, R, updates.n, schema)
        if not self.server.privacy_noise:  # which hides whether a group has a device
            means = np.where(np.any(R, axis=0, keepdims=True).T, means, state.centers)  # of none what was drawn
        return replace(state, centers=means, extra={k: v for k, v in state.extra.items() if k != "ungrouped"})

    def _alike(self, common: Flat, updates: ClientUpdates, schema: Schema, rng: np.random.Generator) -> I64:
        """[m] the clusters of the last layers of the devices' models, which weigh n_i."""
        points = represent_rows(updates.rows, schema, "classifier", less=common)
        matrix = gram_matrix(points, np.zeros(points.width, common.dtype))
        return kmeans(matrix, self.clusters, rng, weights=updates.n).labels
