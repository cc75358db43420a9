"""Inverse trigonometric and hyperbolic functions and powers of two are torch's to a rounding, at their ends too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from export.compiler.decompositions import special_functions
from export.compiler.decompositions.table import exp2

ROUNDINGS = 4 * 2.0**-52  # of a result between -pi and pi


def around(*places: float) -> Tensor:
    """Places and their neighbours among the numbers of float64."""
    return torch.tensor(
        [n for p in places for n in (math.nextafter(p, -9), p, math.nextafter(p, 9))], dtype=torch.float64
    )


SINES = torch.cat([torch.linspace(-1, 1, 2001, dtype=torch.float64), around(-0.5, 0, 0.5).clamp(-1, 1)])
SLOPES = torch.cat([torch.linspace(-8, 8, 2001, dtype=torch.float64), around(-1, 1), torch.tensor([1e-300, 1e300])])


@pytest.mark.parametrize(("name", "x"), [("asin", SINES), ("acos", SINES), ("atan", SLOPES)])
def test_an_angle_of_a_number_is_torchs(name: str, x: Tensor) -> None:
    ours, theirs = getattr(special_functions, name)(x), getattr(torch, name)(x)
    assert float((ours - theirs).abs().max()) <= ROUNDINGS


def test_the_angle_of_a_point_is_torchs_in_every_quarter_on_the_axes_from_both_sides_and_infinitely_far() -> None:
    rows = torch.tensor([-3.0, -1.0, -1e-9, -0.0, 0.0, 1e-9, 1.0, 3.0, -math.inf, math.inf], dtype=torch.float64)
    y, x = torch.meshgrid(rows, rows, indexing="ij")
    assert float((special_functions.atan2(y, x) - torch.atan2(y, x)).abs().max()) <= ROUNDINGS


def test_numbers_that_are_no_sine_have_no_angle() -> None:
    outside = torch.tensor([-1.5, 1.5])
    assert torch.isnan(special_functions.asin(outside)).all()
    assert torch.isnan(special_functions.acos(outside)).all()


SIZES = 10.0 ** torch.linspace(-300, 300, 601, dtype=torch.float64)
RATIOS = torch.cat([torch.linspace(-1, 1, 2001, dtype=torch.float64), torch.tensor([1e-300, -1e-9])])


@pytest.mark.parametrize(
    ("name", "x"), [("asinh", torch.cat([SIZES, -SIZES, SLOPES])), ("acosh", 1 + SIZES), ("atanh", RATIOS)]
)
def test_an_inverse_hyperbolic_function_is_torchs_for_tiny_and_for_huge_numbers(name: str, x: Tensor) -> None:
    torch.testing.assert_close(getattr(special_functions, name)(x), getattr(torch, name)(x), rtol=1e-15, atol=0)


def test_inverse_hyperbolic_functions_are_torchs_where_there_is_no_such_number_or_an_infinite_one() -> None:
    x = torch.tensor([-math.inf, -1e9, -2.0, -1.0, -0.0, 0.5, 2.0, math.inf])
    for name in ("asinh", "acosh", "atanh"):
        torch.testing.assert_close(getattr(special_functions, name)(x), getattr(torch, name)(x), equal_nan=True)
    whole = torch.tensor([-3, 0, 5])
    torch.testing.assert_close(special_functions.asinh(whole), torch.asinh(whole))


def test_powers_of_two_are_torchs_however_large() -> None:
    x = torch.linspace(-1000, 1000, 4001, dtype=torch.float64)
    torch.testing.assert_close(exp2(x), torch.exp2(x), rtol=1e-15, atol=0)
