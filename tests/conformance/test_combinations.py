"""Random combinations of options keep what every run promises. `make combinations` tries many."""

from __future__ import annotations

import pytest

from tests.support.drawn_cases import draw
from tests.support.run_promises import GOOD, one_that_runs


@pytest.mark.parametrize("seed", range(24))
def test_a_random_combination_of_options_runs_as_promised_or_is_refused_by_name(seed: int) -> None:
    for case, verdict, said in one_that_runs(draw(seed, most=3), seed):
        assert verdict in GOOD, f"{case}: {said}"
