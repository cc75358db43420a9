from __future__ import annotations

import numpy as np

from coordinator.strategies.baselines.pfedme import PFedMe
from edge_client.protocol.task import OwnModel
from tests.support.driven_rounds import DrivenMethod
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

LOCAL = grouped_fleet(4, 2)
LR, LAM, ETA = 0.2, 0.8, 0.5
ONE_STEP = {"local_steps": 1, "learning_rate": LR, "momentum": 0.0, "batch_size": 64, "lam": LAM, "eta": ETA}


def method(**changes: float) -> PFedMe:
    return PFedMe(**{**ONE_STEP, **changes})  # type: ignore[arg-type]  # numbers, some whole


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
