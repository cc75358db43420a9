"""How a center does on a device's labels: one for each sample, or one for each token or pixel."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax

from edge_client.data.dataset import Dataset
from edge_client.engines.targets import accuracy_of
from edge_client.nearest.result import score
from edge_client.protocol.program import IGNORED

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("axis", [1, -1])
def test_positions_that_are_not_ignored_score_wherever_the_classes_lie(axis: int) -> None:
    rows, y = RNG.standard_normal((6, 4, 5, 3)), RNG.integers(3, size=(6, 4, 5))
    y[RNG.random(y.shape) < 0.3] = IGNORED
    counted = y != IGNORED
    right = (rows.argmax(-1) == y)[counted].mean()
    lost = -np.take_along_axis(log_softmax(rows, -1), np.maximum(y, 0)[..., None], -1)[..., 0][counted].mean()
    outputs = np.moveaxis(rows, -1, axis)
    assert accuracy_of(outputs, y) == pytest.approx(right)
    assert score(outputs, Dataset(np.zeros((6, 2)), y)) == pytest.approx((right, lost))


def test_one_label_for_each_sample_scores_the_rows() -> None:
    assert accuracy_of(np.eye(3), np.array([0, 1, 0])) == pytest.approx(2 / 3)
