"""FedSoft (Ruan 2022): a device mixes S distributions, and its personal model is pulled to all their centers.

    u_ks   share of device k's samples for which center s has the least loss, at least sigma; every tau rounds, by all
    w_k    <- local SGD from the device's last w_k on f_k(w) + (lam / 2) sum_s u_ks ||w - c_s||^2            (eq. 4)
    v_sk   = u_ks n_k / sum_k' u_k's n_k'                                                                     (eq. 6)
    c_s    <- mean of w_k over K devices drawn without replacement with probabilities v_s,
              or sum_k v_sk w_k over all devices

The pulls fold into one: mu = lam sum_s u_ks (slightly above lam, as sigma is added and nothing is taken away) and the
anchor sum_s u_ks c_s / sum_s u_ks, so one model travels, not S. Equation numbers are those of the AAAI text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from coordinator.strategies.base import Fleet, Replies, RequireAll, Round, ServedModels, State
from coordinator.strategies.common.assignment import serving_center
from coordinator.strategies.common.initial_centers import MultiStartSgd
from coordinator.strategies.common.local_sgd import merge_anchors
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.setting_checks import setting
from coordinator.strategies.common.updates import ClientUpdates, pack_by_client, unpack_by_client
from coordinator.strategies.plans.sum_plan import SumPlan, single_updates
from edge_client.protocol.task import OWN_MODEL, Array, ClientId, Fit, OwnModel, Schema


@dataclass(frozen=True, kw_only=True, repr=False)
class FedSoft(MultiStartSgd):
    """`clusters` centers, and a personal model on each device. Where devices mix, centers sit between distributions."""

    lam: float = setting(0.1, "weight of the pull to the mixture of centers", low=0.0)  # the paper's for images
    tau: int = setting(  # as in the public code
        2, "rounds from one estimate of the devices' shares of the centers to the next", low=1
    )
    sigma: float = setting(1e-4, "least share of each center", low=1e-12, high=1.0)  # the paper's
    select: int = setting(  # with 0 v weighs the devices, which blurs the centers least
        0, "devices per center and round; 0 takes all", low=0
    )
    local_start: str = setting(
        "own", 'a device starts from its "own" model, or from the mixture of "centers"', choices=("own", "centers")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_pull(self.lam * (1 + self.sigma * (self.clusters - 1)), "every device", setting="lam")

    @property
    def clusters_together(self) -> bool:
        """Also where the draw of a center's devices compares their shares."""
        return super().clusters_together or self.select > 0

    def sum_plan(self, fleet: Fleet) -> SumPlan:
        """The device keeps its shares u. Raises ConfigError for settings that need them on the server."""
        if self.start == "k-means":
            raise single_updates(self, "start k-means compares the devices' updates", "set start = groups")
        if self.select:
            raise single_updates(self, "select draws devices by their shares", "set select = 0")
        return SumPlan(
            choose="shares",
            first="groups" if self.start == "groups" else "none",
            pulls=dict.fromkeys(fleet, self.lam),
            sigma=self.sigma,
            tau=self.tau,
            own_start=self.local_start == "own",
        )

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """One exchange, two when the shares are due. A device without shares does not train."""
        state = yield from self.separate_starts(state, schema, fleet, rng)
        age, told = int(state.extra.get("age", self.tau)), dict[ClientId, Array]()
        if age >= self.tau:
            asked = RequireAll({c: self.probe_centers(state, "votes") for c in sorted(fleet)})
            told = self._shares((yield asked))
        shares = unpack_by_client(state.extra, "u") | told
        weights = self._weights(shares, fleet, rng)
        seeds = TaskSeeds.from_rng(rng)
        replies = yield {c: self._task(state, shares[c], seeds.of(c)) for c in weights}
        updates = ClientUpdates.from_replies(replies, schema.size)
        if not told and not updates.clients:
            return state
        R = np.array([weights[c] for c in updates.clients]).reshape(-1, self.clusters)
        a = np.ones(len(R)) if self.select else updates.n
        centers = self.server.aggregate(state.centers, updates, R, a, schema)
        extra = {**state.extra, **pack_by_client("u", shares), "age": np.array(1 if told else age + 1)}
        return State(centers=centers, assignment={c: int(u.argmax()) for c, u in shares.items()}, extra=extra)

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        """The device's last model; for one that never trained the center of its largest share, else the most common."""
        center = state.centers[serving_center(state.assignment, who)]
        return ((1.0, center if who is None else OwnModel(init=center)),)

    def label_shares(self, state: State) -> Mapping[ClientId, Array]:
        """v_sk weighs a device's samples by u."""
        return unpack_by_client(state.extra, "u")

    def _shares(self, replies: Replies) -> dict[ClientId, Array]:
        """u_ks = max(votes / n, sigma), [S] per device; it is not normalised again, as in the paper."""
        votes = {c: r.votes for c, r in sorted(replies.items()) if r.votes is not None}
        return {c: np.maximum(v / v.sum(), self.sigma) for c, v in votes.items()}

    def _weights(
        self, shares: Mapping[ClientId, Array], fleet: Fleet, rng: np.random.Generator
    ) -> dict[ClientId, Array]:
        """The devices that train, sorted, with their weights [S] in the centers: the shares, or 1 where drawn."""
        cohort = self.cohort({c: fleet[c] for c in shares if c in fleet}, rng)
        if not self.select or not cohort:
            return {c: shares[c] for c in cohort}
        v = np.array([shares[c] * fleet[c] for c in cohort])  # [m, S]
        v /= v.sum(axis=0)
        drawn = np.zeros_like(v)
        for s in range(self.clusters):
            drawn[rng.choice(len(cohort), size=min(self.select, len(cohort)), replace=False, p=v[:, s]), s] = 1
        return {c: row for c, row in zip(cohort, drawn, strict=True) if row.any()}

    def _task(self, state: State, shares: Array, seed: int) -> Fit:
        middle, total = merge_anchors(state.centers, shares.tolist())
        if self.local_start == "own" or middle is None:
            start = state.extra["start"]
            return self.fit(start=OWN_MODEL, init=start, anchor=middle, mu=self.lam * total, seed=seed)
        return self.fit(start=middle, anchor=middle, mu=self.lam * total, seed=seed)
