from __future__ import annotations

import numpy as np

from coordinator.strategies.baselines.ditto import Ditto
from edge_client.protocol.task import Fit, OwnModel
from tests.support.driven_rounds import DrivenMethod
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

LOCAL = grouped_fleet(5, 2)


def driven(lam: float, rounds: int = 3, fraction: float = 1.0, common_weight: float = 0.0) -> DrivenMethod:
    ditto = Ditto(local_steps=5, batch_size=8, lam=lam, fraction_train=fraction, common_weight=common_weight)
    run = DrivenMethod(ditto, devices_of(LOCAL), start_of())
    run.play(rounds)
    return run


def test_a_personal_model_begins_at_the_first_common_model_and_stays_at_home() -> None:
    run = driven(0.5, rounds=2)
    for _, personal in run.asked:
        assert all(isinstance(task, Fit) and not task.upload for task in personal.values())
        for task in personal.values():
            np.testing.assert_array_equal(task.init, start_of())  # type: ignore[union-attr]
    assert all(reply.update is None for said in run.said for reply in said[1].values())


def test_who_misses_the_personal_exchange_costs_nobody_anything() -> None:
    method, devices = Ditto(local_steps=5, batch_size=8), devices_of(LOCAL)
    run = DrivenMethod(method, devices, start_of(), answers=lambda _r, e, c, _t: (e, c) != (1, "d01"))
    run.play(3)
    np.testing.assert_array_equal(run.state.centers, driven(0.3).state.centers)
    assert ("d01", "personal") not in run.devices.own


def test_a_device_is_served_its_personal_model_and_a_newcomer_the_common_one() -> None:
    run = driven(0.5)
    ((_, served),) = run.strategy.predictor(run.state, "d00")
    assert isinstance(served, OwnModel)
    assert served.slot == "personal"
    np.testing.assert_array_equal(served.init, run.state.centers[0])
    np.testing.assert_array_equal(np.asarray(run.strategy.predictor(run.state, None)[0][1]), run.state.centers[0])


def test_with_a_common_weight_a_device_is_served_both_models_and_training_is_the_same() -> None:
    plain, both = driven(0.5), driven(0.5, common_weight=0.25)
    np.testing.assert_array_equal(both.state.centers, plain.state.centers)
    (own, personal), (weight, common) = both.strategy.predictor(both.state, "d00")
    assert (own, weight) == (0.75, 0.25)
    assert isinstance(personal, OwnModel)
    np.testing.assert_array_equal(np.asarray(common), both.state.centers[0])
    np.testing.assert_array_equal(np.asarray(both.strategy.predictor(both.state, None)[0][1]), both.state.centers[0])
    ((one, alone),) = Ditto(common_weight=1.0).predictor(both.state, "d00")
    assert one == 1.0
    np.testing.assert_array_equal(np.asarray(alone), both.state.centers[0])
