from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.strategies.common.sampling import TaskSeeds, sample_cohort

SEED_LIMIT = 2**53


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
