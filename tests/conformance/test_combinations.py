"""Random combinations of options keep what every run promises. `make combinations` tries many."""

from __future__ import annotations

import pytest

from coordinator.strategies.registry import METHODS, setting_types
from tests.support.drawn_cases import OTHERS, USUAL, draw
from tests.support.run_promises import GOOD, one_that_runs


@pytest.mark.parametrize("seed", range(24))
def test_a_random_combination_of_options_runs_as_promised_or_is_refused_by_name(seed: int) -> None:
    for case, verdict, said in one_that_runs(draw(seed, most=3), seed):
        assert verdict in GOOD, f"{case}: {said}"


def test_every_setting_of_a_method_is_combined_with_others() -> None:
    scales = {"adam-eps", "beta1", "beta2", "eta", "privacy-delta"}  # numbers that change no path through the code
    known = set().union(*(setting_types(kind) for kind in METHODS.values()))
    assert known - {*OTHERS, *USUAL, *scales} == set(), "give it values in OTHERS of tests/support/drawn_cases.py"
