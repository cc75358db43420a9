"""Fourier transforms as products with cosines and sines, so that no graph holds complex numbers; any gradient follows.

While a forward pass is exported, the functions of torch.fft, torch.stft and those that make complex tensors give a
`ComplexPair`: two real tensors with the arithmetic of a complex one. What a model makes real again (`.real`, `abs`,
`view_as_real`) is a plain tensor. A transform of n values takes n (n / 2 + 1) products and two constant matrices, so
axes are at most MAX_LENGTH long; short_time.py has the short-time transforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from export.compiler.decompositions.matrices import through
from export.compiler.decompositions.supported_ops import UnsupportedOperator

MAX_LENGTH = 4_096  # the product of two places stays exact in float32
Axes = int | Sequence[int] | None


@dataclass(frozen=True, eq=False)
class ComplexPair:
    """A complex tensor as its real and its imaginary part, of one shape. Other operators than these are refused."""

    real: Tensor
    imag: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        name = getattr(func, "__name__", str(func))
        if func in MAKES_REAL:
            return MAKES_REAL[func](*args, **(kwargs or {}))
        if isinstance(args[0], cls) and name in ALIKE:
            return args[0].alike(name, *args[1:], **(kwargs or {}))
        raise UnsupportedOperator(name, "this operator is not covered for complex numbers")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a method
        if name in ALIKE:
            return lambda *args, **kwargs: self.alike(name, *args, **kwargs)
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedOperator(name, "this operator is not covered for complex numbers")

    def alike(self, name: str, *args: Any, **kwargs: Any) -> ComplexPair:  # noqa: ANN401 - torch's
        """An operator that does the same to both parts."""
        return ComplexPair(*(getattr(part, name)(*args, **kwargs) for part in (self.real, self.imag)))

    def __getitem__(self, key: Any) -> ComplexPair:  # noqa: ANN401 - torch's
        return ComplexPair(self.real[key], self.imag[key])

    def __add__(self, other: Any) -> ComplexPair:  # noqa: ANN401 - a pair, a tensor or a number
        return ComplexPair(self.real + real_of(other), self.imag + imag_of(other))

    def __sub__(self, other: Any) -> ComplexPair:  # noqa: ANN401
        return ComplexPair(self.real - real_of(other), self.imag - imag_of(other))

    def __neg__(self) -> ComplexPair:
        return ComplexPair(-self.real, -self.imag)

    def __mul__(self, other: Any) -> ComplexPair:  # noqa: ANN401
        if not isinstance(other, (ComplexPair, complex)):
            return ComplexPair(self.real * other, self.imag * other)
        a, b = real_of(other), imag_of(other)
        return ComplexPair(self.real * a - self.imag * b, self.real * b + self.imag * a)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Tensor | float) -> ComplexPair:
        return ComplexPair(self.real / other, self.imag / other)

    @property
    def shape(self) -> torch.Size:
        return self.real.shape

    @property
    def ndim(self) -> int:
        return self.real.dim()

    def dim(self) -> int:
        return self.real.dim()

    def size(self, *dim: int) -> Any:  # noqa: ANN401 - torch's
        return self.real.size(*dim)

    def conj(self) -> ComplexPair:
        return ComplexPair(self.real, -self.imag)

    def abs(self) -> Tensor:
        """The magnitude; its gradient at 0 is 0, as torch's."""
        return magnitude(self)


# What does the same to both parts: shapes, places, sums.
ALIKE = frozenset(
    [
        "clone",
        "contiguous",
        "detach",
        "expand",
        "flatten",
        "flip",
        "mean",
        "movedim",
        "narrow",
        "permute",
        "repeat",
        "reshape",
        "roll",
        "select",
        "squeeze",
        "sum",
        "swapaxes",
        "swapdims",
        "t",
        "to",
        "transpose",
        "type",
        "unflatten",
        "unsqueeze",
        "view",
    ]
)


def real_of(value: Any) -> Any:  # noqa: ANN401 - a pair, a tensor or a number
    """The real part of a pair or a number; anything else as it is."""
    return value.real if isinstance(value, (ComplexPair, complex)) else value


def imag_of(value: Any) -> Any:  # noqa: ANN401
    """The imaginary part of a pair or a number; 0 for anything else."""
    return value.imag if isinstance(value, (ComplexPair, complex)) else 0.0


def magnitude(x: ComplexPair) -> Tensor:
    """sqrt(re^2 + im^2) as a norm, whose gradient at 0 is 0."""
    norms: Tensor = torch.linalg.vector_norm(torch.stack([x.real, x.imag], -1), 2, -1)
    return norms


def view_as_real(x: ComplexPair) -> Tensor:
    """Both parts side by side, [..., 2]."""
    return torch.stack([x.real, x.imag], -1)


def view_as_complex(x: Tensor) -> ComplexPair:
    """[..., 2] as a pair."""
    return ComplexPair(x[..., 0], x[..., 1])


def polar(size: Tensor, angle: Tensor) -> ComplexPair:
    """A pair of this size and angle."""
    return ComplexPair(size * torch.cos(angle), size * torch.sin(angle))


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
    """[rows, columns] cosines and sines of 2 pi k t / n, with k t taken modulo n before it becomes an angle."""
    if n > MAX_LENGTH:
        raise UnsupportedOperator("fft", f"an axis of {n} values, at most {MAX_LENGTH}")
    turns = torch.remainder(torch.arange(rows).unsqueeze(1) * torch.arange(columns), n)
    angle = turns.to(like.dtype) * (2 * math.pi / n)
    return torch.cos(angle), torch.sin(angle)


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


MAKES_REAL: Mapping[Any, Callable[..., Any]] = {
    torch.abs: magnitude,
    Tensor.abs: magnitude,
    torch.real: lambda x: x.real,
    torch.imag: lambda x: x.imag,
    torch.view_as_real: view_as_real,
    torch.conj: ComplexPair.conj,
    torch.mul: lambda x, y: x * y if isinstance(x, ComplexPair) else y * x,
    Tensor.__mul__: lambda x, y: y * x,
    Tensor.mul: lambda x, y: y * x,
    Tensor.__rmul__: lambda x, y: y * x,
    torch.add: lambda x, y: x + y if isinstance(x, ComplexPair) else y + x,
    Tensor.__add__: lambda x, y: y + x,
}
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
    torch.complex: ComplexPair,
    torch.polar: polar,
    torch.view_as_complex: view_as_complex,
}
