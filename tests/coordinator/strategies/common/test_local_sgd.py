from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.strategies.common.local_sgd import (
    ClientUpdates,
    LocalSgd,
    TaskSeeds,
    choose_by_loss,
    merge_anchors,
    sample_cohort,
)
from edge_client.errors import ConfigError
from edge_client.protocol.task import Reply

SEED_LIMIT = 2**53


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


def test_the_least_loss_chooses_equals_are_decided_by_lot_and_no_number_is_the_worst() -> None:
    tied = {f"d{i}": Reply(n=1, losses=np.array([1.0, 3.0, 1.0, np.nan])) for i in range(200)}
    counts = Counter(choose_by_loss(tied, np.random.default_rng(0)).values())
    assert set(counts) == {0, 2}
    assert min(counts.values()) > 60  # of 200: a fair coin falls below with probability 1e-8
    assert choose_by_loss(tied, np.random.default_rng(5)) == choose_by_loss(
        dict(reversed(tied.items())), np.random.default_rng(5)
    )
    mixed = {"b": Reply(n=1, losses=np.array([2.0, 1.0])), "c": Reply(n=1)}
    assert choose_by_loss(mixed, np.random.default_rng(0)) == {"b": 1}


@given(m=st.integers(1, 30), fraction=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_a_cohort_is_sorted_distinct_and_the_same_for_the_same_seed(m: int, fraction: float, seed: int) -> None:
    fleet = {f"c{i}": 1 for i in range(m)}
    cohort = sample_cohort(fleet, fraction, np.random.default_rng(seed))
    assert cohort == sorted(set(cohort))
    assert len(cohort) == min(m, int(np.ceil(fraction * m)))
    assert cohort == sample_cohort(dict(reversed(fleet.items())), fraction, np.random.default_rng(seed))


def test_seeds_depend_on_the_draw_and_the_name_and_fit_the_protocol() -> None:
    first, second = TaskSeeds(1), TaskSeeds(2)
    values = [first.of("a"), first.of("b"), second.of("a")]
    assert len(set(values)) == 3
    assert all(0 <= v < SEED_LIMIT for v in values)
    assert first.of("a") == TaskSeeds(1).of("a")


def test_updates_are_sorted_by_client_and_a_reply_without_a_model_is_silence() -> None:
    updates = ClientUpdates.from_replies(
        {"b": Reply(n=2, update=np.ones(3)), "a": Reply(n=1, update=np.zeros(3)), "c": Reply(n=9)}, 3
    )
    assert updates.clients == ("a", "b")
    assert updates.n.tolist() == [1.0, 2.0]
    assert ClientUpdates.from_replies({}, 3).rows.shape == (0, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"local_steps": 0},
        {"learning_rate": float("nan")},
        {"learning_rate": -0.1},
        {"momentum": 1.5},
        {"batch_size": 0},
        {"fraction_train": 0.0},
        {"fraction_train": 1.1},
    ],
)
def test_settings_that_no_device_could_carry_out_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as refused:
        LocalSgd(**wrong)  # type: ignore[arg-type]
    assert refused.value.hint
