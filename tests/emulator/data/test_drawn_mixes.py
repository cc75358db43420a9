"""Mixes of labels that are drawn from a device's number: always the same, from the data set's own images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import UsageError
from emulator.data.drawn_mixes import label_mixes

Y = np.repeat(np.array([3, 0, 1, 2, 3]), 7)
X = (np.arange(len(Y), dtype=np.float32) + 100 * Y)[:, None]  # an image tells its row and its label


@given(number=st.integers(0, 2**40), groups=st.integers(1, 4), alpha=st.sampled_from([0.01, 1.0, 100.0]))
def test_a_device_draws_the_same_images_of_its_labels_each_time(number: int, groups: int, alpha: float) -> None:
    sizes, draw = label_mixes(X, Y, devices=5, train=6, test=3, alpha=alpha, groups=groups)
    one, again = draw(number), draw(number)
    assert one.test is not None
    assert again.test is not None
    np.testing.assert_array_equal(one.train.x, again.train.x)
    np.testing.assert_array_equal(one.test.y, again.test.y)
    assert (len(one.train.y), len(one.test.y), list(sizes)) == (6, 3, [6] * 5)
    shift = (number % groups) * 4 // groups
    for data in (one.train, one.test):
        assert np.isin(data.x, X).all()
        np.testing.assert_array_equal((data.x[:, 0] // 100 + shift) % 4, data.y)


def test_a_small_alpha_gives_few_labels_and_a_large_one_many() -> None:
    few, many = (label_mixes(X, Y, devices=1, train=200, test=1, alpha=alpha)[1] for alpha in (0.01, 1e4))
    labels = [np.mean([len(np.unique(draw(i).train.y)) for i in range(30)]) for draw in (few, many)]
    assert labels[0] < 2
    assert labels[1] == 4


@pytest.mark.parametrize("wrong", [{"devices": 0}, {"train": 0}, {"groups": 0}, {"alpha": 0.0}])
def test_wrong_counts_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="pass counts"):
        label_mixes(X, Y, **({"devices": 1, "train": 1, "test": 1} | wrong))
