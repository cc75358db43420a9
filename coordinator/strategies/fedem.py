"""FedEM (Marfoq 2021): every device's data are a mixture of M distributions, and each of them has a model.

    E  q_im(j) ~ pi_im exp(-loss(theta_m; x_j, y_j))   for every sample j of device i; stays on the device
    M  pi_im = mean_j q_im(j)
       theta_im = local SGD from theta_m on (1 / n_i) sum_j q_im(j) loss(theta; x_j, y_j)
       theta_m <- sum_i (n_i / n_S) theta_im over those that answered, not weighted by pi

A device is served sum_m pi_im softmax(h_m(x)): a mixture of probabilities (public copies mix logits). A round takes
1 + M exchanges. Models must start apart, or they stay equal.

FedRC (Guo, Tang, Lin, ICML 2024) divides a sample's likelihood by how usual its label is in the model, so that devices
with other shares of classes, or other inputs, do not part; only other meanings of a class do:

    E  q_im(j) ~ pi_im p(y_j | x_j; theta_m) / p_m(y_j)

Here p(y | x; theta_m) is corrected to the device's own labels by Bayes' rule (`label-prior = device`), which has this
division and a normalised result; p_m(y) are the labels of the devices by their pi.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from coordinator.strategies.base import Fleet, Mixture, Round, State
from coordinator.strategies.common.initial_centers import MultiStartSgd
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.updates import ClientUpdates, pack_by_client, unpack_by_client
from coordinator.strategies.plans.sum_plan import SumPlan, single_updates
from edge_client.protocol.task import Array, ClientId, Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class FedEM(MultiStartSgd):
    """`clusters` models of which each device is served its own mixture. With one model this is FedAvg."""

    def sum_plan(self, fleet: Fleet) -> SumPlan:  # noqa: ARG002 - the interface's
        """E- and M-step on the device, which keeps its pi. Raises ConfigError for starts that compare updates."""
        if self.start == "k-means":
            raise single_updates(self, "start k-means compares the devices' updates", "set start = groups")
        return SumPlan(choose="posterior", first="groups" if self.start == "groups" else "none", served="mixture")

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """The E-step by the cohort, then one fit per model by the devices that did it. pi begins uniform."""
        state = yield from self.separate_starts(state, schema, fleet, rng)
        cohort, priors = self.cohort(fleet, rng), unpack_by_client(state.extra, "pi")
        uniform = np.full(self.clusters, 1.0 / self.clusters)
        prior = {c: priors.get(c, uniform).tolist() for c in cohort}
        replies = yield {c: self.probe_centers(state, "posterior", prior=prior[c]) for c in cohort}
        posteriors = {c: r.posterior for c, r in sorted(replies.items()) if r.posterior is not None}
        centers = state.centers.copy()
        for m in range(self.clusters):
            seeds, theta = TaskSeeds.from_rng(rng), state.centers[m]
            rows = f"posterior:{m}"
            replies = yield {c: self.fit(start=theta, rows=rows, seed=seeds.of(c), center=m) for c in posteriors}
            updates = ClientUpdates.from_replies(replies, schema.size)
            ones = np.ones((len(updates.clients), 1))
            centers[m] = self.server.aggregate(theta[None], updates, ones, updates.n, schema)[0]
        priors |= posteriors
        largest = {c: int(prior.argmax()) for c, prior in priors.items()}  # for scores; predictions mix
        return State(centers=centers, assignment=largest, extra={**state.extra, **pack_by_client("pi", priors)})

    def predictor(self, state: State, who: ClientId | None) -> Mixture:
        """The device's mixture; the fleet's mean mixture for a device that has none."""
        priors = unpack_by_client(state.extra, "pi")
        mean = np.mean(list(priors.values()), axis=0) if priors else np.full(self.clusters, 1.0 / self.clusters)
        weights: Array = mean if who is None else priors.get(who, mean)
        return tuple((float(weight), theta) for weight, theta in zip(weights, state.centers, strict=True))

    def label_shares(self, state: State) -> Mapping[ClientId, Array]:
        """pi: how much of a device's samples each model was trained on, whatever their labels."""
        return unpack_by_client(state.extra, "pi")


@dataclass(frozen=True, kw_only=True, repr=False)
class FedRC(FedEM):
    """FedEM whose models are told apart by what classes mean, and not by how often a device has them."""

    label_prior: str = "device"
