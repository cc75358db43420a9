"""Gamma functions by Stirling's series are torch's, over the whole line, and refuse what has no formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from export.compiler.decompositions import special_functions
from export.compiler.decompositions.supported_ops import UnsupportedOperator

AROUND = torch.linspace(-6.3, 9.0, 4_001, dtype=torch.float64)  # no whole number but 9
LARGE = torch.logspace(-8, 8, 400, dtype=torch.float64)
PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], float]] = {
    "lgamma": (special_functions.lgamma, torch.lgamma, 1e-13),
    "digamma": (special_functions.digamma, torch.digamma, 1e-11),  # near poles the rounding of x is multiplied
    "trigamma": (
        lambda x: special_functions.polygamma(1, x),
        lambda x: torch.polygamma(1, x),
        1e-8,
    ),  # torch's own series is short
    "polygamma of order 0": (lambda x: special_functions.polygamma(0, x), torch.digamma, 1e-11),
}


@pytest.mark.parametrize("name", PAIRS)
def test_gamma_functions_are_torchs_on_both_sides_of_zero(name: str) -> None:
    ours, theirs, tolerance = PAIRS[name]
    x = torch.cat([AROUND, LARGE])
    assert torch.allclose(ours(x), theirs(x), rtol=tolerance, atol=tolerance)


def test_in_float32_large_numbers_stay_finite_and_small_ones_near_torchs() -> None:
    x = torch.cat([LARGE, AROUND[AROUND > 0]]).float()
    for name in ("lgamma", "digamma"):
        ours, theirs, _ = PAIRS[name]
        assert torch.allclose(ours(x), theirs(x), rtol=2e-6, atol=1e-5)  # the rounding of numbers of size 10


def test_at_poles_lgamma_is_infinite() -> None:
    assert special_functions.lgamma(torch.tensor([0.0, -1.0, -7.0])).tolist() == [torch.inf] * 3


def test_higher_derivatives_are_refused() -> None:
    with pytest.raises(UnsupportedOperator, match="of order 2"):
        special_functions.polygamma(2, AROUND)


def test_whole_numbers_are_taken_as_floats_and_infinity_stays() -> None:
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool):
        counts = torch.tensor([1, 2, 3, 7, 8, 20, 120]).to(dtype)
        for ours, theirs, _ in PAIRS.values():
            assert torch.allclose(ours(counts), theirs(counts), rtol=1e-4, atol=1e-5)
    assert special_functions.lgamma(torch.tensor(torch.inf)) == torch.inf
