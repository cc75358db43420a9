"""FedSGD (McMahan 2017): one center, one gradient step a round, w <- w - eta sum_i (n_i / n_S) grad f_i(w).

A device sends the mean gradient over all of its samples, which it reads `batch_size` at a time. A gradient moves no
buffers, so batch norm's running statistics would keep their initial values: models with buffers are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from coordinator.aggregation.centers import row_means
from coordinator.strategies.base import Fleet, Mixture, Replies, Round, ServingOptions, State
from coordinator.strategies.common.method_value import MethodValue
from coordinator.strategies.common.sampling import TaskSeeds, sample_cohort
from coordinator.strategies.common.setting_checks import COHORT, setting
from coordinator.strategies.common.updates import ClientUpdates, updates_of
from coordinator.strategies.numbered_fleet import all_of_one_center
from edge_client.errors import ConfigError
from edge_client.protocol.task import MAX_BATCH, ClientId, Flat, Probe, Reply, Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class FedSGD(MethodValue):
    """One model for all devices, which the server trains with their gradients."""

    takes_newcomers: ClassVar[bool] = True

    learning_rate: float = setting(0.1, "learning rate of the server's step", low=0.0)
    batch_size: int = setting(16, "samples that a device reads at a time", low=1, high=MAX_BATCH)
    fraction_train: float = setting(1.0, **COHORT)

    @property
    def serving(self) -> ServingOptions:
        return {"buffers": "sent"}  # a model that has buffers is refused

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:  # noqa: ARG002 - the interface's
        """The common model is the only center. Raises ConfigError for a model with buffers."""
        if schema.size > schema.n_params:
            raise ConfigError(
                "fedsgd asks for gradients only, so this model's buffers (batch norm) would never be trained",
                hint="use a model with group norm, or fedavg with local-steps = 1 and a batch-size of all samples",
            )
        return State(centers=model[None].copy(), assignment=all_of_one_center(fleet))

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        cohort, seeds = sample_cohort(fleet, self.fraction_train, rng), TaskSeeds.from_rng(rng)
        center = state.centers[0]
        replies = yield {c: gradient_probe(center, batch=self.batch_size, seed=seeds.of(c)) for c in cohort}
        found = gradient_updates(replies, schema)
        assignment = all_of_one_center(fleet)
        if not found.clients:
            return replace(state, assignment=assignment)
        mean = row_means(found.rows, found.n[:, None])[0].astype(center.dtype)
        moved = center - self.learning_rate * mean
        return replace(state, centers=moved[None].astype(center.dtype), assignment=assignment)

    def predictor(self, state: State, who: ClientId | None) -> Mixture:  # noqa: ARG002 - all devices get the same
        return ((1.0, state.centers[0]),)


def gradient_probe(model: Flat, *, batch: int, seed: int) -> Probe:
    """A task: the mean gradient at `model` [schema.size] over all training samples, `batch` of them at a time."""
    return Probe(models=[model], want=frozenset({"grad"}), batch=batch, seed=seed)


def gradient_updates(replies: Replies, schema: Schema) -> ClientUpdates:
    """The gradients of one exchange as rows [m, schema.size], zero for buffers; a reply without one is left out."""

    def read(reply: Reply) -> Flat:
        if reply.grad is None:
            raise ValueError("this reply has no gradient")
        row = np.zeros(schema.size, dtype=reply.grad.dtype)
        row[: schema.n_params] = reply.grad
        return row

    return updates_of(replies, "grad", schema.size, read)
