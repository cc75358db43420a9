"""Inverse trigonometric functions are torch's to a rounding, at the ends and the seams of their formulas too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from export.compiler.decompositions import special_functions

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
