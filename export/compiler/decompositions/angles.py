"""Inverse trigonometric functions, as the runtimes have few of them.

asin(s) = s + s R(s²) up to s = 1/2, with the rational R of fdlibm (Sun Microsystems, 1993), whose error is below one
rounding of float64. Beyond it asin(x) = pi/2 - 2 asin(sqrt((1 - x) / 2)).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import inf, pi
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
NUMERATOR = (
    *(1.66666666666666657415e-01, -3.25565818622400915405e-01, 2.01212532134862925881e-01),
    *(-4.00555345006794114027e-02, 7.91534994289814532176e-04, 3.47933107596021167570e-05),
)
DENOMINATOR = (
    *(1.0, -2.40339491173441421878e00, 2.02094576023350569471e00),
    *(-6.88283971605453293030e-01, 7.70381505559019352791e-02),
)


def asin(x: Tensor) -> Tensor:
    """-pi/2 to pi/2."""
    far, part = _parts(x)
    return torch.where(far, torch.sign(x) * (pi / 2 - 2 * part), part)


def acos(x: Tensor) -> Tensor:
    """0 to pi; near 1 without the digits that pi/2 - asin(x) would lose."""
    far, part = _parts(x)
    return torch.where(far, torch.where(x < 0, pi - 2 * part, 2 * part), pi / 2 - part)


def atan(x: Tensor) -> Tensor:
    """-pi/2 to pi/2: the sine of this angle is x / sqrt(1 + x²), and that of the rest 1 / x in place of x."""
    size = torch.abs(x)
    steep = size > 1
    slope = torch.where(steep, torch.reciprocal(size), size)
    angle = asin(slope * torch.rsqrt(1 + slope * slope))
    return torch.sign(x) * torch.where(steep, pi / 2 - angle, angle)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """The angle of the point (x, y), -pi to pi; a zero has the sign that its reciprocal shows, as torch's.

    Two infinities are as far as each other.
    """
    nowhere = torch.logical_and(x == 0, y == 0)
    beyond = torch.logical_and(torch.abs(x) == inf, torch.abs(y) == inf)
    slope = torch.where(beyond, torch.sign(x) * torch.sign(y), y / torch.where(nowhere, torch.ones_like(x), x))
    angle = atan(slope)
    left, below = (torch.logical_or(part < 0, torch.reciprocal(part) < 0).to(angle.dtype) for part in (x, y))
    return angle + left * (pi - 2 * pi * below)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether x is beyond 1/2; and asin(x), or there asin(sqrt((1 - |x|) / 2))."""
    size = torch.abs(x)
    far = size > 0.5  # noqa: PLR2004 - see above
    square = torch.where(far, (1 - size) * 0.5, x * x)
    sine = torch.where(far, torch.sqrt(square), x)
    return far, sine + sine * (square * polynomial(NUMERATOR, square) / polynomial(DENOMINATOR, square))


def polynomial(factors: Sequence[float], x: Tensor) -> Tensor:
    """Horner's scheme; the first factor is the constant."""
    highest, *rest = reversed(factors)
    return reduce(lambda value, factor: value * x + factor, rest, torch.full_like(x, highest))


ANGLE_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.asin.default: asin,
    aten.acos.default: acos,
    aten.atan.default: atan,
    aten.atan2.default: atan2,
}
