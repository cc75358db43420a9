"""Every method that makes centers takes every robust reduce, by one setting: float64, on the tests' small problem."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from coordinator.aggregation.robust import REDUCER_NAMES
from coordinator.strategies.registry import METHODS, make_method, method_settings
from edge_client.protocol.task import Flat
from tests.support.methods import FULL, build, reduced_by, world
from tests.support.softmax_program import grouped_fleet

LOCAL = grouped_fleet(6, 1)
ALIKE = dict.fromkeys(LOCAL, LOCAL["d00"])
MAKING_CENTERS = [
    name for name in sorted(METHODS) if name != "nonfed" and "reduce" in method_settings(make_method(name))
]
pairs = pytest.mark.parametrize(
    ("name", "reduce"), [(name, reduce) for name in MAKING_CENTERS for reduce in REDUCER_NAMES[1:]]
)
MEAN_OF = {"tkm": "fesem e-step=k-means lam=0.0"}  # a method that knows no plain mean, and what it is with one


@cache
def centers_of_the_mean(name: str) -> Flat:
    """After two rounds of devices that are alike, without groups to tell apart."""
    return world(build(name, {"batch-size": FULL, "clusters": 1}), ALIKE, rounds=2).state.centers


@pairs
def test_devices_that_are_alike_have_the_centers_of_the_mean(name: str, reduce: str) -> None:
    """In every step all samples, so that seeds, which follow names, decide nothing; no groups to tell apart."""
    robust = world(build(name, {"batch-size": FULL, "clusters": 1, "reduce": reduce}), ALIKE, rounds=2)
    np.testing.assert_allclose(robust.state.centers, centers_of_the_mean(MEAN_OF.get(name, name)), atol=1e-9)


@pairs
def test_every_center_learns(name: str, reduce: str) -> None:
    fleet = world(build(name, {"local-steps": 6, **reduced_by(reduce, 0.3)}), LOCAL)
    for _ in range(4):
        report = fleet.round()
    assert np.isfinite(fleet.state.centers).all()
    assert report.accuracy.micro is not None
    assert report.accuracy.micro > 0.4  # of four classes
