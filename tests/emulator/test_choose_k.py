from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.strategies.fesem import FeSEM
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import ConfigError, UsageError
from emulator.choose_k import (
    CRITERIA,
    ClusterCountTrial,
    RecordingStrategy,
    choose_k,
    choose_k_json,
    draw_trials,
    recommend_k,
    run_trials,
    validation_fleet,
)
from emulator.options import SimulateArgs
from emulator.run.execute import run_simulation
from emulator.run.settings import RunSettings
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

FLEET = grouped_fleet(9, 3, n=60)


def trial(k: int, *accuracies: float, silhouette: float = 0.0, distance: float = 1.0) -> ClusterCountTrial:
    per_device = {f"d{i}": a for i, a in enumerate(accuracies)}
    return ClusterCountTrial(
        devices=len(per_device), clusters=k, used=k, per_device=per_device, distance=distance, silhouette=silhouette
    )


def fesem(k: int) -> FeSEM:
    return FeSEM(clusters=k, local_steps=10, batch_size=8)


def test_the_true_number_of_groups_is_recommended_by_every_criterion() -> None:
    devices = devices_of(validation_fleet(FLEET, sample=100, seed=0))
    trials = run_trials([fesem(k) for k in range(1, 6)], start_of(), devices, RunSettings(rounds=3, seed=0, batch=8))
    assert [t.clusters for t in trials] == [1, 2, 3, 4, 5]
    assert {by: recommend_k(trials, by) for by in CRITERIA} == dict.fromkeys(CRITERIA, 3)
    distances = [t.distance for t in trials]
    assert distances == sorted(distances, reverse=True)


def test_the_least_number_that_is_not_clearly_worse_wins() -> None:
    # From 2 to 3 centers the devices gain 0.3, 0.3, 0.2, 0.2; from 3 to 4 they gain 0.02 on average, give or take.
    trials = [trial(2, 0.6, 0.6, 0.6, 0.6), trial(3, 0.9, 0.9, 0.8, 0.8), trial(4, 0.95, 0.8, 0.85, 0.88)]
    assert recommend_k(trials, "accuracy") == 3
    assert recommend_k(list(reversed(trials)), "accuracy") == 3
    assert recommend_k([trial(1, 0.5), trial(2, 0.6)], "accuracy") == 2


def test_of_equal_silhouettes_the_least_number_wins() -> None:
    assert recommend_k([trial(3, 1.0, silhouette=0.4), trial(2, 1.0, silhouette=0.4), trial(1, 1.0)], "silhouette") == 2


@pytest.mark.parametrize(
    ("within", "elbow"),
    [([9.0, 3.0, 2.0, 1.0], 2), ([9.0, 8.0, 2.0, 1.5], 3), ([4.0, 3.0, 2.0, 1.0], 1), ([2.0, 1.0], 1), ([1.0], 1)],
)
def test_the_distance_within_recommends_where_it_bends(within: list[float], elbow: int) -> None:
    trials = [trial(k, 1.0, distance=d) for k, d in enumerate(within, start=1)]
    assert recommend_k(list(reversed(trials)), "distance") == elbow


@given(n=st.lists(st.integers(1, 30), min_size=1, max_size=8), sample=st.integers(1, 10), seed=st.integers(0, 99))
def test_held_out_samples_are_training_samples_that_nobody_trains_on(n: list[int], sample: int, seed: int) -> None:
    kept = Dataset(np.full((4, 1), -1.0), np.zeros(4, np.int64))  # for testing: must not be seen
    devices = {
        f"d{i}": DeviceData(train=Dataset(100.0 * i + np.arange(size)[:, None], np.zeros(size, np.int64)), test=kept)
        for i, size in enumerate(n)
    }
    able = [c for c in devices if len(devices[c].train) > 1]
    if not able:
        with pytest.raises(UsageError):
            validation_fleet(devices, sample=sample, seed=seed)
        return
    dealt = validation_fleet(devices, sample=sample, seed=seed)
    assert len(dealt) == min(sample, len(able))
    for c, local in dealt.items():
        assert local.test is not None
        both = np.concatenate([local.train.x, local.test.x])
        assert sorted(both.ravel()) == sorted(devices[c].train.x.ravel())
        assert len(local.test) >= 1
        assert len(local.train) >= 1


def test_listening_changes_nothing_of_a_run() -> None:
    heard = RecordingStrategy(fesem(2))
    plain, listened = (
        run_simulation(method, start_of(), devices_of(FLEET), RunSettings(rounds=2, seed=0, batch=8))
        for method in (fesem(2), heard)
    )
    np.testing.assert_array_equal(plain.state.centers, listened.state.centers)
    assert sorted(heard.models) == sorted(FLEET)


def test_one_number_does_not_depend_on_those_tried_before() -> None:
    devices = devices_of(FLEET)
    alone, after = (
        run_trials([fesem(k) for k in ks], start_of(), devices, RunSettings(rounds=2, seed=0, batch=8))[-1]
        for ks in ([3], [1, 2, 3])
    )
    assert alone == after
    assert devices.own == {}


def test_every_number_is_reported_and_drawn() -> None:
    asked = SimulateArgs(devices=4, groups=2, rounds=1, settings={"local-steps": 5})
    result = choose_k_json(asked, range(1, 3), "silhouette", sample=4)
    assert [row["clusters"] for row in result["trials"]] == [1, 2]
    assert result["clusters"] == result["recommended"]["silhouette"]
    assert result["devices"] == 4
    assert len(draw_trials(result).axes) == len(result["recommended"])


def test_what_cannot_be_tried_is_refused() -> None:
    with pytest.raises(UsageError):
        choose_k(SimulateArgs(), [])
    with pytest.raises(ConfigError, match="clusters"):
        choose_k(replace(SimulateArgs(), method="fedavg"), [1])
    with pytest.raises(UsageError, match="clusters is what the trials choose"):
        choose_k(replace(SimulateArgs(), settings={"clusters": 2}), [1])
    with pytest.raises(ConfigError, match="by"):
        choose_k_json(SimulateArgs(), [1], "luck", sample=1)
