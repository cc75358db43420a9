from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.strategies.common.sampling import TaskSeeds, sample_cohort

SEED_LIMIT = 2**53


@given(m=st.integers(1, 300), percent=st.integers(1, 100), seed=st.integers(0, 99))
@example(m=100, percent=7, seed=0)  # 0.07 * 100 is above 7
def test_a_cohort_is_sorted_distinct_and_the_same_for_the_same_seed(m: int, percent: int, seed: int) -> None:
    fraction = percent / 100
    fleet = {f"c{i}": 1 for i in range(m)}
    cohort = sample_cohort(fleet, fraction, np.random.default_rng(seed))
    assert cohort == sorted(set(cohort))
    assert len(cohort) == -(-percent * m // 100)
    assert cohort == sample_cohort(dict(reversed(fleet.items())), fraction, np.random.default_rng(seed))


def test_seeds_depend_on_the_draw_and_the_name_and_fit_the_protocol() -> None:
    first, second = TaskSeeds(1), TaskSeeds(2)
    values = [first.of("a"), first.of("b"), second.of("a")]
    assert len(set(values)) == 3
    assert all(0 <= v < SEED_LIMIT for v in values)
    assert first.of("a") == TaskSeeds(1).of("a")
