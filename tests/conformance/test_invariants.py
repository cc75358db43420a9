"""Methods that must be one another for some settings, and what no renaming may change: float64, the same seeds.

Every row plays two methods for several rounds on the same devices with unequal numbers of samples and compares what
each device is served, up to rounding: 1e-12 of the largest value. The model has no batch norm. Rows are also played
with half of the fleet in each round, where the two methods then draw the same cohorts and treat new devices alike.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest

from coordinator.strategies.base import State
from coordinator.strategies.registry import METHODS, Setting, method_settings
from edge_client.data.dataset import Dataset, DeviceData
from tests.support.methods import FULL, MethodWorld, build, world
from tests.support.softmax_program import folded, grouped_fleet

UNEQUAL = grouped_fleet(5, 2)
EQUAL = {c: DeviceData(train=Dataset(d.train.x[:40], d.train.y[:40]), test=d.test) for c, d in UNEQUAL.items()}
ONE = {"d00": UNEQUAL["d00"]}
Settings = Mapping[str, Setting]

ONE_STEP: Settings = {"local-steps": 1, "batch-size": FULL, "momentum": 0.0}
ONE_CENTER: Settings = {"clusters": 1}
COASTING: Settings = {"server-momentum": 0.5}
ANEW: Settings = {"clusters": 2, "lam": 0.0, "e-step": "k-means"}
WHOLE = (1.0,)  # of the fleet in every round


@dataclass(frozen=True)
class Same:
    """`left` with its settings is `right` with its settings. `what` says which models: those that devices are served,
    that which a device that never trained is served, or both.
    """

    left: str
    left_settings: Settings
    right: str
    right_settings: Settings = field(default_factory=dict)
    fleet: Mapping[str, DeviceData] = field(default_factory=lambda: UNEQUAL)
    fractions: tuple[float, ...] = (1.0, 0.5)
    what: Literal["all", "devices", "center"] = "all"

    def __str__(self) -> str:
        return f"{self.left}={self.right}" + ("" if self.what == "all" else f":{self.what}")


# fmt: off
ROWS = [
    Same("fedavg-late", {}, "fedavg"),
    Same("fedprox", {"mu": 0.0}, "fedavg"),
    Same("feddist", {"eps": 1.0}, "fedavg", fleet=EQUAL),
    Same("feddws", {"eps": 1.0}, "fedavg"),
    Same("feddws", {}, "feddist", {"weights": "samples"}),
    Same("feddws", {}, "feddist", fleet=EQUAL),
    Same("fedsgd", {}, "fedavg", ONE_STEP),
    Same("feddane", {**ONE_STEP, "mu": 0.0}, "fedsgd", fractions=WHOLE),
    Same("feddane", {**ONE_STEP, "mu": 0.0}, "fedavg", ONE_STEP, fractions=WHOLE),
    Same("fedavg-plus", {"runs": 1}, "fedavg"),
    Same("fedavg-plus", {"runs": 1, **COASTING}, "fedavg", COASTING),
    Same("fedprox-plus", {"runs": 1}, "fedprox"),
    Same("fedprox-plus", {"mu": 0.0, "runs": 3}, "fedavg-plus", {"runs": 3}),
    Same("hypcluster", ONE_CENTER, "fedavg"),
    Same("clove", ONE_CENTER, "fedavg"),
    Same("ifca", ONE_CENTER, "fedavg", fleet=EQUAL),
    Same("ifca", {"clusters": 3}, "hypcluster", {"clusters": 3}, fleet=EQUAL),
    Same("fedcenters", {"trial-rounds": 0}, "fedavg"),
    Same("fedem", ONE_CENTER, "fedavg"),
    Same("fedsoft", {**ONE_CENTER, "lam": 0.0, "local-start": "centers"}, "fedavg", what="center"),
    Same("nonfed", {}, "fedavg", fleet=ONE, what="devices"),
    Same("ditto", {"lam": 0.0}, "nonfed", fractions=WHOLE, what="devices"),
    Same("ditto", {"lam": 0.0}, "fedavg", what="center"),
    Same("ditto", {"lam": 2.0}, "fedavg", what="center"),
    Same("pfedme", {**ONE_STEP, "local-rounds": 1, "beta": 1.0, "lam": 2.0, "eta": 0.25}, "fedsgd",
         {"learning-rate": 0.05}, fleet=EQUAL, what="center"),  # eta lam times the learning rate of 0.1
    Same("fesem", {**ONE_CENTER, "lam": 0.0, "weights": "samples"}, "fedavg"),
    Same("fesem-ma", {"clusters": 2}, "fesem", {"clusters": 2}),  # this model has no hidden units to match
    Same("wecfl", {"clusters": 2}, "fesem", ANEW, fleet=EQUAL),
    Same("wecfl", {"clusters": 2, "weights": "equal"}, "fesem", ANEW),
    Same("wecfl", ONE_CENTER, "fedavg"),
    Same("wecfl", {**ONE_CENTER, **COASTING}, "fedavg", COASTING),
    Same("tkm", {"clusters": 2, "trim-clusters": 0.0, "trim-updates": 0.0}, "fesem", ANEW),
    Same("cfl", {"eps-1": 0.0, "warm-up": 0}, "fedavg"),
    Same("flhc", {"threshold": 1e9, "warm-up": 1}, "fedavg", fractions=WHOLE),
    Same("fedgroup", ONE_CENTER, "fedavg"),
    Same("cam", {"warm-up": 9}, "fedavg"),
    Same("cam", {**ONE_CENTER, "common": False}, "fedavg"),
    Same("cam", {"clusters": 3, "common": False}, "hypcluster", {"clusters": 3}),
    Same("fedrc", {"clusters": 3}, "fedem", {"clusters": 3, "label-prior": "device"}),
    Same("fedrc", {**ONE_CENTER, "label-prior": "model"}, "fedavg"),
    Same("femam", {"level-rounds": 9}, "fedavg"),
    Same("femam", {"level-rounds": 0}, "nonfed", fractions=WHOLE, what="devices"),
    Same("cam-wecfl", {"warm-up": 9}, "fedavg"),
    Same("cam-wecfl", {**ONE_CENTER, "common": False}, "fedavg"),
    Same("cam-wecfl", {"clusters": 2, "common": False}, "wecfl", {"clusters": 2}),
]
# fmt: on


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_method_whose_extra_is_turned_off_is_the_simpler_method(row: Same) -> None:
    whose: dict[str, list[str | None]] = {"all": [*row.fleet, None], "devices": [*row.fleet], "center": [None]}
    for fraction in row.fractions:
        left, right = (
            world(build(name, {**settings, "fraction-train": fraction}), row.fleet)
            for name, settings in ((row.left, row.left_settings), (row.right, row.right_settings))
        )
        for _ in range(4):
            reports = [left.round(), right.round()]
            for who in whose[row.what]:
                assert_served_the_same(left, right, who)
            if row.what != "center":
                assert reports[0].per_device == reports[1].per_device


def test_every_method_but_the_simplest_has_a_row() -> None:
    assert {row.left for row in ROWS} == set(METHODS) - {"fedavg"}


# names and numbers


SPLITS = tuple(f"{name} warm-up=1 server-momentum=0.5" for name in ("cfl", "flhc"))  # and what moved is divided


@pytest.mark.every_method([*sorted(METHODS), *SPLITS])
def test_exchanging_the_names_of_devices_changes_no_metric(name: str) -> None:
    # In every step all samples, and no groups drawn: seeds follow names. Sums run in another order, hence a tolerance.
    order = np.random.default_rng(1).permutation(len(UNEQUAL))
    names = dict(zip(sorted(UNEQUAL), [sorted(UNEQUAL)[i] for i in order], strict=True))
    redrawn = "e-step" not in method_settings(build(name))  # else k-means, which draws no groups of devices
    method = build(name, {"batch-size": FULL, "start": "redraw" if redrawn else "k-means"})
    first, second = world(method, UNEQUAL), world(method, {names[c]: local for c, local in UNEQUAL.items()})
    for _ in range(4):
        one, other = first.round(), second.round()
        assert {names[c]: value for c, value in one.per_device.items()} == other.per_device
        assert one.accuracy.micro == pytest.approx(other.accuracy.micro)
        assert one.f1_of_devices.macro == pytest.approx(other.f1_of_devices.macro)
        for c in UNEQUAL:
            assert_served_the_same(first, second, c, names[c], atol=1e-9)


@pytest.mark.every_method(sorted(METHODS))
def test_cohorts_are_drawn_by_the_order_of_names_and_not_by_the_names(name: str) -> None:
    names = {c: f"z-{c}" for c in UNEQUAL}
    method = build(name, {"batch-size": FULL, "fraction-train": 0.5})
    first, second = world(method, UNEQUAL), world(method, {names[c]: local for c, local in UNEQUAL.items()})
    for _ in range(4):
        assert {names[c]: v for c, v in first.round().per_device.items()} == second.round().per_device
        asked = [[sorted(names.get(c, c) for c in exchange) for exchange in w.exchanges] for w in (first, second)]
        assert asked[0] == asked[1]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_exchanging_the_numbers_of_centers_exchanges_them_and_changes_nothing_else(name: str) -> None:
    first = world(build(name, {"batch-size": FULL}, k=3), UNEQUAL, rounds=4)
    order = np.roll(np.arange(len(first.state.centers)), 1)  # the new number of every center
    second = MethodWorld(
        first.strategy, copy.deepcopy(first.devices), renumbered(first.state, order), number=first.number
    )
    one, other = first.round(), second.round()
    assert one.per_device == other.per_device
    assert (one.accuracy, one.f1_of_devices) == (other.accuracy, other.f1_of_devices)
    assert {c: int(order[k]) for c, k in first.state.assignment.items()} == second.state.assignment
    scale = np.abs(first.state.centers).max()
    np.testing.assert_allclose(first.state.centers, second.state.centers[order], rtol=0, atol=1e-12 * scale)


PER_CENTER = ("pi/", "u/", "label-totals")  # entries of State.extra with a number or a row per center


def renumbered(state: State, order: np.ndarray) -> State:
    """The same state with other numbers: what center k was is center order[k]."""
    inverse = np.argsort(order)
    return State(
        centers=state.centers[inverse],
        assignment={c: int(order[k]) for c, k in state.assignment.items()},
        extra={key: v[inverse] if key.startswith(PER_CENTER) else v for key, v in state.extra.items()},
    )


def assert_served_the_same(
    left: MethodWorld, right: MethodWorld, who: str | None, other: str | None = None, *, atol: float = 1e-12
) -> None:
    """`who` on the left and `other` (or `who`) on the right; `atol` is a share of the largest value."""
    ours, theirs = left.served(who), right.served(other or who)
    assert [weight for weight, _ in ours] == pytest.approx([weight for weight, _ in theirs])
    for (_, a), (_, b) in zip(
        [(w, folded(m, left.members)) for w, m in ours], [(w, folded(m, right.members)) for w, m in theirs], strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol * np.abs(b).max())
