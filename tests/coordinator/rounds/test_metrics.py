from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    adjusted_rand_score,
    confusion_matrix,
    f1_score,
    normalized_mutual_info_score,
)

from coordinator.rounds.metrics import (
    FleetAverage,
    accuracy,
    ari,
    f1,
    last_rounds,
    make_center_report,
    make_report,
    nmi,
    purity,
)
from coordinator.rounds.round_record import round_record, upgraded_record


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40))
def test_accuracy_and_f1_are_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    truth, found = np.array(pairs).T
    matrix = confusion_matrix(truth, found, labels=np.arange(5))
    assert np.isclose(accuracy(matrix), accuracy_score(truth, found))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class that occurs on one side only
        assert np.isclose(f1(matrix), f1_score(truth, found, average="macro", zero_division=0))


def test_micro_pools_samples_and_macro_counts_devices_equally() -> None:
    outcome = make_report({"a": np.diag([3, 3]), "b": np.array([[1, 1], [0, 0]])}, {"a": 0, "b": 1}, n_centers=3)
    assert outcome.accuracy == FleetAverage(micro=7 / 8, macro=3 / 4)
    assert outcome.per_device == {"a": 1.0, "b": 0.5}
    assert outcome.per_center == (1.0, 0.5, None)


def test_f1_of_devices_averages_each_device_and_pooled_f1_takes_all_samples_together() -> None:
    matrices = {"a": np.array([[6, 0], [2, 0]]), "b": np.array([[0, 0], [0, 2]])}
    outcome = make_report(matrices, {}, n_centers=0)
    alone = (2 * 6 / 14 + 0) / 2, 1.0
    assert outcome.f1_of_devices == FleetAverage(micro=(8 * alone[0] + 2 * alone[1]) / 10, macro=sum(alone) / 2)
    truth, found = [0] * 6 + [1] * 4, [0] * 8 + [1] * 2
    assert outcome.f1_pooled == f1_score(truth, found, average="macro")
    more = make_report({**matrices, "c": np.diag([1, 1, 1])}, {}, n_centers=0)  # one that claims a third class
    assert more.f1_pooled == outcome.f1_pooled


def test_the_record_of_an_older_version_gets_the_present_names() -> None:
    old = {"event": "round", "f1": {"micro": 0.5, "macro": 0.25}, "round": 3, "per_center": [0.5]}
    new = upgraded_record(old)
    assert (new["f1_of_devices"], new["f1_pooled"]) == ({"weighted": 0.5, "unweighted": 0.25}, None)
    unknown: dict[str, Any] = {"accuracy": {"micro": None, "macro": None}, "per_center": [None], "per_device": [{}]}
    assert (new["centers"], new["round"], "f1" in new) == (unknown, 3, False)
    assert upgraded_record(new) == new


def test_centers_are_scored_on_their_own_devices() -> None:
    labels = {(0, "a"): (6.0, 6.0), (0, "b"): (2.0, 1.0), (1, "c"): (0.0, 0.0)}  # how many, how many right
    outcome = make_center_report(labels, n_centers=2)
    assert outcome.accuracy == FleetAverage(micro=7 / 8, macro=3 / 4)
    assert outcome.per_center == (7 / 8, None)
    assert outcome.per_device == ({"a": 1.0, "b": 0.5}, {})


def test_losses_are_averaged_like_accuracies_over_the_devices_that_told_theirs() -> None:
    matrices = {"a": np.diag([3, 3]), "b": np.diag([1, 1]), "c": np.diag([1, 1])}
    outcome = make_report(matrices, {"a": 0, "b": 0, "c": 1}, n_centers=2, losses={"a": 1.0, "b": 2.0})
    assert outcome.loss == FleetAverage(micro=(6 * 1.0 + 2 * 2.0) / 8, macro=1.5)
    assert outcome.loss_per_center == (outcome.loss.micro, None)
    record = round_record(outcome, run="r", method="m", round=1, of=2, bytes_down=3, bytes_up=4, seconds=0.5)
    assert record["loss_per_center"] == [outcome.loss.micro, None]


def test_losses_are_bounded_by_guessing_among_the_most_classes_that_a_device_told() -> None:
    """Ten times log 10, where the median is lower; a device that tells of two classes changes nothing."""
    matrices = {"a": np.eye(10), "b": np.eye(10), "c": np.eye(2)}
    outcome = make_report(matrices, dict.fromkeys("abc", 0), n_centers=1, losses={"a": 0.1, "b": 1e6, "c": 0.1})
    assert outcome.loss.macro == pytest.approx((0.1 + 10 * math.log(10) + 0.1) / 3)


def test_a_loss_that_no_sum_could_hold_counts_as_none() -> None:
    matrices = {c: np.diag([3, 3]) for c in "abcd"}
    told = {"a": 1.7e308, "b": float("inf"), "c": float("nan"), "d": 0.5}
    outcome = make_report(matrices, dict.fromkeys("abcd", 0), n_centers=1, losses=told)
    assert outcome.loss == FleetAverage(micro=0.5, macro=0.5)
    assert "loss" not in round_record(
        make_report(matrices, {}, n_centers=1, losses={"a": 1e31}),
        run="r",
        method="m",
        round=1,
        of=2,
        bytes_down=3,
        bytes_up=4,
        seconds=0.5,
    )


def test_relabelled_centers_change_no_score_and_permute_per_center() -> None:
    matrices = {c: np.random.default_rng(i).integers(1, 9, (3, 3)) for i, c in enumerate("abcd")}
    first = make_report(matrices, dict(zip("abcd", [0, 1, 1, 0], strict=True)), n_centers=2)
    second = make_report(matrices, dict(zip("abcd", [1, 0, 0, 1], strict=True)), n_centers=2)
    assert (first.accuracy, first.f1_of_devices, first.f1_pooled) == (
        second.accuracy,
        second.f1_of_devices,
        second.f1_pooled,
    )
    assert first.per_device == second.per_device
    assert first.per_center == second.per_center[::-1]


def test_silence_gives_no_score_and_still_valid_json() -> None:
    outcome = make_report({}, {"a": 0}, n_centers=1)
    assert outcome.accuracy == FleetAverage(micro=None, macro=None)
    record = round_record(outcome, run="r", method="m", round=1, of=2, bytes_down=3, bytes_up=4, seconds=0.5)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["bytes"] == {"down": 3, "up": 4}


def test_of_a_large_fleet_a_record_has_the_centers_of_those_that_evaluated() -> None:
    """A line of metrics.jsonl with a million names is 20 MB."""
    most = {f"d{i:05d}": i % 2 for i in range(10_000)}
    told = {"d00007": np.eye(2), "zz": np.eye(2)}
    assert make_report(told, most, n_centers=2).assignment == most
    assert make_report(told, {**most, "one-more": 0}, n_centers=2).assignment == {"d00007": 1}


def test_partition_scores_do_not_care_about_names() -> None:
    assert ari([0, 0, 1, 1], [5, 5, 2, 2]) == 1.0
    assert nmi([0, 0, 1, 1], [5, 5, 2, 2]) == 1.0
    assert ari([0, 0, 1, 1], [0, 0, 0, 0]) == 0.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 3)), max_size=40))
def test_partition_scores_are_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    truth, found = ([pair[side] for pair in pairs] for side in (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as many labels as members
        assert ari(truth, found) == adjusted_rand_score(truth, found)
        assert np.isclose(nmi(truth, found), normalized_mutual_info_score(truth, found), rtol=0, atol=1e-12)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 3)), min_size=1, max_size=30))
def test_purity_is_the_share_that_a_majority_vote_in_each_cluster_gets_right(pairs: list[tuple[int, int]]) -> None:
    truth, found = zip(*pairs, strict=True)
    votes = {k: Counter(t for t, f in pairs if f == k).most_common(1)[0][1] for k in set(found)}
    assert np.isclose(purity(truth, found), sum(votes.values()) / len(pairs))


def test_a_tables_figure_is_the_mean_of_the_last_three_rounds_pooled() -> None:
    records = [{"accuracy": {"micro": v, "macro": 0.0}} for v in (0.1, 0.5, 0.6, None, 0.7)]
    assert last_rounds(records, "accuracy", "micro") == [0.5, 0.6, 0.7]
    assert last_rounds(records[:1], "accuracy", "micro") == [0.1]
    assert last_rounds(records, "accuracy", "macro") == [0.0, 0.0, 0.0]


def test_local_steps_are_in_a_record_when_somebody_counts_them() -> None:
    facts = {"run": "r", "method": "m", "round": 1, "of": 2, "bytes_down": 3, "bytes_up": 4, "seconds": 0.5}
    outcome = make_report({}, {}, n_centers=0)
    assert "local_steps" not in round_record(outcome, **facts)  # type: ignore[arg-type]
    assert round_record(outcome, **facts, local_steps=7)["local_steps"] == 7  # type: ignore[arg-type]
