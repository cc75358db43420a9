"""IFCA, HypCluster and FedSoft against their formulas: cohorts, uneven devices, silence, more centers than devices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from coordinator.rounds.round import round_rng
from edge_client.data.dataset import Dataset
from edge_client.protocol.task import F64, ClientId, Flat
from tests.support.methods import MethodWorld, build, world
from tests.support.plain_loops import SAME, PlainMomentum, fit, losses, mean, seeds
from tests.support.softmax_program import CLASSES
from tests.support.uneven_fleets import away, uneven_fleet

every_seed = pytest.mark.parametrize("seed", [0, 1])
Totals = F64 | None


def dealt(who: list[ClientId], k: int, seed: int) -> dict[ClientId, int]:
    """Random groups of sizes that differ by one at most, the first draw of round 1 after that of the seeds."""
    rng = round_rng(seed, 1)
    rng.integers(2**53)
    return dict(zip(who, (rng.permutation(len(who)) % k).tolist(), strict=True))


def means_of_groups(fleet: MethodWorld, data: Mapping[ClientId, Dataset], centers: F64, gone: set[ClientId]) -> F64:
    """The starts: each group's mean by samples after one fit from the common model; an empty group keeps its draw."""
    told, common, out = seeds(fleet, 0), centers[0].copy(), centers.copy()
    group = dealt([*told], len(centers), fleet.seed)
    for k in range(len(centers)):
        if mine := [c for c in told if group[c] == k and c not in gone]:
            out[k] = mean([fit(common, data[c], told[c]) for c in mine], [float(len(data[c])) for c in mine])
    return out


def corrected(counts: F64, totals: F64) -> list[Totals]:
    """log p_device(y) - log p_center(y), up to a constant that no softmax sees; nothing for an untrained center."""
    return [np.log(counts + 0.1) - np.log(t.round(3) + 0.1) if t.any() else None for t in totals]


@every_seed
@pytest.mark.parametrize("fraction", [1.0, 0.6])
@pytest.mark.parametrize(
    ("case", "k", "beta"),
    [
        ("ifca", 3, 0.0),
        ("hypcluster", 3, 0.5),
        ("ifca start=redraw", 12, 0.5),
        ("hypcluster label-prior=device", 2, 0.5),
        ("ifca label-prior=device", 12, 0.0),
    ],
)
def test_a_cohort_trains_the_center_of_least_loss(case: str, k: int, beta: float, fraction: float, seed: int) -> None:
    local = uneven_fleet(3, seed)
    data = {c: d.train for c, d in local.items()}
    counts = {c: np.bincount(d.y, minlength=CLASSES).astype(np.float64) for c, d in data.items()}
    fleet = world(build(case, {"fraction-train": fraction, "server-momentum": beta}, k=k), local, seed=seed)
    centers, totals, known = fleet.state.centers.copy(), np.zeros((k, CLASSES)), set[ClientId]()
    own, coasting = dict[ClientId, int](), [PlainMomentum(beta) for _ in range(k)]
    for number in range(1, 7):
        gone, late = away(number, data, seed), away(number, data, seed + 50)
        at = int(number == 1 and "redraw" not in case)
        fleet.round(silent_in={0: {"d02"}, 1: gone, 2: late} if at else {0: gone, 1: late})
        begun = centers.copy()
        if at:
            centers = means_of_groups(fleet, data, centers, {"d02"})
        prior = "label-prior" in case
        shifts = {c: corrected(counts[c], totals) if prior else [None] * k for c in data}
        told = {
            c: [losses(m, data[c], s).mean() for m, s in zip(centers, shifts[c], strict=True)]
            for c in fleet.exchanges[at]
            if c not in gone
        }
        chosen, here = {c: int(np.argmin(one)) for c, one in told.items()}, set[ClientId]()
        if chosen:
            seed_of = seeds(fleet, at + 1)
            assert sorted(seed_of) == sorted(chosen)
            here = {c for c in chosen if c not in late}
            fits = {c: fit(centers[chosen[c]], data[c], seed_of[c]) for c in sorted(here)}
            for j in range(k):
                if mine := [c for c in fits if chosen[c] == j]:
                    a = [1.0 if case.startswith("ifca") else float(len(data[c])) for c in mine]
                    centers[j] = mean([fits[c] for c in mine], a)
        for j in range(k):
            if (centers[j] != begun[j]).any():
                centers[j] = coasting[j].move(begun[j], centers[j])
        own |= chosen
        known |= here | ({*data} - {"d02"} if at else set())
        if prior and known:
            rows = [sum((counts[c] for c in own if own[c] == j and c in known), np.zeros(CLASSES)) for j in range(k)]
            totals = np.array([row if row.any() else old for row, old in zip(rows, totals, strict=True)])
            np.testing.assert_array_equal(fleet.state.extra["label-totals"], totals)
        np.testing.assert_allclose(fleet.state.centers, centers, rtol=0, atol=SAME)
        assert fleet.state.assignment == own


@every_seed
@pytest.mark.parametrize(
    ("settings", "k"),
    [
        ({"lam": 0.3, "tau": 2}, 3),
        ({"lam": 0.3, "tau": 2, "fraction-train": 0.6, "server-momentum": 0.5}, 3),
        ({"lam": 1.0, "tau": 1, "select": 3, "sigma": 0.01}, 2),
        ({"lam": 0.5, "tau": 3, "select": 2, "fraction-train": 0.6}, 3),
        ({"lam": 0.1, "tau": 2, "start": "redraw", "local-start": "centers"}, 12),
    ],
)
def test_fedsoft_pulls_a_device_to_all_centers_and_weighs_it_by_its_share_of_their_samples(  # noqa: C901 - one round of the method, from its exchanges to its state
    settings: dict[str, float | str], k: int, seed: int
) -> None:
    local = uneven_fleet(2, seed)
    data = {c: d.train for c, d in local.items()}
    n = {c: float(len(d)) for c, d in data.items()}
    fleet = world(build("fedsoft", settings, k=k), local, seed=seed)
    beta = float(settings.get("server-momentum", 0))
    lam, tau, select = float(settings["lam"]), int(settings["tau"]), int(settings.get("select", 0))
    centers, common = fleet.state.centers.copy(), fleet.state.centers[0].copy()
    coasting = [PlainMomentum(beta) for _ in range(k)]
    u, w, age = dict[ClientId, F64](), dict[ClientId, Flat](), tau
    for number in range(1, 7):
        gone, late = away(number, data, seed), away(number, data, seed + 50)
        at = int(number == 1 and settings.get("start") != "redraw")
        begun = centers.copy()
        due = age >= tau
        fleet.round(silent_in={at: gone, at + 1: late} if due else {at: late})
        if at:
            centers = means_of_groups(fleet, data, centers, set())
        told = {}
        if due:
            assert sorted(fleet.exchanges[at]) == sorted(data)
            told = {c: _shares(centers, data[c], float(settings.get("sigma", 1e-4))) for c in data if c not in gone}
            u |= told
            at += 1
        seed_of = seeds(fleet, at)
        rng = round_rng(seed, number)
        if number == 1 and settings.get("start") != "redraw":
            rng.integers(2**53)
            rng.permutation(len(data))
        weights = _weights(u, n, float(settings.get("fraction-train", 1)), select, rng)
        assert sorted(weights) == sorted(seed_of)
        for c in seed_of:
            if c not in late:
                middle = u[c] @ centers / u[c].sum()
                from_centers = settings.get("local-start") == "centers"
                start = middle if from_centers else w.get(c, common)
                w[c] = fit(start, data[c], seed_of[c], mu=lam * u[c].sum(), anchor=middle)
        fits = [c for c in sorted(seed_of) if c not in late]
        for s in range(k):
            v = {c: weights[c][s] * (1.0 if select else n[c]) for c in fits if weights[c][s]}
            if v:
                centers[s] = mean([w[c] for c in v], [*v.values()])
        for s in range(k):
            if (centers[s] != begun[s]).any():
                centers[s] = coasting[s].move(begun[s], centers[s])
        if told or fits:
            age = 1 if told else age + 1
        np.testing.assert_allclose(fleet.state.centers, centers, rtol=0, atol=SAME)
        assert fleet.state.assignment == {c: int(np.argmax(shares)) for c, shares in u.items()}
        for c in w:
            np.testing.assert_allclose(fleet.served(c)[0][1], w[c], rtol=0, atol=SAME)


def _shares(centers: F64, data: Dataset, sigma: float) -> F64:
    """The share of the samples for which each center has the least loss, at least sigma (algorithm 1)."""
    best = np.stack([losses(center, data) for center in centers]).argmin(axis=0)
    return np.maximum(np.bincount(best, minlength=len(centers)) / len(data), sigma)


def _weights(
    u: dict[ClientId, F64], n: dict[ClientId, float], fraction: float, select: int, rng: np.random.Generator
) -> dict[ClientId, F64]:
    """u of the cohort, or 1 for each center that drew the device with probability v_sk (eq. 6)."""
    who = sorted(u)
    count = int(np.ceil(fraction * len(who)))
    if count < len(who):
        who = sorted(who[i] for i in rng.choice(len(who), size=count, replace=False))
    if not select or not who:
        return {c: u[c] for c in who}
    v = np.array([u[c] * n[c] for c in who])
    drawn = np.zeros_like(v)
    for s in range(v.shape[1]):
        drawn[rng.choice(len(who), size=min(select, len(who)), replace=False, p=v[:, s] / v[:, s].sum()), s] = 1
    return {c: row for c, row in zip(who, drawn, strict=True) if row.any()}
