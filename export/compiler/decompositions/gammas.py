"""The logarithm of the gamma function and its derivatives, of which no runtime has one.

Stirling's series from 8 on, whose error there is below one rounding of float64:

    lgamma(x)     = (x - 1/2) log x - x + log(2 pi)/2 + sum_k B_2k / (2k (2k - 1) x^(2k - 1))
    digamma(x)    = log x - 1/(2x) - sum_k B_2k / (2k x^2k)
    trigamma(x)   = 1/x + 1/(2 x^2) + sum_k B_2k / x^(2k + 1)

Below 8 by gamma(x + 1) = x gamma(x), eight times; for x < 1/2 by the reflection at 1/2. Near the zeros of lgamma (1 and
2) and of digamma the absolute error is the rounding of numbers of size 10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from math import log, pi
from typing import Any

import torch
from torch import Tensor

from export.compiler.decompositions.angles import polynomial
from export.compiler.decompositions.supported_ops import UnsupportedOperator

aten = torch.ops.aten
SHIFT = 8
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)  # B_2, B_4, ...


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
