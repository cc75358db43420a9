"""Scores of outputs: errors of numbers and counts of positions, compared with scikit-learn and torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

from edge_client.errors import Malformed
from edge_client.protocol.program import IGNORED
from edge_client.training.scores import confusion_counts, mean_errors, position_sums
from tests.support.softmax_program import program

RNG = np.random.default_rng(0)
NUMBERS = replace(program(), loss="squared-error", target=(4,))
TOKENS = replace(program(), loss="token-cross-entropy", target=(5, 7))


def test_errors_and_the_variance_of_the_targets_are_scikit_learns() -> None:
    y, outputs = RNG.standard_normal((30, 4)) * [1, 2, 3, 4] + 5, RNG.standard_normal((2, 30, 4))
    for row, found in zip(outputs, mean_errors(NUMBERS, outputs, y, None), strict=True):
        squared, absolute, variance = found
        assert np.isclose(squared, mean_squared_error(y, row))
        assert np.isclose(absolute, mean_absolute_error(y, row))
        assert np.isclose(1 - squared / variance, r2_score(y, row, multioutput="variance_weighted"))


def test_a_mixture_of_models_predicts_the_weighted_mean() -> None:
    y, outputs = RNG.standard_normal((6, 4)), RNG.standard_normal((2, 6, 4))
    mixed = mean_errors(NUMBERS, outputs, y, [1.0, 3.0])
    assert np.allclose(mixed, mean_errors(NUMBERS, (outputs[:1] + 3 * outputs[1:]) / 4, y, None))
    logits, labels = RNG.standard_normal((2, 6, 5, 7)), RNG.integers(7, size=(6, 5))
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = position_sums(TOKENS, np.log((shares[:1] + 3 * shares[1:]) / 4), labels, None)
    assert np.allclose(position_sums(TOKENS, logits, labels, [1.0, 3.0]), expected)


def test_positions_count_what_the_confusion_matrix_counts_and_sum_torchs_cross_entropy() -> None:
    logits, labels = RNG.standard_normal((2, 9, 5, 7)), RNG.integers(7, size=(9, 5))
    labels[RNG.random(labels.shape) < 0.3] = IGNORED
    for row, matrix, (n, right, entropy) in zip(
        logits, confusion_counts(TOKENS, logits, labels, None), position_sums(TOKENS, logits, labels, None), strict=True
    ):
        assert (n, right) == (matrix.sum(), np.trace(matrix))
        told = torch.nn.functional.cross_entropy(
            torch.tensor(row).flatten(0, 1), torch.tensor(labels).flatten(), reduction="sum"
        )
        assert np.isclose(entropy, float(told))


def test_errors_are_not_told_of_classes_nor_of_outputs_of_another_shape() -> None:
    with pytest.raises(Malformed, match="no classes"):
        mean_errors(TOKENS, np.zeros((1, 2, 5, 7)), np.zeros((2, 5), int), None)
    with pytest.raises(Malformed, match="compare outputs"):
        mean_errors(NUMBERS, np.zeros((1, 2, 4)), np.zeros((2, 3)), None)
    with pytest.raises(Malformed, match="classifier"):
        position_sums(NUMBERS, np.zeros((1, 2, 4)), np.zeros((2, 4)), None)
