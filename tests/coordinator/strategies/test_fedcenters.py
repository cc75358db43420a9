from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.strategies.base import State
from coordinator.strategies.common.server_options import ServerOptions
from coordinator.strategies.held_out.evidence import best_candidate, blended_shares
from coordinator.strategies.held_out.fedcenters import FedCenters, Split
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import ConfigError
from edge_client.protocol.task import F64, Fit, Probe
from tests.support.methods import world
from tests.support.softmax_program import FEATURES, grouped_fleet

GROUPS, ALIKE = grouped_fleet(8, 2), grouped_fleet(8, 1)
SETTINGS = {"local_steps": 10, "batch_size": 16, "trial_rounds": 3}


def test_two_groups_that_name_the_same_samples_differently_get_a_center_each() -> None:
    state = world(FedCenters(**SETTINGS), GROUPS, rounds=4).state  # type: ignore[arg-type]  # whole numbers
    assert len(state.centers) == 2
    sides = [state.assignment[c] for c in sorted(GROUPS)]
    assert sides[0] != sides[1]
    assert sides == sides[:2] * 4  # groups alternate


def test_devices_that_are_alike_keep_one_center() -> None:
    assert len(world(FedCenters(**SETTINGS), ALIKE, rounds=4).state.centers) == 1  # type: ignore[arg-type]


def test_devices_of_which_each_differs_from_all_others_keep_one_center() -> None:
    """Its own fit serves such a device better than any mean, and a part that it has for itself is that fit."""
    fleet = {}
    for i, (cid, local) in enumerate(grouped_fleet(FEATURES, 1).items()):
        mixed = Dataset(local.train.x @ np.roll(np.eye(FEATURES), i, axis=0), local.train.y)
        fleet[cid] = DeviceData(train=mixed, test=mixed)
    assert len(world(FedCenters(**SETTINGS), fleet, rounds=4).state.centers) == 1  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12), st.data())
def test_a_device_compares_means_of_others_of_its_part(drawn: list[int], data: st.DataObject) -> None:
    labels = np.unique(drawn, return_inverse=True)[1].astype(np.int64)
    fits = 2.0 ** np.arange(len(labels))  # a sum of these tells who is in it

    def mean(inside: F64) -> F64:
        return (fits @ inside)[:, None]

    split = Split.of(labels, mean)
    i = data.draw(st.integers(0, len(labels) - 1))
    part = np.flatnonzero(labels == labels[i])
    assert split.is_alone(i) == (len(part) == 1)
    if not split.is_alone(i):
        others = [j for j in part if int(split.model(i)[0]) >> j & 1]
        assert fits[others].sum() == split.model(i)[0]
        assert i not in others
        assert len(others) >= len(part) // 2


def test_in_the_trial_no_fit_uses_a_sample_that_decides_and_after_it_all_are_used() -> None:
    fleet = world(FedCenters(**SETTINGS), GROUPS)  # type: ignore[arg-type]
    for number in range(1, 5):
        fleet.round()
        every = [(c, t) for exchange in fleet.exchanges for c, t in exchange.items()]
        tasks = [(c, t) for c, t in every if not (isinstance(t, Probe) and t.split == "test")]
        held = {c: fleet.fleet[c] // 5 for c in fleet.fleet}
        for c, task in tasks:
            if isinstance(task, Fit):
                assert task.rows == (f"all-but:{held[c]}" if number <= 3 else "ones")
            elif isinstance(task, Probe):
                assert (task.limit, task.seed) == (held[c], 0)
        assert any(isinstance(task, Probe) for _, task in tasks) == (number <= 3)


def test_a_device_without_a_share_in_its_personal_model_does_not_train_it() -> None:
    fleet = world(FedCenters(**SETTINGS), GROUPS, rounds=3)  # type: ignore[arg-type]
    shares = {f"share/{c}": np.array([0.7, 0.28, 0.02 if c == "d00" else 0.3]) for c in GROUPS}
    fleet.state = State(
        centers=fleet.state.centers, assignment=fleet.state.assignment, extra={**fleet.state.extra, **shares}
    )
    fleet.round()
    first, second = fleet.exchanges[:2]
    assert set(first) == set(GROUPS)
    assert set(second) == set(GROUPS) - {"d00"}
    assert len(fleet.served("d00")) == 2


def test_with_a_label_prior_shares_are_those_of_the_models_that_are_served() -> None:
    fleet = world(FedCenters(**SETTINGS, label_prior="device"), GROUPS, rounds=1)  # type: ignore[arg-type]
    fleet.round()
    weighed = [t for every in fleet.exchanges for t in every.values() if isinstance(t, Probe) and "posterior" in t.want]
    assert weighed
    assert all(t.label_totals and t.label_totals[0] for t in weighed)


def test_noise_with_a_trial_is_refused() -> None:
    with pytest.raises(ConfigError, match="privacy-noise"):
        FedCenters(server=ServerOptions(privacy_noise=1.0))
    FedCenters(trial_rounds=0, server=ServerOptions(privacy_noise=1.0))


def test_a_gain_must_be_clear_over_the_devices_and_large_enough() -> None:
    one, m = np.ones((6, 1)), np.ones(6)
    spread = np.array([[0.1], [1.9], [0.2], [1.8], [0.0], [0.2]])
    assert best_candidate(np.hstack([one, one - 0.1]), m, 0.2) == 0
    assert best_candidate(np.hstack([one, one - 0.3]), m, 0.2) == 1
    assert best_candidate(np.hstack([one, spread]), m, 0.2) == 0
    assert best_candidate(np.hstack([one, one - 0.3, one - 0.3]), m, 0.2) == 1  # of equals the one with fewer parts
    assert best_candidate(np.hstack([one, one - 0.3])[:2], m[:2], 0.2) == 0


LIES = st.floats(-1.7e308, 1.7e308)


@given(st.lists(st.tuples(LIES, LIES), min_size=10, max_size=10), st.integers(6, 100))
def test_a_tenth_of_the_devices_lying_about_their_losses_prevent_no_clear_split(
    lies: list[tuple[float, float]], devices: int
) -> None:
    now = 1 + 0.1 * np.sin(np.arange(devices))
    losses = np.stack([now, 0.5 * now], axis=1)
    liars = -(-devices // 10)
    losses[:liars] = lies[:liars]
    assert best_candidate(losses, np.ones(devices), 0.2) == 1


@given(st.lists(st.tuples(LIES, LIES), min_size=10, max_size=10), st.integers(6, 100))
def test_a_tenth_of_the_devices_lying_about_their_losses_force_no_split(
    lies: list[tuple[float, float]], devices: int
) -> None:
    losses = np.stack([1 + 0.1 * np.sin(np.arange(devices)), np.ones(devices)], axis=1)
    liars = -(-devices // 10)
    losses[:liars] = lies[:liars]
    assert best_candidate(losses, np.ones(devices), 0.2) == 0


@given(st.floats(0, 1e300) | st.just(float("inf")))
def test_one_device_that_lies_about_its_losses_splits_nothing(lie: float) -> None:
    losses = np.ones((12, 3))
    losses[3] = [lie, 0.0, 0.0]
    assert best_candidate(losses, np.ones(12), 0.2) == 0


@given(st.floats(0, 1e100), st.floats(0, 1), st.integers(3, 12), st.floats(1, 1e9))
def test_one_device_with_many_samples_splits_nothing(now: float, then: float, devices: int, weight: float) -> None:
    losses = np.tile([1.0, 1.0], (devices, 1))
    losses[1] = [now, then]
    assert best_candidate(losses, np.r_[1.0, weight, np.ones(devices - 2)], 0.2) == 0


@given(st.floats(-1e100, 0), st.floats(-1e100, 1e100), st.integers(3, 30))
def test_one_device_that_tells_losses_below_zero_makes_no_small_gain_a_large_one(
    lie: float, other: float, devices: int
) -> None:
    losses = np.tile([1.0, 0.9], (devices, 1))  # clear, and less than the share that is asked for
    losses[1] = [lie, other]
    assert best_candidate(losses, np.ones(devices), 0.2) == 0


def test_losses_of_a_users_own_may_be_below_zero() -> None:
    losses = np.tile([-1.0, -1.5], (6, 1)) + np.linspace(0, 0.1, 6)[:, None]
    assert best_candidate(losses, np.ones(6), 0.2) == 1


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 50)), min_size=1, max_size=8), st.floats(0, 100))
def test_shares_sum_to_one_and_lie_between_a_devices_and_the_fleets(told: list[tuple[float, int]], a: float) -> None:
    mean = {f"d{i}": np.array([r, 1 - r]) for i, (r, _) in enumerate(told)}
    shares, fleet = blended_shares(mean, {f"d{i}": m for i, (_, m) in enumerate(told)}, a)
    for c, share in shares.items():
        assert share.sum() == pytest.approx(1)
        low, high = np.minimum(mean[c], fleet), np.maximum(mean[c], fleet)
        assert ((share >= low - 1e-9) & (share <= high + 1e-9)).all()
