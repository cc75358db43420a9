from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.strategies.common.local_sgd import merge_anchors


@given(s=st.integers(1, 5), seed=st.integers(0, 999))
def test_a_folded_anchor_pulls_like_all_its_summands_together(s: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    anchors, mus, w = rng.standard_normal((s, 4)), rng.random(s) + 0.01, rng.standard_normal(4)
    anchor, mu = merge_anchors(anchors, mus.tolist())
    assert anchor is not None
    np.testing.assert_allclose(mu * (w - anchor), (mus[:, None] * (w - anchors)).sum(axis=0), atol=1e-12)


def test_no_pull_needs_no_anchor_and_a_negative_one_is_refused() -> None:
    assert merge_anchors(np.ones((2, 3)), [0.0, 0.0]) == (None, 0.0)
    with pytest.raises(ValueError, match="not negative"):
        merge_anchors(np.ones((2, 3)), [1.0, -1.0])
