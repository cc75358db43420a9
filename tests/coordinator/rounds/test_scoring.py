"""What devices are asked about a program, and the scores that the server makes of answers that may lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import r2_score

from coordinator.rounds.metrics import LOSS_RATIO, Scoring, make_report, other_scores, scoring_of
from coordinator.rounds.round_record import reached_in_words
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
    most = 1 + LOSS_RATIO / 20
    assert 0.95 <= scores["squared_error"].average.micro <= most  # type: ignore[operator]
    assert abs(scores["r2"].average.micro - 0.5) < LOSS_RATIO / 20  # type: ignore[operator]
    assert abs(scores["r2"].average.macro - 0.5) < 1.1 * LOSS_RATIO / 20  # type: ignore[operator]


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
    assert reached_in_words(unknown | {"loss": {"micro": -1.25}}) == "loss -1.25"
    assert reached_in_words(unknown) == ""
    tokens = {"accuracy": {"micro": 0.25}, "metrics": {"perplexity": {"micro": 12.0}}}
    assert reached_in_words(tokens) == "accuracy 25.0%, perplexity 12"
