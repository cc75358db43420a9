"""Methods with one common model against their formulas: cohorts, uneven devices, and some that do not answer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coordinator.rounds.round import round_rng
from edge_client.data.dataset import Dataset
from edge_client.protocol.task import ClientId, Fit, Flat
from tests.support.methods import build, world
from tests.support.plain_loops import SAME, PlainMomentum, fit, mean, seeds
from tests.support.softmax_gradient import gradient
from tests.support.uneven_fleets import away, uneven_fleet

ROUNDS, RATE = 6, 0.1
every_seed = pytest.mark.parametrize("seed", [0, 1])
shares = pytest.mark.parametrize("fraction", [1.0, 0.6])


def fleet_data(seed: int) -> dict[ClientId, Dataset]:
    return {c: local.train for c, local in uneven_fleet(2, seed).items()}


def cohorts(draws: int, m: int, fraction: float, seed: int, number: int) -> list[list[int]]:
    """The first draws of a round: ceil(fraction m) of m devices each; nothing is drawn for all of them."""
    rng, count = round_rng(seed, number), math.ceil(fraction * m)
    return [
        [*range(m)] if count == m else sorted(rng.choice(m, size=count, replace=False).tolist()) for _ in range(draws)
    ]


@every_seed
@shares
@pytest.mark.parametrize(
    ("case", "eps", "by_samples", "beta"),
    [("fedavg", 1.0, True, 0.5), ("feddist eps=0.6", 0.6, False, 0.0), ("feddws eps=0.3", 0.3, True, 0.5)],
)
def test_reptiles_outer_step_goes_part_of_the_way_to_the_mean_of_who_answered(
    case: str,
    eps: float,
    by_samples: bool,  # noqa: FBT001
    fraction: float,
    beta: float,
    seed: int,
) -> None:
    data = fleet_data(seed)
    fleet = world(build(case, {"fraction-train": fraction, "server-momentum": beta}), uneven_fleet(2, seed), seed=seed)
    w, coasting = fleet.state.centers[0].copy(), PlainMomentum(beta)
    for number in range(1, ROUNDS + 1):
        gone = away(number, data, seed)
        fleet.round(silent=gone)
        told = seeds(fleet, 0)
        assert [*told] == [sorted(data)[i] for i in cohorts(1, len(data), fraction, seed, number)[0]]
        if here := [c for c in told if c not in gone]:
            a = [float(len(data[c])) if by_samples else 1.0 for c in here]
            new = mean([fit(w, data[c], told[c]) for c in here], a)
            w = coasting.move(w, (1 - eps) * w + eps * new)
        np.testing.assert_allclose(fleet.state.centers[0], w, rtol=0, atol=SAME)


@every_seed
@shares
def test_fedsgd_steps_along_the_mean_gradient_of_who_answered(fraction: float, seed: int) -> None:
    data = fleet_data(seed)
    fleet = world(build("fedsgd", {"fraction-train": fraction}), uneven_fleet(2, seed), seed=seed)
    w = fleet.state.centers[0].copy()
    for number in range(1, ROUNDS + 1):
        gone = away(number, data, seed)
        fleet.round(silent=gone)
        if here := [c for c in fleet.exchanges[0] if c not in gone]:
            w = w - RATE * mean([gradient(w, data[c]) for c in here], [float(len(data[c])) for c in here])
        np.testing.assert_allclose(fleet.state.centers[0], w, rtol=0, atol=SAME)


@every_seed
@shares
@pytest.mark.parametrize(("mu", "beta"), [(0.0, 0.0), (0.5, 0.0), (0.1, 0.5)])
def test_feddane_corrects_the_gradients_of_one_cohort_by_those_of_another(
    mu: float, beta: float, fraction: float, seed: int
) -> None:
    data = fleet_data(seed)
    settings = {"fraction-train": fraction, "mu": mu, "server-momentum": beta}
    fleet = world(build("feddane", settings), uneven_fleet(2, seed), seed=seed)
    w, coasting, who = fleet.state.centers[0].copy(), PlainMomentum(beta), sorted(data)
    for number in range(1, ROUNDS + 1):
        gone, late = away(number, data, seed), away(number, data, seed + 50)
        fleet.round(silent_in={0: gone, 1: late})
        averaged, fitted = cohorts(2, len(data), fraction, seed, number)
        of_s = [who[i] for i in averaged if who[i] not in gone]
        of_fitted = [who[i] for i in fitted if who[i] not in gone]
        assert [*fleet.exchanges[0]] == sorted({who[i] for i in [*averaged, *fitted]})
        if of_s and of_fitted:
            told = seeds(fleet, 1)
            assert [*told] == of_fitted
            grad = {c: gradient(w, data[c]) for c in {*of_s, *of_fitted}}
            g = mean([grad[c] for c in of_s], [float(len(data[c])) for c in of_s])
            here = [c for c in of_fitted if c not in late]
            if here:
                solved = [fit(w, data[c], told[c], mu=mu, anchor=w, linear=g - grad[c]) for c in here]
                w = coasting.move(w, mean(solved, [float(len(data[c])) for c in here]))
        np.testing.assert_allclose(fleet.state.centers[0], w, rtol=0, atol=SAME)


@every_seed
@shares
@pytest.mark.parametrize(("lam", "eta", "local_rounds", "beta"), [(0.1, 5.0, 2, 1.0), (0.7, 1.0, 3, 0.4)])
def test_pfedme_moves_each_copy_to_its_personal_model_and_w_to_the_mean_of_the_copies(
    lam: float, eta: float, local_rounds: int, beta: float, fraction: float, seed: int
) -> None:
    data = fleet_data(seed)
    own = {"lam": lam, "eta": eta, "local-rounds": local_rounds, "beta": beta, "fraction-train": fraction}
    fleet = world(build("pfedme", own), uneven_fleet(2, seed), seed=seed)
    w, personal = fleet.state.centers[0].copy(), dict[ClientId, Flat]()
    for number in range(1, ROUNDS + 1):
        gone = {r: away(number, data, seed + 50 * r) for r in range(local_rounds)}
        fleet.round(silent_in=gone)
        copies = dict.fromkeys((c for c, task in fleet.exchanges[0].items() if isinstance(task, Fit)), w)
        for r in range(local_rounds):
            told = seeds(fleet, r)
            theta = {c: fit(w_i, data[c], told[c], mu=lam, anchor=w_i) for c, w_i in copies.items() if c not in gone[r]}
            copies = {c: copies[c] - eta * lam * (copies[c] - t) for c, t in theta.items()}
            personal |= theta
            if not copies:
                break
        if copies:
            w = (1 - beta) * w + beta * mean([*copies.values()], [1.0] * len(copies))
        np.testing.assert_allclose(fleet.state.centers[0], w, rtol=0, atol=SAME)
        for c in data:
            ((_, served),) = fleet.served(c)
            np.testing.assert_allclose(served, personal.get(c, w), rtol=0, atol=SAME)
