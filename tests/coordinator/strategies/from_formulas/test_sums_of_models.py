"""CAM and FeMAM against their formulas, with and without momentum on the server."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.protocol.task import F64, ClientId, Flat
from tests.support.methods import MethodWorld, build, world
from tests.support.plain_loops import (
    SAME,
    SIZE,
    PlainMomentum,
    best_partition,
    fit,
    losses,
    matched,
    mean,
    seeds,
    squared,
)
from tests.support.softmax_program import grouped_fleet

LOCAL = grouped_fleet(6, 3)
WHO = sorted(LOCAL)
DATA = {c: LOCAL[c].train for c in WHO}
N = np.array([len(DATA[c]) for c in WHO], dtype=np.float64)
NONE = np.zeros(SIZE)
both = pytest.mark.parametrize("beta", [0.0, 0.5])


class PlainSums:
    """The common model and those of the groups, as the method ought to have them."""

    def __init__(self, fleet: MethodWorld, beta: float) -> None:
        self.fleet, centers = fleet, fleet.state.centers
        self.common, self.groups = centers[0, :SIZE].copy(), centers[:, (fleet.members - 1) * SIZE :][:, :SIZE].copy()
        self.own: dict[ClientId, int] = {}
        self.coasting = [PlainMomentum(beta) for _ in range(len(centers) + 1)]
        self.old: dict[int, Flat] = {}  # of the models that this round moved; -1 is the common one

    def group(self, who: ClientId) -> Flat:
        return np.asarray(self.groups[self.own[who]]) if who in self.own else NONE

    def train_common(self, exchange: int) -> None:
        seed = seeds(self.fleet, exchange)
        rows = [fit(np.r_[self.common, self.group(c)], DATA[c], seed[c], moves=0)[:SIZE] for c in WHO]
        self.old[-1], self.common = self.common, mean(rows, N.tolist())

    def train_groups(self, exchange: int) -> dict[ClientId, Flat]:
        seed = seeds(self.fleet, exchange)
        return {c: fit(np.r_[self.common, self.group(c)], DATA[c], seed[c], moves=1)[SIZE:] for c in WHO}

    def average(self, fits: dict[ClientId, Flat]) -> None:
        for k, old in enumerate(self.groups.copy()):
            mine = [i for i, c in enumerate(WHO) if self.own[c] == k]
            if mine:
                self.old[k], self.groups[k] = old, mean([fits[WHO[i]] for i in mine], N[mine].tolist())

    def cluster(self, fits: dict[ClientId, Flat]) -> None:
        """WeCFL's clusters of the groups' models, with the numbers of the nearest old ones."""
        points = np.stack([fits[c] for c in WHO])
        labels = best_partition(points, N, len(self.groups))
        means = [np.average(points[labels == j], axis=0, weights=N[labels == j]) for j in range(labels.max() + 1)]
        names = matched(squared(self.groups, np.stack(means))) if self.own else np.arange(len(means))
        self.own = {c: int(names[j]) for c, j in zip(WHO, labels, strict=True)}

    def check(self) -> None:
        """The round ends, and what it moved goes on."""
        for k, old in self.old.items():
            if k < 0:
                self.common = self.coasting[k].move(old, self.common)
            else:
                self.groups[k] = self.coasting[k].move(old, self.groups[k])
        self.old = {}
        found = self.fleet.state.centers
        empty = np.zeros((len(found), (self.fleet.members - 2) * SIZE))
        expected = np.c_[np.tile(self.common, (len(found), 1)), empty, self.groups]
        np.testing.assert_allclose(found[:, : expected.shape[1]], expected, rtol=0, atol=SAME)
        assert dict(self.fleet.state.assignment) == self.own


@both
@pytest.mark.parametrize("common", [True, False])
def test_cam_is_ifca_over_a_common_model_that_all_devices_train(beta: float, common: bool) -> None:  # noqa: FBT001
    settings = {"server-momentum": beta, "warm-up": 2, "common": common}
    fleet = world(build("cam start=redraw", settings, k=2), LOCAL)
    sums = PlainSums(fleet, beta)
    for number in range(1, 6):
        fleet.round()
        if number <= 2:
            sums.train_common(0)
        else:
            told = {c: [losses(np.r_[sums.common, g], DATA[c]).mean() for g in sums.groups] for c in WHO}
            sums.own = {c: int(np.argmin(told[c])) for c in WHO}
            sums.average(sums.train_groups(1))
            if common:
                sums.train_common(2)
        sums.check()


@both
def test_cam_over_wecfl_groups_devices_by_what_their_centers_add(beta: float) -> None:
    fleet = world(build("cam-wecfl warm-up=1", {"server-momentum": beta}, k=3), LOCAL)
    sums = PlainSums(fleet, beta)
    for number in range(1, 6):
        fleet.round()
        if number > 1:
            fits = sums.train_groups(0)
            sums.cluster(fits)
            sums.average(fits)
        sums.train_common(0 if number == 1 else 1)
        sums.check()


@both
def test_femam_trains_one_level_after_the_other(beta: float) -> None:
    fleet = world(build("femam", {"server-momentum": beta, "level-rounds": 2}, k=3), LOCAL)
    sums, personal = PlainSums(fleet, beta), dict.fromkeys(WHO, NONE)
    for number in range(1, 7):
        fleet.round()
        if number <= 2:
            sums.train_common(0)
        elif number <= 4:
            fits = sums.train_groups(0)
            sums.cluster(fits)
            sums.average(fits)
        else:
            seed = seeds(fleet, 0)
            for c in WHO:
                whole = np.r_[sums.common, sums.group(c), personal[c]]
                personal[c] = fit(whole, DATA[c], seed[c], moves=2)[2 * SIZE :]
        sums.check()
        for c in WHO:
            ((_, served),) = fleet.served(c)
            added: F64 = served[: 3 * SIZE].reshape(3, SIZE).sum(axis=0)
            np.testing.assert_allclose(added, sums.common + sums.group(c) + personal[c], rtol=0, atol=SAME)
