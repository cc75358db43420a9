"""What a smaller file may lose: classes by name, numbers by their variance."""

from __future__ import annotations

import numpy as np
import pytest

from export.bundle.verify_centers import lost_share


def test_a_regression_loses_what_it_is_off_beside_its_variance() -> None:
    expected = np.array([[1.0], [3.0], [1.0], [3.0]])
    assert lost_share(expected, expected, None) == 0
    assert lost_share(expected + 0.1, expected, None) == pytest.approx(0.01)
    assert lost_share(np.full((4, 1), 2.0), expected, None) == pytest.approx(1)  # knows the mean only
    assert lost_share(np.full((4, 1), np.nan), expected, None) == np.inf
    constant = np.full((4, 1), 2.0)
    assert lost_share(constant * 0.9, constant, None) == pytest.approx(0.01)


def test_classes_are_named_along_their_own_axis() -> None:
    pixels = np.zeros((1, 2, 1, 4))  # [n, classes, height, width]
    pixels[0, 1, 0, :3] = 1
    one_off = pixels.copy()
    one_off[0, :, 0, 3] = (0, 1)
    assert lost_share(one_off, pixels, 1) == 0.25
    assert lost_share(np.full_like(pixels, np.nan), pixels, 1) == np.inf
