"""What devices are asked about a program, and the scores that the server makes of answers that may lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import r2_score

from coordinator.rounds.metrics import (
    FleetAverage,
    Score,
    Scoring,
    bounded_losses,
    known_losses,
    last_rounds,
    make_center_report,
    make_report,
    other_scores,
    scoring_of,
)
from coordinator.rounds.round_record import (
    place_in_words,
    reached_in_words,
    round_record,
    upgraded_record,
    versions_in_words,
)
from coordinator.rounds.round_record import tested_in_words as which_were_tested
from edge_client.protocol.task import Reply
from tests.support.softmax_program import program

NUMBERS = replace(program(), loss="squared-error", target=(1,))
TOKENS = Scoring(want=frozenset({"positions"}), perplexity=True)
RNG = np.random.default_rng(0)


def told(*row: float, n: int = 10) -> Reply:
    return Reply(n=n, errors=np.array([row]))


def counted(*row: float) -> Reply:
    return Reply(n=10, positions=np.array([row]))


def test_what_is_asked_follows_from_the_targets() -> None:
    assert scoring_of(program()).want == {"loss", "confusion"}
    assert scoring_of(NUMBERS).want == {"loss", "errors"}
    tokens = replace(program(), loss="token-cross-entropy", target=(5, 9))
    assert scoring_of(tokens) == Scoring(want=frozenset({"loss", "confusion", "positions"}), perplexity=True)
    assert scoring_of(replace(tokens, target=(5, 30_000))).want == {"loss", "positions"}  # a matrix of 7 GB
    assert not scoring_of(replace(tokens, own_loss=True)).perplexity  # outputs of another meaning, perhaps


def test_r2_is_scikit_learns_for_one_device_and_pools_errors_and_variances_of_several() -> None:
    y, found = RNG.standard_normal((2, 10, 3)), RNG.standard_normal((2, 10, 3))
    wrong = [((a - b) ** 2).mean() for a, b in zip(y, found, strict=True)]
    spread = [part.var(axis=0).mean() for part in y]
    replies = {c: told(e, e**0.5, v, n=n) for c, e, v, n in zip("ab", wrong, spread, (10, 30), strict=True)}
    scores = other_scores(replies, scoring_of(NUMBERS))
    assert scores["r2"].per_device["a"] == pytest.approx(r2_score(y[0], found[0], multioutput="variance_weighted"))
    pooled = 1 - (10 * wrong[0] + 30 * wrong[1]) / (10 * spread[0] + 30 * spread[1])
    assert scores["r2"].average.micro == pytest.approx(pooled)
    assert scores["squared_error"].average.micro == pytest.approx((wrong[0] + 3 * wrong[1]) / 4)


@pytest.mark.parametrize("lie", [(1e29, 1e14, 1.0), (0.0, 0.0, 1e29), (1.0, 1.0, 1e-300), (np.inf, 1.0, np.nan)])
def test_one_devices_errors_move_an_average_by_what_is_usual_times_a_constant(lie: tuple[float, float, float]) -> None:
    honest = {f"d{k}": told(1.0, 0.8, 2.0) for k in range(19)}
    scores = other_scores(honest | {"liar": told(*lie)}, scoring_of(NUMBERS))
    most = 1.5
    assert 0.95 <= scores["squared_error"].average.micro <= most  # type: ignore[operator]
    assert abs(scores["r2"].average.micro - 0.5) < 0.5  # type: ignore[operator]
    assert abs(scores["r2"].average.macro - 0.5) < 0.55  # type: ignore[operator]


def test_perplexity_is_of_labels_not_of_samples_and_a_lie_of_any_size_stays_finite() -> None:
    replies = {"a": counted(40, 20, 40 * np.log(3)), "b": counted(10, 1, 10 * np.log(5))}
    assert other_scores(replies, TOKENS)["perplexity"].average.micro == pytest.approx(
        np.exp(np.log([3, 3, 3, 3, 5]).mean())
    )
    huge = other_scores({"a": counted(1, 0, 1e29)}, TOKENS)["perplexity"].average.micro
    assert huge is not None
    assert np.isfinite(huge)
    assert other_scores({"a": counted(0, 0, 0)}, TOKENS) == {}


def test_a_report_counts_labels_without_a_matrix_and_keeps_a_negative_loss_of_the_users_own() -> None:
    labels = {"a": (40.0, 20.0), "b": (10.0, 10.0)}
    report = make_report({}, {"a": 0, "b": 0}, n_centers=1, counted_labels=labels)
    assert (report.accuracy.micro, report.accuracy.macro, report.f1_pooled) == (0.6, 0.75, None)
    losses, samples = {"a": -3.0, "b": -1.0}, {"a": 10, "b": 30}
    own = make_report({}, {}, n_centers=1, losses=losses, samples=samples, signed=True)
    assert (own.accuracy.micro, own.loss.micro) == (None, -1.5)


def test_words_name_what_was_measured_and_call_nothing_else_accuracy() -> None:
    unknown = {"accuracy": {"micro": None, "macro": None}}
    errors = {"metrics": {"squared_error": {"micro": 60.638}, "r2": {"micro": None}}, "loss": {"micro": 60.638}}
    assert reached_in_words(unknown | errors) == "squared error 60.64"
    assert reached_in_words(unknown | errors | {"loss": {"micro": 0.25}}) == "loss 0.25, squared error 60.64"
    assert reached_in_words(unknown | {"loss": {"micro": -1.25}}) == "loss -1.25"
    assert reached_in_words(unknown) == ""
    tokens = {"accuracy": {"micro": 0.25}, "metrics": {"perplexity": {"micro": 12.0}}}
    assert reached_in_words(tokens) == "accuracy 25.0%, perplexity 12"


def test_the_place_of_a_record_is_its_round_or_the_updates_that_it_counts() -> None:
    assert place_in_words({"round": 3, "of": 9}) == "round 3/9"
    told = {"counted": 4, "versions": [2, 0]}
    assert place_in_words({"round": 3, "of": 9, "asynchronous": told}) == "record 3/9: 4 more updates, versions 2, 0"
    assert (versions_in_words([5]), versions_in_words([5, 6])) == ("version 5", "versions 5, 6")
    tested = {"asynchronous": told | {"tested": {"round": 1, "versions": [1, 0]}}}
    assert which_were_tested(tested) == " of versions 1, 0"
    assert which_were_tested({"asynchronous": told}) == which_were_tested({}) == ""


def test_words_tell_centers_apart_where_devices_are_served_other_models() -> None:
    found = {"accuracy": {"micro": 0.5}, "centers": {"accuracy": {"micro": 0.25}}, "loss": {"micro": 2.0}}
    assert reached_in_words(found) == "accuracy 50.0% as served, 25.0% with the centers alone"
    assert reached_in_words(found | {"centers": {"accuracy": {"micro": None}}}) == "accuracy 50.0%"
    assert reached_in_words({"accuracy": None, "metrics": None, "loss": {"micro": 0.0}}) == "loss 0"


def test_a_record_has_what_was_measured_and_no_more() -> None:
    facts = {"run": "r", "method": "m", "round": 2, "of": 5, "bytes_down": 3, "bytes_up": 4, "seconds": 0.5}
    report = make_report(
        {"b": np.eye(2), "a": np.array([[0, 1], [0, 1]])}, {"b": 0, "a": 1}, n_centers=2, losses={"a": 1.0}
    )
    plain = round_record(report, **facts)  # type: ignore[arg-type]
    assert {"centers", "metrics", "local_steps"}.isdisjoint(plain)
    assert (plain["event"], plain["run"], plain["method"], plain["round"], plain["of"]) == ("round", "r", "m", 2, 5)
    assert (plain["bytes"], plain["seconds"]) == ({"down": 3, "up": 4}, 0.5)
    assert plain["accuracy"] == {"micro": 0.75, "macro": 0.75}
    assert (plain["per_device"], plain["per_center"], plain["assignment"]) == (
        {"a": 0.5, "b": 1.0},
        [1.0, 0.5],
        {"a": 1, "b": 0},
    )
    assert (plain["loss"], plain["loss_per_device"]) == ({"micro": 1.0, "macro": 1.0}, {"a": 1.0})
    centers = make_center_report({(1, "a"): (4.0, 3.0)}, n_centers=2)
    score = Score(average=FleetAverage(micro=1.0, macro=2.0), per_device={"a": 3.0})
    whole = round_record(replace(report, centers=centers, scores={"r2": score}), **facts, local_steps=0)  # type: ignore[arg-type]
    assert whole["centers"] == {
        "accuracy": {"micro": 0.75, "macro": 0.75},
        "per_center": [None, 0.75],
        "per_device": [{}, {"a": 0.75}],
    }
    assert whole["metrics"] == {"r2": {"micro": 1.0, "macro": 2.0, "per_device": {"a": 3.0}}}
    assert whole["local_steps"] == 0
    assert upgraded_record({"f1": {"micro": 1, "macro": 2}})["centers"]["per_device"] == []


def test_one_loss_counts_up_to_ten_times_the_median_or_what_guessing_loses() -> None:
    told = np.array([1.0, 2.0, 3.0, 99.0, -1.0])
    knows = np.array([True, True, True, False, False])
    np.testing.assert_array_equal(bounded_losses(told, knows), [1, 2, 3, 20, 0])
    np.testing.assert_allclose(bounded_losses(told, knows, classes=1_000), [1, 2, 3, 10 * np.log(1_000), 0])
    np.testing.assert_array_equal(
        bounded_losses(np.array([-30.0, -1.0, 2.0, 1.0]), np.ones(4, bool), signed=True), [-15, -1, 2, 1]
    )
    np.testing.assert_array_equal(bounded_losses(np.array([5.0]), np.zeros(1, bool)), [0.0])
    assert known_losses(np.array([1e30, -1e30, 9.9e29, np.nan, np.inf])).tolist() == [False, False, True, False, False]
    matrices = {c: np.eye(4) for c in "abc"}
    report = make_report(matrices, {}, n_centers=0, losses={"a": 0.01, "b": 0.01, "c": 50.0})
    assert report.loss.macro == pytest.approx((0.02 + 10 * np.log(4)) / 3)
    assert report.loss_per_device["c"] == 50.0  # what it told


def test_what_a_device_without_labels_tells_weighs_by_its_samples() -> None:
    matrices, told = {"a": np.eye(2), "e": np.zeros((2, 2))}, {"a": 1.0, "b": 2.0, "c": 4.0, "e": 9.0}
    counted, samples = {"c": (3.0, 2.0), "z": (0.0, 0.0)}, {"a": 99, "b": 5, "c": 99, "e": 99, "z": 99}
    report = make_report(matrices, {"b": 1}, n_centers=2, losses=told, counted_labels=counted, samples=samples)
    assert report.loss.micro == pytest.approx((2 * 1.0 + 5 * 2.0 + 3 * 4.0) / 10)
    assert report.loss_per_center == (None, 2.0)
    assert report.per_device == {"a": 1.0, "c": 2 / 3}
    assert report.accuracy.micro == pytest.approx((2 + 2) / 5)


def test_a_matrix_is_asked_for_up_to_256_classes_of_a_position_and_of_any_number_of_a_sample() -> None:
    tokens = replace(program(), loss="token-cross-entropy", target=(5, 256))
    assert scoring_of(tokens).want == {"loss", "confusion", "positions"}
    assert scoring_of(replace(tokens, target=(5, 257))).want == {"loss", "positions"}
    own = scoring_of(replace(tokens, target=(5, 257), own_loss=True))
    assert own == Scoring(want=frozenset({"loss", "positions"}), signed=True)  # right labels, but no perplexity
    assert scoring_of(replace(program(), target=(30_000,))).want == {"loss", "confusion"}
    assert scoring_of(replace(NUMBERS, own_loss=True)).signed
    assert not scoring_of(program()).signed


def test_perplexity_has_the_exponent_700_at_most_and_each_device_its_own() -> None:
    found = other_scores({"a": counted(2, 0, 1.0), "b": counted(1, 0, 9_000.0)}, TOKENS)["perplexity"]
    assert found.per_device == {"a": pytest.approx(np.exp(0.5)), "b": pytest.approx(np.exp(700.0))}
    assert "perplexity" not in other_scores({"a": counted(2, 0, 1.0)}, Scoring())


def test_r2_is_told_where_targets_vary_and_a_model_ten_times_worse_than_none_counts_so() -> None:
    scores = other_scores(
        {"a": told(1.0, 1.0, 0.0), "b": told(4.0, 2.0, 2.0), "c": told(500.0, 9.0, 2.0)}, scoring_of(NUMBERS)
    )
    assert scores["r2"].per_device == {"b": -1.0, "c": -10.0}
    assert scores["squared_error"].per_device == {"a": 1.0, "b": 4.0, "c": 500.0}
    assert scores["absolute_error"].average.macro == 4.0
    assert "r2" not in other_scores({"a": told(1.0, 1.0, 0.0)}, scoring_of(NUMBERS))
    nothing = other_scores({"a": told(np.inf, np.inf, 1.0)}, scoring_of(NUMBERS))
    assert nothing["squared_error"].average == FleetAverage(micro=None, macro=None)
    assert other_scores({}, scoring_of(NUMBERS)) == {}


def test_the_last_three_values_of_a_quantity_are_a_tables_figure() -> None:
    records = [{"f1_pooled": value} for value in (0.1, 0.2, None, 0.3, 0.4)] + [{}]
    assert last_rounds(records, "f1_pooled") == [0.2, 0.3, 0.4]
    assert last_rounds([{"accuracy": None}, {"accuracy": {"micro": 0.0}}], "accuracy", "micro") == [0.0]
