"""`fedcenters` against the rules of docs/methods.md: which splits are proposed and made, and the shares that serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from scipy.stats import t as student

from edge_client.protocol.task import F64, I64, ClientId, Fit, Flat
from tests.support.methods import MethodWorld, build, world
from tests.support.plain_loops import SAME, best_partition, fit, losses, mean
from tests.support.softmax_program import grouped_fleet

STEPS, TRIAL, PRIOR, LAM = 8, 3, 20.0, 0.1
PARTS = (2, 3, 4, 5, 6, 8, 10, 12)


@dataclass
class RulesOfTheDefault:
    """The centers, members and shares that the rules give."""

    fleet: MethodWorld
    least_gain: float
    most: int
    members: dict[ClientId, int]
    centers: list[Flat]
    personal: dict[ClientId, Flat] = field(default_factory=dict)
    shares: dict[ClientId, F64] = field(default_factory=dict)
    mean_share: F64 = field(default_factory=lambda: np.full(3, 1 / 3))

    def round(self, number: int) -> None:
        """Play a round of the method, and the same by the rules."""
        self.fleet.round()
        trial, begun, mine = number <= TRIAL, self.centers, dict(self.members)
        n = {c: len(d.train) for c, d in self.fleet.devices.local.items()}
        held = {c: np.random.Generator(np.random.PCG64(0)).permutation(n[c])[: n[c] // 5 * trial] for c in n}
        q = {c: np.where(np.isin(np.arange(n[c]), held[c]), 0.0, n[c] / (n[c] - len(held[c]))) for c in n}
        seed = self._seeds("main")
        data = {c: self.fleet.devices.local[c].train for c in n}
        tuned = {c: fit(begun[mine[c]], data[c], seed[c], q=q[c], steps=STEPS) for c in n}
        self.centers = [self._mean(tuned, [c for c in n if mine[c] == k]) for k in range(len(begun))]
        if trial:
            for k in range(len(begun)):
                self._split(k, tuned, held, room=self.most - len(begun) + 1)
        for c, one in self._seeds("personal").items():
            pull = {"mu": LAM, "anchor": begun[mine[c]]}
            start = self.personal.get(c, begun[mine[c]])
            self.personal[c] = fit(start, data[c], one, q=q[c], steps=STEPS, **pull)  # type: ignore[arg-type]
        for _ in range(10 if number == TRIAL else int(trial)):
            served = {c: (self.centers[self.members[c]], tuned[c], self.personal[c]) for c in n}
            self._weigh({c: np.stack([losses(m, data[c])[held[c]] for m in served[c]]) for c in n})

    def check(self) -> None:
        state = self.fleet.state
        np.testing.assert_allclose(state.centers, np.stack(self.centers), rtol=0, atol=SAME)
        assert state.assignment == self.members
        for c, share in self.shares.items():
            np.testing.assert_allclose(state.extra[f"share/{c}"], share, rtol=0, atol=SAME)
            kept = share[share >= 0.05] / share[share >= 0.05].sum()
            np.testing.assert_allclose([one for one, _ in self.fleet.served(c)], kept, rtol=0, atol=SAME)

    def _seeds(self, slot: str) -> dict[ClientId, int]:
        fits = [(c, t) for every in self.fleet.exchanges for c, t in every.items() if isinstance(t, Fit)]
        return {c: t.seed for c, t in fits if t.slot == slot}

    def _mean(self, fits: dict[ClientId, Flat], who: Sequence[ClientId]) -> Flat:
        return mean([fits[c] for c in who], [float(len(self.fleet.devices.local[c].train)) for c in who])

    def _split(self, k: int, fits: dict[ClientId, Flat], held: dict[ClientId, I64], *, room: int) -> None:
        who = sorted(c for c, center in self.members.items() if center == k)
        points, a = np.stack([fits[c] for c in who]), np.array([float(self.fleet.fleet[c]) for c in who])
        ways = [np.zeros(len(who), np.int64)]
        ways += [best_partition(points, a, p) for p in PARTS if p <= min(len(who), room)]
        told = np.array([[self._loss(way, i, who, fits, held) for way in ways] for i in range(len(who))])
        best = clearly_better(told, np.array([float(len(held[c])) for c in who]), self.least_gain)
        parts = int(ways[best].max()) + 1
        if best and len(self.centers) + parts - 1 <= self.most:
            numbers = [k, *range(len(self.centers), len(self.centers) + parts - 1)]
            sides = [[c for c, j in zip(who, ways[best], strict=True) if j == part] for part in range(parts)]
            self.centers += [self._mean(fits, side) for side in sides[1:]]
            self.centers[k] = self._mean(fits, sides[0])
            self.members |= {c: number for number, side in zip(numbers, sides, strict=True) for c in side}

    def _loss(
        self, way: I64, i: int, who: Sequence[ClientId], fits: dict[ClientId, Flat], held: dict[ClientId, I64]
    ) -> float:
        """On device i's held-out samples, of the mean of those in its part that are not in its fold."""
        part = [j for j in range(len(who)) if way[j] == way[i]]
        if len(part) == 1:
            return self._loss(np.zeros_like(way), i, who, fits, held)
        fold = {j: rank % 3 for rank, j in enumerate(part)}
        model = self._mean(fits, [who[j] for j in part if fold[j] != fold[i]])
        return float(losses(model, self.fleet.devices.local[who[i]].train)[held[who[i]]].mean())

    def _weigh(self, told: dict[ClientId, F64]) -> None:
        found = {c: _responsible(each, self.shares.get(c, self.mean_share)) for c, each in told.items()}
        m = {c: each.shape[1] for c, each in told.items()}
        self.mean_share = np.average(list(found.values()), axis=0, weights=list(m.values()))
        self.shares = {c: (m[c] * r + PRIOR * self.mean_share) / (m[c] + PRIOR) for c, r in found.items()}


def _responsible(told: F64, share: F64) -> F64:
    p = share[:, None] * np.exp(-told)
    r: F64 = (p / p.sum(axis=0)).mean(axis=1)
    return r


def clearly_better(told: F64, m: F64, least_gain: float) -> int:
    """The fewest parts within one standard error of the best, of those that save enough by Student's 99 % bound."""
    n, m = len(told), np.minimum(m, np.median(m))
    weight = m / m.sum()
    gains = told[:, :1] - told
    gains = np.clip(gains, np.quantile(gains, 0.1, axis=0), np.quantile(gains, 0.9, axis=0))
    now = float(weight @ np.clip(told[:, 0], 0, np.quantile(told[:, 0], 0.9)))

    def error(values: F64) -> float:
        return float(np.sqrt(n / (n - 1) * (weight**2 @ (values - weight @ values) ** 2)))

    mean_gain = weight @ gains
    best = int(mean_gain.argmax())
    for j in range(1, told.shape[1]):
        clear = mean_gain[j] > max(least_gain * now, float(student.ppf(0.99, n - 1)) * error(gains[:, j]))
        if clear and mean_gain[best] - mean_gain[j] <= error(gains[:, best] - gains[:, j]):
            return j
    return 0


@pytest.mark.parametrize(
    ("groups", "least_gain", "most", "found"), [(2, 0.2, 16, 2), (1, 0.2, 16, 1), (3, 0.2, 3, 3), (3, 0.2, 2, 2)]
)
def test_the_default_method_finds_and_serves_what_its_rules_say(
    groups: int, least_gain: float, most: int, found: int
) -> None:
    settings = {"trial-rounds": TRIAL, "least-gain": least_gain, "most-centers": most, "local-steps": STEPS}
    fleet = world(build("fedcenters", settings), grouped_fleet(7, groups))
    rules = RulesOfTheDefault(fleet, least_gain, most, dict.fromkeys(fleet.fleet, 0), list(fleet.state.centers))
    for number in range(1, TRIAL + 3):
        rules.round(number)
        rules.check()
    assert len(rules.centers) == found
