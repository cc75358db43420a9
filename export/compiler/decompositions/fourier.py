"""Fourier transforms as products with cosines and sines, so that no graph holds complex numbers; any gradient follows.

While a forward pass is exported, the functions of torch.fft and torch.stft give a `ComplexPair` (complex_pairs.py). A
transform of n values takes n (n / 2 + 1) products and two constant matrices, so axes are at most MAX_LENGTH long;
short_time.py has the short-time transforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from export.compiler.decompositions.complex_pairs import ComplexPair, real_of
from export.compiler.decompositions.matrices import through
from export.compiler.decompositions.supported_ops import UnsupportedOperator

MAX_LENGTH = 4_096  # the product of two places stays exact in float32
Axes = int | Sequence[int] | None


def fft(x: Tensor | ComplexPair, n: int | None = None, dim: int = -1, norm: str | None = None) -> ComplexPair:
    """Along one axis, which is cut or filled with zeros to n. Raises UnsupportedOperator for a long axis."""
    return _transform(x, n, dim, norm, sign=-1, keep=None)


def ifft(x: Tensor | ComplexPair, n: int | None = None, dim: int = -1, norm: str | None = None) -> ComplexPair:
    """The inverse of `fft`."""
    return _transform(x, n, dim, norm, sign=1, keep=None)


def rfft(x: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> ComplexPair:
    """The first n / 2 + 1 values of `fft`."""
    n = x.shape[dim] if n is None else n
    return _transform(x, n, dim, norm, sign=-1, keep=n // 2 + 1)


def irfft(x: Tensor | ComplexPair, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The inverse of `rfft`: n values, by default 2 (m - 1) of m. The imaginary part of the first value is ignored."""
    dim = dim % x.ndim
    n = 2 * (x.shape[dim] - 1) if n is None else n
    half = n // 2 + 1
    x = _resized(x, half, dim)
    k = torch.arange(half)
    twice = torch.where((k == 0) | (2 * k == n), 1.0, 2.0).to(real_of(x).dtype)
    cosine, sine = waves(half, n, n, real_of(x))
    scale = _scale(n, norm, forward=False)
    out = through(real_of(x), dim, (cosine * twice.unsqueeze(1)).t() * scale)
    if isinstance(x, ComplexPair):
        out = out - through(x.imag, dim, (sine * twice.unsqueeze(1)).t() * scale)
    return out


def over_axes(one: Callable[..., Any], last: Callable[..., Any] | None, default: Axes) -> Callable[..., Any]:
    """A transform of several axes: `one` along each, and `last` along the last of them (first if it gives complex)."""

    def transform(
        x: Any,  # noqa: ANN401 - real or complex
        s: Sequence[int] | None = None,
        dim: Axes = default,
        norm: str | None = None,
    ) -> Any:  # noqa: ANN401
        count = len(s) if dim is None and s is not None else x.ndim
        dims = [d % x.ndim for d in (range(-count, 0) if dim is None else [dim] if isinstance(dim, int) else dim)]
        sizes = [None] * len(dims) if s is None else [None if n == -1 else n for n in s]
        steps = [
            (last if last is not None and i == len(dims) - 1 else one, n, d)
            for i, (n, d) in enumerate(zip(sizes, dims, strict=True))
        ]
        for each, n, d in steps[::-1] if last is rfft else steps:
            x = each(x, n, d, norm)
        return x

    return transform


def _transform(
    x: Tensor | ComplexPair, n: int | None, dim: int, norm: str | None, *, sign: int, keep: int | None
) -> ComplexPair:
    """Sum over places t of x_t exp(sign 2 pi i k t / n) for k below `keep`."""
    dim = dim % x.ndim
    n = x.shape[dim] if n is None else n
    x = _resized(x, n, dim)
    real = real_of(x)
    cosine, sine = waves(keep or n, n, n, real)
    scale = _scale(n, norm, forward=sign < 0)
    cosine, sine = cosine * scale, sine * (sign * scale)
    if not isinstance(x, ComplexPair):
        return ComplexPair(through(real, dim, cosine), through(real, dim, sine))
    a, b = x.real, x.imag
    return ComplexPair(through(a, dim, cosine) - through(b, dim, sine), through(a, dim, sine) + through(b, dim, cosine))


def waves(rows: int, columns: int, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] cosines and sines of 2 pi k t / n, with k t taken modulo n before it becomes an angle.

    The sine of half a turn is 0 and not the rounding of pi, as the angle of what has no imaginary part hangs on it.
    """
    if n > MAX_LENGTH:
        raise UnsupportedOperator("fft", f"an axis of {n} values, at most {MAX_LENGTH}")
    turns = torch.remainder(torch.arange(rows).unsqueeze(1) * torch.arange(columns), n)
    angle = turns.to(like.dtype) * (2 * math.pi / n)
    return torch.cos(angle), torch.where(2 * turns == n, 0.0, torch.sin(angle))


def _scale(n: int, norm: str | None, *, forward: bool) -> float:
    if norm == "ortho":
        return 1 / math.sqrt(n)
    return 1 / n if (norm == "forward") == forward else 1.0


def _resized(x: Any, n: int, dim: int) -> Any:  # noqa: ANN401 - real or complex
    """Cut or filled with zeros to n along one axis."""
    if isinstance(x, ComplexPair):
        return ComplexPair(_resized(x.real, n, dim), _resized(x.imag, n, dim))
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    if n <= x.shape[dim]:
        return x.narrow(dim, 0, n)
    return nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, n - x.shape[dim]])


def fftshift(x: Any, dim: Axes = None) -> Any:  # noqa: ANN401 - real or complex
    """The middle of each axis comes first; see torch."""
    dims = list(range(x.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return x.roll([x.shape[d] // 2 for d in dims], dims)


def ifftshift(x: Any, dim: Axes = None) -> Any:  # noqa: ANN401 - real or complex
    """The inverse of `fftshift`."""
    dims = list(range(x.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return x.roll([-(x.shape[d] // 2) for d in dims], dims)


FOURIER_OVERRIDES: Mapping[Any, Callable[..., Any]] = {
    torch.fft.fft: fft,
    torch.fft.ifft: ifft,
    torch.fft.rfft: rfft,
    torch.fft.irfft: irfft,
    torch.fft.fft2: over_axes(fft, None, (-2, -1)),
    torch.fft.ifft2: over_axes(ifft, None, (-2, -1)),
    torch.fft.fftn: over_axes(fft, None, None),
    torch.fft.ifftn: over_axes(ifft, None, None),
    torch.fft.rfft2: over_axes(fft, rfft, (-2, -1)),
    torch.fft.irfft2: over_axes(ifft, irfft, (-2, -1)),
    torch.fft.rfftn: over_axes(fft, rfft, None),
    torch.fft.irfftn: over_axes(ifft, irfft, None),
    torch.fft.fftshift: fftshift,
    torch.fft.ifftshift: ifftshift,
}
