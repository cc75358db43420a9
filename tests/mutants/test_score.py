"""The score leaves out what is equivalent, and its interval is Wilson's."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from tests.mutants.score import EQUIVALENT, FOUND, SURVIVED, interval, table


def test_the_score_of_a_folder_leaves_out_what_is_equivalent() -> None:
    verdicts = [("a.b.one", FOUND), ("a.b.one", SURVIVED), ("a.b.two", EQUIVALENT), ("a.c.three", EQUIVALENT)]
    assert table(verdicts).splitlines()[2:] == [
        "| a/b | 2 | 3 | 1 | 1 | 1 | 50% | 9% to 91% |",
        "| a/c | 1 | 1 | 1 | 0 | 0 | - | 0% to 100% |",
        "| all | 3 | 4 | 2 | 1 | 1 | 50% | 9% to 91% |",
    ]


@pytest.mark.parametrize(("found", "of"), [(0, 7), (5, 7), (7, 7), (160, 170)])
def test_the_interval_is_the_one_of_scipy(found: int, of: int) -> None:
    known = binomtest(found, of).proportion_ci(0.95, method="wilson")
    assert interval(found, of) == pytest.approx((known.low, known.high), abs=1e-4)  # Z has three digits
