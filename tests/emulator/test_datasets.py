from __future__ import annotations

import numpy as np
import pytest

from edge_client.errors import UsageError
from emulator.datasets import load


def test_the_digits_are_the_scans_that_scikit_learn_ships() -> None:
    data = load("digits")
    assert data.x.shape == (1797, 1, 8, 8)
    assert data.x.dtype == np.dtype(np.float32)
    assert (data.x.min(), data.x.max()) == (0.0, 1.0)
    assert sorted(set(data.y.tolist())) == list(range(10))


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match="unknown data set 'digit'") as wrong:
        load("digit")
    assert "did you mean 'digits'" in wrong.value.hint
