from __future__ import annotations

import numpy as np

from coordinator.strategies.baselines.pfedme import PFedMe
from edge_client.protocol.task import Flat, OwnModel, Probe
from emulator.simulation.emulated_devices import EmulatedDevices
from tests.support.driven_rounds import DrivenMethod
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

LOCAL = grouped_fleet(4, 2)
LR, LAM, ETA = 0.2, 0.8, 0.5
ONE_STEP = {"local_steps": 1, "learning_rate": LR, "momentum": 0.0, "batch_size": 64, "lam": LAM, "eta": ETA}


def method(**changes: float) -> PFedMe:
    return PFedMe(**{**ONE_STEP, **changes})  # type: ignore[arg-type]  # numbers, some whole


def gradient(devices: EmulatedDevices, who: str, w: Flat) -> Flat:
    """Of f_i at w over all local data, by the probe that does nothing else."""
    grad = devices.answer(who, Probe(models=[w], want=frozenset({"grad"}), batch=64, seed=0)).grad
    assert grad is not None
    return grad


def test_with_one_inner_step_it_is_gradient_descent_with_rate_eta_lam_lr() -> None:
    """theta_i = w - lr grad f_i(w), so w moves by eta lam lr times the mean gradient."""
    run = DrivenMethod(method(local_rounds=1), devices_of(LOCAL), start_of())
    run.play(1)
    mean = np.mean([gradient(run.devices, c, start_of()) for c in LOCAL], axis=0)
    np.testing.assert_allclose(run.state.centers[0], start_of() - ETA * LAM * LR * mean, rtol=1e-12)


def test_local_rounds_move_each_devices_own_w_and_beta_mixes_their_mean() -> None:
    run = DrivenMethod(method(local_rounds=3, beta=0.25), devices_of(LOCAL), start_of())
    run.play(1)
    ends = []
    for c in LOCAL:
        w = start_of()
        for _ in range(3):
            theta = w - LR * gradient(run.devices, c, w)
            w = w - ETA * LAM * (w - theta)
        ends.append(w)
        np.testing.assert_allclose(run.own(c, "personal"), theta, rtol=1e-12)
    np.testing.assert_allclose(run.state.centers[0], 0.75 * start_of() + 0.25 * np.mean(ends, axis=0), rtol=1e-12)
    assert len(run.asked[0]) == 3


def test_the_inner_problem_is_pulled_to_the_devices_own_w() -> None:
    """After many steps theta solves grad f_i(theta) + lam (theta - w_i) = 0."""
    run = DrivenMethod(method(local_rounds=1, local_steps=400), devices_of(LOCAL), start_of())
    run.play(1)
    for c in LOCAL:
        theta = run.own(c, "personal")
        np.testing.assert_allclose(gradient(run.devices, c, theta) + LAM * (theta - start_of()), 0, atol=1e-9)


def test_who_misses_one_local_round_does_not_count_in_the_mean() -> None:
    gone = DrivenMethod(
        method(local_rounds=2), devices_of(LOCAL), start_of(), answers=lambda _r, e, c, _t: (e, c) != (1, "d01")
    )
    without = DrivenMethod(
        method(local_rounds=2), devices_of({c: v for c, v in LOCAL.items() if c != "d01"}), start_of()
    )
    np.testing.assert_allclose(gone.play(1).centers, without.play(1).centers, rtol=1e-12)


def test_a_fleet_that_falls_silent_half_way_leaves_the_model_as_it_was() -> None:
    run = DrivenMethod(method(local_rounds=2), devices_of(LOCAL), start_of(), answers=lambda _r, e, _c, _t: e == 0)
    before = run.state
    assert run.play(1) is before


def test_a_device_is_served_theta_and_a_newcomer_w() -> None:
    run = DrivenMethod(method(), devices_of(LOCAL), start_of())
    state = run.play(1)
    ((_, served),) = run.strategy.predictor(state, "d00")
    assert isinstance(served, OwnModel)
    np.testing.assert_array_equal(np.asarray(run.strategy.predictor(state, None)[0][1]), state.centers[0])
