"""pFedMe (Dinh 2020): a personal model theta_i per device by a Moreau envelope, and one common model w.

    w_i <- w, then R times:  theta_i ~ argmin f_i(theta) + (lam / 2) ||theta - w_i||^2
                             w_i <- w_i - eta lam (w_i - theta_i)
    w   <- (1 - beta) w + beta mean_i w_i

The argmin is local SGD from w_i. Each of the R local rounds is one exchange: a device sends theta_i, the server moves
w_i. A device that misses one of them does not count in this round's mean. The device keeps its last theta_i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coordinator.aggregation.rows import Rows
from coordinator.strategies.base import Fleet, Round, ServedModels, State
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.setting_checks import setting
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.numbered_fleet import all_of_one_center
from coordinator.strategies.plans.sum_plan import SumPlan
from edge_client.errors import ConfigError
from edge_client.protocol.task import ClientId, Fit, Flat, OwnModel, Schema

PERSONAL_SLOT = "personal"


@dataclass(frozen=True, kw_only=True, repr=False)
class PFedMe(FedAvg):
    """One common model and one personal model per device, held together by lam."""

    lam: float = setting(  # the paper's 15 is made for a learning rate of 0.005
        0.1, "weight of the pull of the personal model theta_i to w_i, the device's copy of the common one", low=1e-9
    )
    # w_i goes half of the way to theta_i; the paper goes 0.005 * 15 of it, 20 times: about as far
    eta: float = setting(5.0, "step of w_i, the device's copy of the common model, in a local round", low=0.0)
    local_rounds: int = setting(2, "exchanges in a round", low=1)
    beta: float = setting(  # the paper's 2 is a step beyond the mean
        1.0, "share of the way to the mean that the common model goes", low=1e-9, high=1.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_pull(self.lam, "every device", setting="lam")
        if self.eta * self.lam > 1:
            raise ConfigError(
                f"eta * lam is {self.eta * self.lam:.4g}: a device's model would step beyond its personal one",
                hint="eta * lam must not exceed 1; lower `eta` or `lam`",
            )

    def sum_plan(self, fleet: Fleet) -> SumPlan:
        """The local rounds on the device: w_i never leaves it."""
        return SumPlan(
            choose="only",
            weigh="equal",
            pulls=dict.fromkeys(fleet, self.lam),
            repeats=self.local_rounds,
            move=self.eta * self.lam,
            slot=PERSONAL_SLOT,
            step=self.beta,
        )

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """One exchange per local round with the devices that answered all before it."""
        local: dict[ClientId, Flat] = dict.fromkeys(self.cohort(fleet, rng), state.centers[0])
        for _ in range(self.local_rounds):
            seeds = TaskSeeds.from_rng(rng)
            replies = yield {c: self._near(w_i, seeds.of(c)) for c, w_i in local.items()}
            theta = {c: r.update for c, r in sorted(replies.items()) if r.update is not None}
            n = np.array([replies[c].n for c in theta], dtype=np.float64)
            local = {c: local[c] - self.eta * self.lam * (local[c] - theta_i) for c, theta_i in theta.items()}
        if not local:
            return state
        rows = list(local.values())
        moved = ClientUpdates(tuple(local), Rows(len(rows), schema.size, rows.__getitem__, held=True), n)
        ones = np.ones(len(rows))
        centers = self.server.aggregate(state.centers, moved, ones[:, None], ones, schema, step=self.beta)
        return replace(state, centers=centers, assignment=all_of_one_center(fleet))

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        common = state.centers[0]
        return ((1.0, common if who is None else OwnModel(slot=PERSONAL_SLOT, init=common)),)

    def _near(self, w: Flat, seed: int) -> Fit:
        return self.fit(start=w, anchor=w, mu=self.lam, slot=PERSONAL_SLOT, seed=seed, center=0)
