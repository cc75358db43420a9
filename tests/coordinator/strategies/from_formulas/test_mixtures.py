"""FedProx, Ditto, FedEM and FedRC against their formulas: what is trained, and what is served."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import F64, ClientId
from tests.support.methods import build, world
from tests.support.plain_loops import SAME, fit, losses, mean, seeds
from tests.support.softmax_program import CLASSES, grouped_fleet


def skewed() -> dict[ClientId, DeviceData]:
    """Devices that have more of some classes than of others."""
    rng, fleet = np.random.default_rng(0), grouped_fleet(5, 2, n=60)
    kept = {c: rng.random(CLASSES)[d.train.y] > rng.random(len(d.train)) for c, d in fleet.items()}
    return {c: DeviceData(train=Dataset(d.train.x[kept[c]], d.train.y[kept[c]]), test=d.test) for c, d in fleet.items()}


LOCAL = skewed()
WHO = sorted(LOCAL)
DATA = {c: LOCAL[c].train for c in WHO}
N = [float(len(DATA[c])) for c in WHO]
COUNTS = {c: np.bincount(DATA[c].y, minlength=CLASSES) for c in WHO}


@pytest.mark.parametrize("mu", [0.1, 2.0])
def test_fedprox_pulls_devices_to_the_model_that_the_round_began_with(mu: float) -> None:
    fleet = world(build("fedprox", {"mu": mu}), LOCAL)
    w = fleet.state.centers[0].copy()
    for _ in range(3):
        fleet.round()
        seed = seeds(fleet, 0)
        w = mean([fit(w, DATA[c], seed[c], mu=mu, anchor=w) for c in WHO], N)
        np.testing.assert_allclose(fleet.state.centers[0], w, rtol=0, atol=SAME)


@pytest.mark.parametrize(("lam", "common_weight"), [(0.1, 0.0), (1.0, 0.3)])
def test_ditto_pulls_personal_models_that_go_on_from_round_to_round(lam: float, common_weight: float) -> None:
    fleet = world(build("ditto", {"lam": lam, "common-weight": common_weight}), LOCAL)
    w = fleet.state.centers[0].copy()
    own = dict.fromkeys(WHO, w)
    for _ in range(3):
        fleet.round()
        first, second = seeds(fleet, 0), seeds(fleet, 1)
        own = {c: fit(own[c], DATA[c], second[c], mu=lam, anchor=w) for c in WHO}
        w = mean([fit(w, DATA[c], first[c]) for c in WHO], N)
        np.testing.assert_allclose(fleet.state.centers[0], w, rtol=0, atol=SAME)
    for c in WHO:
        expected = [(1 - common_weight, own[c]), (common_weight, w)][: 2 if common_weight else 1]
        for (share, model), (their_share, their_model) in zip(fleet.served(c), expected, strict=True):
            assert share == their_share
            np.testing.assert_allclose(model, their_model, rtol=0, atol=SAME)


@pytest.mark.parametrize("case", ["fedem start=redraw", "fedem start=redraw label-prior=device", "fedrc start=redraw"])
def test_fedem_trains_each_model_by_responsibilities_fedrc_by_those_of_corrected_ones(case: str) -> None:
    fleet = world(build(case, k=2), LOCAL)
    corrects = case != "fedem start=redraw"
    models, pi, totals = fleet.state.centers.copy(), dict.fromkeys(WHO, np.full(2, 0.5)), np.zeros((2, CLASSES))
    for _ in range(4):
        fleet.round()
        q = {c: _responsibilities(models, c, pi[c], totals) for c in WHO}
        pi = {c: q[c].mean(axis=1) for c in WHO}
        each = [seeds(fleet, 1 + m) for m in range(2)]
        models = np.stack([mean([fit(models[m], DATA[c], each[m][c], q=q[c][m]) for c in WHO], N) for m in range(2)])
        if corrects:
            totals = np.sum([np.outer(pi[c], COUNTS[c]) for c in WHO], axis=0)
            np.testing.assert_allclose(fleet.state.extra["label-totals"], totals, rtol=1e-12)
        np.testing.assert_allclose(fleet.state.centers, models, rtol=0, atol=SAME)
        for c in WHO:
            np.testing.assert_allclose(fleet.state.extra[f"pi/{c}"], pi[c], rtol=0, atol=SAME)
            np.testing.assert_allclose([share for share, _ in fleet.served(c)], pi[c], rtol=0, atol=SAME)


def _responsibilities(models: F64, who: ClientId, pi: F64, totals: F64) -> F64:
    """q [M, n] ~ pi_m p(y | x; m); with totals each model is corrected to the device's own labels by Bayes' rule.

    A task has totals with three digits after the point.
    """
    shifts = [np.log(COUNTS[who] + 0.1) - np.log(t.round(3) + 0.1) if t.any() else None for t in totals]
    p = np.stack([np.exp(-losses(m, DATA[who], s)) for m, s in zip(models, shifts, strict=True)]) * pi[:, None]
    shares: F64 = p / p.sum(axis=0)
    return shares
