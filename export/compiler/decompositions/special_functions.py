"""Functions that few runtimes have: inverse trigonometric and hyperbolic ones, erfc, the gamma function's logarithm.

asin(s) = s + s R(s²) up to s = 1/2, with the rational R of fdlibm (Sun Microsystems, 1993), whose error is below one
rounding of float64. Beyond it asin(x) = pi/2 - 2 asin(sqrt((1 - x) / 2)). Inverse hyperbolic functions are those of
fdlibm, too: logarithms of 1 plus a number, which near 0 keep all digits.

erfcx(x) = exp(x²) erfc(x), of which torch makes log_ndtr and its gradient, has the rationals of Cody 1969 (Rational
Chebyshev approximations for the error function, Mathematics of Computation 23), whose error is below two roundings of
float64: one up to 4, one in 1/x² beyond. Below 0.46875 it is exp(x²) (1 - erf(x)).

Gamma has Stirling's series from 8 on, whose error there is below one rounding of float64:

    lgamma(x)     = (x - 1/2) log x - x + log(2 pi)/2 + sum_k B_2k / (2k (2k - 1) x^(2k - 1))
    digamma(x)    = log x - 1/(2x) - sum_k B_2k / (2k x^2k)
    trigamma(x)   = 1/x + 1/(2 x^2) + sum_k B_2k / x^(2k + 1)

Below 8 by gamma(x + 1) = x gamma(x), eight times; for x < 1/2 by the reflection at 1/2. Near the zeros of lgamma (1 and
2) and of digamma the absolute error is the rounding of numbers of size 10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import inf, log, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from export.compiler.decompositions.supported_ops import UnsupportedOperator

aten = torch.ops.aten
NUMERATOR = (
    *(1.66666666666666657415e-01, -3.25565818622400915405e-01, 2.01212532134862925881e-01),
    *(-4.00555345006794114027e-02, 7.91534994289814532176e-04, 3.47933107596021167570e-05),
)
DENOMINATOR = (
    *(1.0, -2.40339491173441421878e00, 2.02094576023350569471e00),
    *(-6.88283971605453293030e-01, 7.70381505559019352791e-02),
)
UP_TO_4 = (  # the numerator in x, and the denominator
    (
        *(1.23033935479799725272e03, 2.05107837782607146532e03, 1.71204761263407058314e03, 8.81952221241769090411e02),
        *(2.98635138197400131132e02, 6.61191906371416294775e01, 8.88314979438837594118e00, 5.64188496988670089180e-01),
        2.15311535474403846343e-08,
    ),
    (
        *(1.23033935480374942043e03, 3.43936767414372163696e03, 4.36261909014324715820e03, 3.29079923573345962678e03),
        *(1.62138957456669018874e03, 5.37181101862009857509e02, 1.17693950891312499305e02, 1.57449261107098347253e01),
        1.0,
    ),
)
BEYOND_4 = (  # in 1/x²
    (
        *(6.58749161529837803157e-04, 1.60837851487422766278e-02, 1.25781726111229246204e-01),
        *(3.60344899949804439429e-01, 3.05326634961232344035e-01, 1.63153871373020978498e-02),
    ),
    (
        *(2.33520497626869185443e-03, 6.05183413124413191178e-02, 5.27905102951428412248e-01),
        *(1.87295284992346047209e00, 2.56852019228982242072e00, 1.0),
    ),
)
SHIFT = 8
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)  # B_2, B_4, ...


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


def asinh(x: Tensor) -> Tensor:
    """log(x + sqrt(x² + 1)); beyond 2^28, where x² may be infinite, log(2 x)."""
    far, size = _beyond(torch.abs(_float(x)))
    square = size * size
    near = torch.log1p(size + square / (1 + torch.sqrt(1 + square)))
    return torch.sign(x) * torch.where(far, torch.log(torch.abs(x)) + log(2), near)


def acosh(x: Tensor) -> Tensor:
    """log(x + sqrt(x² - 1)), NaN below 1; see `asinh`."""
    far, size = _beyond(_float(x))
    rest = size - 1
    return torch.where(far, torch.log(x) + log(2), torch.log1p(rest + torch.sqrt(rest) * torch.sqrt(rest + 2)))


def atanh(x: Tensor) -> Tensor:
    """log((1 + x) / (1 - x)) / 2; infinite at 1 and -1."""
    size = torch.abs(_float(x))
    return torch.sign(x) * 0.5 * torch.log1p(2 * size / (1 - size))


def _beyond(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether x is beyond 2^28, and x or there 1."""
    far = x > 2.0**28
    return far, torch.where(far, torch.ones_like(x), x)


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


def erfcx(x: Tensor) -> Tensor:
    """exp(x²) erfc(x); infinite where exp(x²) is, far below 0."""
    x = _float(x)
    far, grown = _far_erfcx(x), torch.exp(x * x)
    return torch.where(_is_near(x), grown * (1 - torch.erf(x)), torch.where(x < 0, 2 * grown - far, far))


def erfc(x: Tensor) -> Tensor:
    """1 - erf(x), with its digits where it is small, so that its logarithm is finite."""
    x = _float(x)
    far = torch.exp(-x * x) * _far_erfcx(x)
    return torch.where(_is_near(x), 1 - torch.erf(x), torch.where(x < 0, 2 - far, far))


def _is_near(x: Tensor) -> Tensor:
    return torch.abs(x) < 0.46875  # noqa: PLR2004 - see above


def _far_erfcx(x: Tensor) -> Tensor:
    """The same of |x|, from 0.46875 on."""
    size = torch.abs(x)
    far = size > 4  # noqa: PLR2004 - see above
    middle = torch.where(far, torch.ones_like(x), size)
    inverse = torch.reciprocal(torch.where(far, size, torch.ones_like(x)))
    square = inverse * inverse
    rest = square * polynomial(BEYOND_4[0], square) / polynomial(BEYOND_4[1], square)
    return torch.where(
        far, inverse * (1 / sqrt(pi) - rest), polynomial(UP_TO_4[0], middle) / polynomial(UP_TO_4[1], middle)
    )


ERROR_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.special_erfcx.default: erfcx,
    aten.erfc.default: erfc,
}
ANGLE_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.asin.default: asin,
    aten.acos.default: acos,
    aten.atan.default: atan,
    aten.atan2.default: atan2,
    aten.asinh.default: asinh,
    aten.acosh.default: acosh,
    aten.atanh.default: atanh,
}


def lgamma(x: Tensor) -> Tensor:
    """The logarithm of |gamma(x)|; infinite at 0, -1, -2, ..."""
    x = _float(x)
    mirrored, at = _mirrored(x)
    near, far = _far(at)
    product = reduce(torch.mul, [at + i for i in range(1, SHIFT)], at)
    factors = [b / (2 * k * (2 * k - 1)) for k, b in enumerate(BERNOULLI, 1)]
    inverse = torch.reciprocal(far)
    found = (far - 0.5) * (torch.log(far) - 1) + 0.5 * (log(2 * pi) - 1)  # not inf - inf where far is infinite
    found = found + inverse * polynomial(factors, inverse * inverse)
    found = found - torch.log(torch.where(near, product, torch.ones_like(product)))
    return torch.where(mirrored, log(pi) - torch.log(torch.abs(_sine(x))) - found, found)


def digamma(x: Tensor) -> Tensor:
    """The derivative of lgamma; infinite at 0, -1, -2, ..., where torch's is NaN but at 0."""
    x = _float(x)
    mirrored, at = _mirrored(x)
    near, far = _far(at)
    factors = [b / (2 * k) for k, b in enumerate(BERNOULLI, 1)]
    square = torch.reciprocal(far * far)
    found = torch.log(far) - 0.5 * torch.reciprocal(far) - square * polynomial(factors, square)
    found = found - _steps(near, at, 1)
    cotangent = _sine(x + 0.5) / torch.where(mirrored, _sine(x), torch.ones_like(x))
    return torch.where(mirrored, found - pi * cotangent, found)


def polygamma(n: int, x: Tensor) -> Tensor:
    """The digamma function (n = 0) and its derivative (n = 1), of which the gradient of digamma is made."""
    if n == 0:
        return digamma(x)
    if n != 1:
        raise UnsupportedOperator("aten.polygamma", f"of order {n}; 0 and 1 have a formula")
    x = _float(x)
    mirrored, at = _mirrored(x)
    near, far = _far(at)
    inverse = torch.reciprocal(far)
    square = inverse * inverse
    found = inverse + 0.5 * square + inverse * square * polynomial(BERNOULLI, square) + _steps(near, at, 2)
    sine = torch.where(mirrored, _sine(x), torch.ones_like(x))
    return torch.where(mirrored, (pi / sine) ** 2 - found, found)


def _float(x: Tensor) -> Tensor:
    """Whole numbers as torch's own functions take them; steps by 8 would leave the range of short ones."""
    return x if x.dtype.is_floating_point else x.to(torch.get_default_dtype())


def _mirrored(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether x is below 1/2, and x or there 1 - x, which is at least 1/2."""
    mirrored = x < 0.5  # noqa: PLR2004 - see above
    return mirrored, torch.where(mirrored, 1 - x, x)


def _far(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether x is below 8, and x or there x + 8."""
    near = x < SHIFT
    return near, torch.where(near, x + SHIFT, x)


def _steps(near: Tensor, x: Tensor, power: int) -> Tensor:
    """The sum of 1 / (x + i)^power of the eight steps; 0 where no step was made."""
    safe = torch.where(near, x, torch.ones_like(x))
    total = reduce(torch.add, [torch.reciprocal((safe + i) ** power) for i in range(SHIFT)])
    return torch.where(near, total, torch.zeros_like(total))


def _sine(x: Tensor) -> Tensor:
    """sin(pi x), 0 at whole numbers: the angle is that of the distance to the nearest one."""
    whole = torch.round(x)
    odd = whole - 2 * torch.floor(whole * 0.5)
    return torch.sin(pi * (x - whole)) * (1 - 2 * odd)


GAMMA_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.lgamma.default: lgamma,
    aten.digamma.default: digamma,
    aten.polygamma.default: polygamma,
}
