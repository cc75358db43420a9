from __future__ import annotations

import numpy as np
import pytest

from coordinator.rounds.round import serving_probe
from coordinator.strategies.fedem import FedEM
from edge_client.protocol.task import Probe
from tests.support.driven_rounds import DrivenMethod
from tests.support.regression import RegressionWorld, world
from tests.support.regression import play as regress
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

LOCAL = grouped_fleet(6, 2)
FULL = {"local_steps": 5, "learning_rate": 0.1, "momentum": 0.0, "batch_size": 256}


def em(clusters: int = 2, **changes: float) -> FedEM:
    return FedEM(clusters=clusters, start="redraw", **{**FULL, **changes})  # type: ignore[arg-type]  # numbers, some whole


@pytest.mark.parametrize("partition", ["10:90", "random"])
def test_it_recovers_both_models_of_a_mixture_down_to_the_noise(partition: str) -> None:
    """Mean squared error 1 is the noise itself; a method that averages what devices mix cannot get below 20 here."""
    on = world(partition, 10, seed=1)
    states = regress(em(), on, rounds=40)
    own, other = on.own_and_other(states[-1].centers)
    assert own < 1.05
    assert other > 150
    mixed = np.array([states[-1].extra[f"pi/{c}"] for c in sorted(on.devices.local)])
    order = on.errors(states[-1].centers).argmin(axis=0)  # distribution s is model order[s]
    if partition == "10:90":
        np.testing.assert_allclose(mixed[:5, order[0]], 0.1, atol=0.05)
        np.testing.assert_allclose(mixed[5:, order[0]], 0.9, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["10:90", "random"])
@pytest.mark.parametrize("start", ["redraw", "groups"])
def test_no_seed_loses_a_model(partition: str, start: str) -> None:
    for seed in range(6):
        on = world(partition, 20, seed=seed)
        states = regress(FedEM(clusters=2, start=start, **FULL), on, rounds=60, seed=seed)  # type: ignore[arg-type]
        assert on.own_and_other(states[-1].centers)[0] < 1.02


def half_way(on: RegressionWorld) -> DrivenMethod:
    """d000 answers probes and never fits; d001 never answers at all."""
    return DrivenMethod(
        em(), on.devices, on.start, answers=lambda _r, _e, c, t: c != "d001" and (c != "d000" or isinstance(t, Probe))
    )


def test_who_only_probes_has_a_mixture_and_no_part_in_the_models() -> None:
    on = world("10:90", 5, seed=0)
    run = half_way(on)
    run.play(1)
    alone = DrivenMethod(em(), on.devices, on.start, answers=lambda _r, _e, c, _t: c not in ("d000", "d001"))
    alone.play(1)
    np.testing.assert_array_equal(run.state.centers, alone.state.centers)
    assert sorted(run.state.assignment) == ["d000", "d002", "d003", "d004"]


def test_a_newcomer_is_served_the_fleets_mean_mixture_and_a_device_its_own() -> None:
    on = world("linear", 5, seed=0)
    run = half_way(on)
    state = run.play(3)
    pi = np.array([state.extra[f"pi/{c}"] for c in ("d000", "d002", "d003", "d004")])
    mixtures = {who: [weight for weight, _ in run.strategy.predictor(state, who)] for who in (None, "d001", "d002")}
    np.testing.assert_allclose(mixtures[None], pi.mean(axis=0))
    assert mixtures["d001"] == mixtures[None]
    np.testing.assert_allclose(mixtures["d002"], pi[1])
    task = serving_probe(run.strategy, state, "d002", batch=8)
    assert task.prior == mixtures["d002"]


def test_before_the_first_round_all_models_weigh_the_same() -> None:
    run = DrivenMethod(em(clusters=4), devices_of(LOCAL), start_of())
    assert [weight for weight, _ in run.strategy.predictor(run.state, "d00")] == [0.25] * 4


def test_a_fit_weighs_samples_by_the_shares_that_stayed_on_the_device() -> None:
    run = DrivenMethod(em(clusters=3), devices_of(LOCAL), start_of())
    run.play(1)
    rows = [{task.rows for task in exchange.values()} for exchange in run.asked[0][1:]]  # type: ignore[union-attr]
    assert rows == [{"posterior:0"}, {"posterior:1"}, {"posterior:2"}]
    assert all(reply.posterior is not None and reply.posterior.shape == (3,) for reply in run.said[0][0].values())
