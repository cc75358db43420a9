from __future__ import annotations

import numpy as np

from coordinator.rounds.round import round_rng, run_round
from coordinator.strategies.base import drive
from coordinator.strategies.baselines.nonfed import NonFed
from edge_client.protocol.task import OwnModel, Probe
from tests.support.driven_rounds import DrivenMethod
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

LOCAL = grouped_fleet(4, 2)
METHOD = NonFed(local_steps=6, batch_size=8)


def test_nobody_learns_from_anybody() -> None:
    together, alone = (
        DrivenMethod(METHOD, devices_of(LOCAL), start_of()),
        DrivenMethod(METHOD, devices_of({"d01": LOCAL["d01"]}), start_of()),
    )
    together.play(2)
    alone.play(2)
    np.testing.assert_array_equal(together.own("d01", "main"), alone.own("d01", "main"))


def test_no_model_reaches_the_server_and_its_state_stays_as_it_began() -> None:
    run = DrivenMethod(METHOD, devices_of(LOCAL), start_of())
    before = run.state
    assert run.play(3) is before
    assert all(reply.update is None for said in run.said for replies in said for reply in replies.values())
    assert np.array_equal(before.centers, start_of()[None])


def test_a_device_that_sat_out_goes_on_from_its_own_model() -> None:
    run = DrivenMethod(METHOD, devices_of(LOCAL), start_of(), answers=lambda r, _e, c, _t: (r, c) != (2, "d02"))
    run.play(1)
    before = run.own("d02", "main").copy()
    run.play(1)
    np.testing.assert_array_equal(run.own("d02", "main"), before)
    run.play(1)
    assert not np.array_equal(run.own("d02", "main"), before)


def test_everybody_is_tested_with_its_own_model_and_a_newcomer_gets_the_common_start() -> None:
    """Two groups that write the classes differently: one model cannot serve both, own models can."""
    devices = devices_of(LOCAL)
    method, fleet, schema = NonFed(batch_size=8), devices.fleet, devices.program.schema
    state = method.begin(start_of(), schema, fleet, round_rng(0, 0))
    for number in (1, 2, 3):
        state, report = drive(
            run_round(method, state, schema, fleet, round_rng(0, number), batch=8),
            lambda exchange: {c: devices.answer(c, task) for c, task in exchange.items()},
        )
    assert min(report.per_device.values()) > 0.9
    assert (report.per_center, report.assignment) == ((None,), {})
    ((_, served),), ((_, common),) = method.predictor(state, "d00"), method.predictor(state, None)
    assert isinstance(served, OwnModel)
    np.testing.assert_array_equal(np.asarray(common), start_of())


def test_a_device_that_never_answers_is_tested_with_the_common_start() -> None:
    devices = devices_of(LOCAL)
    run = DrivenMethod(METHOD, devices, start_of(), answers=lambda _r, _e, c, _t: c != "d03")
    run.play(2)
    assert ("d03", "main") not in devices.own
    state, report = drive(
        run_round(METHOD, run.state, devices.program.schema, devices.fleet, round_rng(0, 3), batch=8),
        lambda exchange: {c: devices.answer(c, t) for c, t in exchange.items() if c != "d03" or isinstance(t, Probe)},
    )
    assert (state.centers == run.state.centers).all()
    assert not state.assignment
    assert report.per_device["d03"] < min(report.per_device[c] for c in ("d00", "d01", "d02"))
