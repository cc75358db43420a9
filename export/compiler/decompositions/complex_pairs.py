"""Complex numbers as pairs of real tensors, so that no graph holds a complex one; any gradient follows.

While a forward pass is exported or recorded, what makes complex tensors (torch.fft, torch.polar, torch.view_as_complex,
a product with 1j) gives a `ComplexPair`: two real tensors with the arithmetic of a complex one. So does a function that
gets a complex tensor of the module's own, as the rotations of rotary positions. What a model makes real again (`.real`,
`abs`, `view_as_real`) is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's custom
from torch.utils._python_dispatch import _disable_current_modes

from export.compiler.decompositions.supported_ops import UnsupportedOperator


@dataclass(frozen=True, eq=False)
class ComplexPair:
    """A complex tensor as its real and its imaginary part, of one shape. Other operators than these are refused."""

    real: Tensor
    imag: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        name = getattr(func, "__name__", str(func))
        if func in COVERED:
            return COVERED[func](*args, **(kwargs or {}))
        if isinstance(args[0], cls) and name in ALIKE:
            return args[0].alike(name, *args[1:], **(kwargs or {}))
        if isinstance(args[0], cls) and name in SEVERAL:
            return args[0].several(name, *args[1:], **(kwargs or {}))
        raise UnsupportedOperator(name, "this operator is not covered for complex numbers")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a method
        if name in ALIKE:
            return lambda *args, **kwargs: self.alike(name, *args, **kwargs)
        if name in SEVERAL:
            return lambda *args, **kwargs: self.several(name, *args, **kwargs)
        if name in METHODS:
            return lambda *args, **kwargs: METHODS[name](self, *args, **kwargs)
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedOperator(name, "this operator is not covered for complex numbers")

    def alike(self, name: str, *args: Any, **kwargs: Any) -> ComplexPair:  # noqa: ANN401 - torch's
        """An operator that does the same to both parts; a complex dtype is that of a pair's parts."""
        args, named = tuple(map(_of_a_part, args)), {key: _of_a_part(value) for key, value in kwargs.items()}
        return ComplexPair(*(getattr(part, name)(*args, **named) for part in (self.real, self.imag)))

    def several(self, name: str, *args: Any, **kwargs: Any) -> tuple[ComplexPair, ...]:  # noqa: ANN401 - torch's
        """An operator that cuts both parts alike."""
        parts = (getattr(part, name)(*args, **kwargs) for part in (self.real, self.imag))
        return tuple(ComplexPair(real, imag) for real, imag in zip(*parts, strict=True))

    def __getitem__(self, key: Any) -> ComplexPair:  # noqa: ANN401 - torch's
        return ComplexPair(self.real[key], self.imag[key])

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - torch's
        self.real[key], self.imag[key] = real_of(value), imag_of(value)

    def __add__(self, other: Any) -> ComplexPair:  # noqa: ANN401 - a pair, a tensor or a number
        return of_one_shape(self.real + real_of(other), self.imag + imag_of(other))

    def __sub__(self, other: Any) -> ComplexPair:  # noqa: ANN401
        return of_one_shape(self.real - real_of(other), self.imag - imag_of(other))

    def __rsub__(self, other: Any) -> ComplexPair:  # noqa: ANN401
        return of_one_shape(real_of(other) - self.real, imag_of(other) - self.imag)

    def __matmul__(self, other: Any) -> ComplexPair:  # noqa: ANN401
        return product_by(torch.matmul)(self, other)

    def __abs__(self) -> Tensor:
        return magnitude(self)

    def __neg__(self) -> ComplexPair:
        return ComplexPair(-self.real, -self.imag)

    def __mul__(self, other: Any) -> ComplexPair:  # noqa: ANN401
        other = as_pair(other)
        if not isinstance(other, ComplexPair):
            return ComplexPair(self.real * other, self.imag * other)
        a, b = other.real, other.imag
        return ComplexPair(self.real * a - self.imag * b, self.real * b + self.imag * a)

    __radd__, __rmul__ = __add__, __mul__
    __hash__ = object.__hash__

    def __pow__(self, exponent: Any) -> ComplexPair:  # noqa: ANN401
        return power(self, exponent)

    def __rpow__(self, base: Any) -> ComplexPair:  # noqa: ANN401
        return power(base, self)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]  # torch's
        return torch.logical_and(self.real == real_of(other), self.imag == imag_of(other))

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return torch.logical_not(self == other)

    def __len__(self) -> int:
        return len(self.real)

    def __truediv__(self, other: Any) -> ComplexPair:  # noqa: ANN401
        return quotient(self, as_pair(other))

    def __rtruediv__(self, other: Any) -> ComplexPair:  # noqa: ANN401
        return quotient(as_pair(other), self)

    @property
    def shape(self) -> torch.Size:
        return self.real.shape

    @property
    def device(self) -> torch.device:
        return self.real.device

    @property
    def dtype(self) -> torch.dtype:
        return self.real.dtype.to_complex()

    @property
    def T(self) -> ComplexPair:  # noqa: N802 - torch's
        return self.alike("permute", tuple(reversed(range(self.ndim))))

    @property
    def H(self) -> ComplexPair:  # noqa: N802 - torch's
        return self.T.conj()

    @property
    def mT(self) -> ComplexPair:  # noqa: N802 - torch's
        return self.alike("transpose", -2, -1)

    @property
    def mH(self) -> ComplexPair:  # noqa: N802 - torch's
        return self.mT.conj()

    @property
    def ndim(self) -> int:
        return self.real.dim()

    def dim(self) -> int:
        return self.real.dim()

    def size(self, *dim: int) -> Any:  # noqa: ANN401 - torch's
        return self.real.size(*dim)

    def is_complex(self) -> bool:
        return True

    def conj(self) -> ComplexPair:
        return ComplexPair(self.real, -self.imag)

    def abs(self) -> Tensor:
        """The magnitude; its gradient at 0 is 0, as torch's."""
        return magnitude(self)

    def angle(self) -> Tensor:
        """The angle, from -pi to pi."""
        return angle(self)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What does the same to both parts: shapes, places, sums.
ALIKE = _names("""
    clone contiguous cumsum detach diagonal diff expand flatten flip gather index_select mean movedim narrow permute
    repeat reshape resolve_conj roll select squeeze sum swapaxes swapdims t to transpose tril triu type unflatten
    unfold unsqueeze view
""")


SEVERAL = ("chunk", "split", "tensor_split", "unbind")  # as ALIKE, with several results


def _of_a_part(value: Any) -> Any:  # noqa: ANN401 - an argument
    return value.to_real() if isinstance(value, torch.dtype) and value.is_complex else value


def real_of(value: Any) -> Any:  # noqa: ANN401 - a pair, a tensor or a number
    """The real part of what is complex; anything else as it is."""
    value = as_pair(value)
    return value.real if isinstance(value, ComplexPair) else value


def imag_of(value: Any) -> Any:  # noqa: ANN401
    """The imaginary part of what is complex; 0 for anything else."""
    value = as_pair(value)
    return value.imag if isinstance(value, ComplexPair) else 0.0


def of_one_shape(real: Tensor, imag: Tensor) -> ComplexPair:
    """A pair of both parts, each repeated along the axes where the other one alone is longer than 1."""
    if str(imag.shape) == str(real.shape):  # as text: numbers would be compared with the size of the batch
        return ComplexPair(real, imag)
    return ComplexPair(real + torch.zeros_like(imag), imag + torch.zeros_like(real))


def magnitude(x: ComplexPair) -> Tensor:
    """sqrt(re^2 + im^2) as a norm, whose gradient at 0 is 0."""
    norms: Tensor = torch.linalg.vector_norm(torch.stack([x.real, x.imag], -1), 2, -1)
    return norms


def angle(x: ComplexPair) -> Tensor:
    """atan2 of both parts; its gradient at 0 is 0, as torch's."""
    zero = (x.real == 0) & (x.imag == 0)
    real, imag = (torch.copysign(torch.full_like(part, size), part) for part, size in ((x.real, 1.0), (x.imag, 0.0)))
    return torch.atan2(torch.where(zero, imag, x.imag), torch.where(zero, real, x.real))


def view_as_real(x: ComplexPair) -> Tensor:
    """Both parts side by side, [..., 2]."""
    return torch.stack([x.real, x.imag], -1)


def view_as_complex(x: Tensor) -> ComplexPair:
    """[..., 2] as a pair."""
    return ComplexPair(x[..., 0], x[..., 1])


def polar(size: Tensor, angle: Tensor) -> ComplexPair:
    """A pair of this size and angle."""
    return ComplexPair(size * torch.cos(angle), size * torch.sin(angle))


def exponential(x: ComplexPair) -> ComplexPair:
    """The exponential: its size is that of the real part, its angle the imaginary one."""
    return polar(torch.exp(x.real), x.imag)


def side_by_side(join: Callable[..., Tensor]) -> Callable[..., ComplexPair]:
    """A function of a list of tensors, as torch.cat, for pairs and real tensors."""

    def joined(parts: Sequence[Any], *args: Any, **kwargs: Any) -> ComplexPair:  # noqa: ANN401 - torch's
        pairs = [as_pair(part) for part in parts]
        imag = [part.imag if isinstance(part, ComplexPair) else torch.zeros_like(part) for part in pairs]
        return ComplexPair(join([real_of(part) for part in pairs], *args, **kwargs), join(imag, *args, **kwargs))

    return joined


def product_by(multiply: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], ComplexPair]:
    """A product that is linear in each of two tensors, for a pair and a pair or a real tensor."""

    def product(x: Any, y: Any) -> ComplexPair:  # noqa: ANN401 - a pair or a tensor
        x, y = as_pair(x), as_pair(y)
        if not isinstance(y, ComplexPair):
            return ComplexPair(multiply(x.real, y), multiply(x.imag, y))
        if not isinstance(x, ComplexPair):
            return ComplexPair(multiply(x, y.real), multiply(x, y.imag))
        real = multiply(x.real, y.real) - multiply(x.imag, y.imag)
        return ComplexPair(real, multiply(x.real, y.imag) + multiply(x.imag, y.real))

    return product


def quotient(x: Any, y: Any) -> ComplexPair:  # noqa: ANN401 - a pair or a tensor
    """The first over the second."""
    if not isinstance(y, ComplexPair):
        return ComplexPair(x.real / y, x.imag / y)
    turned = y.conj() * x
    size = y.real * y.real + y.imag * y.imag
    return ComplexPair(turned.real / size, turned.imag / size)


def logarithm(x: ComplexPair) -> ComplexPair:
    """The principal logarithm: that of the size, and the angle."""
    return ComplexPair(torch.log(magnitude(x)), angle(x))


def power(x: Any, exponent: Any) -> ComplexPair:  # noqa: ANN401 - a pair or a tensor, and a number or a tensor
    """Products for a whole number, also as 2.0, else exp(exponent log x): so 0 has the gradient of torch's."""
    x, exponent = as_pair(x), as_pair(exponent)
    if not isinstance(x, ComplexPair):
        raise UnsupportedOperator("pow", "a complex power of a real number is not covered")
    if not (isinstance(exponent, int | float) and exponent % 1 == 0):
        return exponential(logarithm(x) * exponent)
    one = found = ComplexPair(torch.ones_like(x.real), torch.zeros_like(x.real))
    for bit in reversed(f"{abs(int(exponent)):b}"):
        found, x = (found * x if bit == "1" else found), x * x
    return found if exponent >= 0 else quotient(one, found)


def choose(mask: Tensor, x: Any, y: Any) -> ComplexPair:  # noqa: ANN401 - pairs, tensors or numbers
    """See torch.where."""
    return of_one_shape(*(torch.where(mask, part(x), part(y)) for part in (real_of, imag_of)))


def pad(x: ComplexPair, places: Sequence[int], mode: str = "constant", value: Any = None) -> ComplexPair:  # noqa: ANN401
    """See F.pad; a constant goes into both parts."""
    parts = ((x.real, real_of(value or 0.0)), (x.imag, imag_of(value or 0.0)))
    return ComplexPair(*(F.pad(part, places, mode, number) for part, number in parts))


def zeros(*size: Any, dtype: torch.dtype | None = None, **named: Any) -> Any:  # noqa: ANN401 - torch's
    """See torch.zeros; a pair where the dtype is complex, as for the modes that a Fourier layer leaves out."""
    if dtype is None or not dtype.is_complex:
        return ZEROS(*size, dtype=dtype, **named)
    return ComplexPair(*(ZEROS(*size, dtype=dtype.to_real(), **named) for _ in range(2)))


def to(x: Tensor, *args: Any, **named: Any) -> Any:  # noqa: ANN401 - torch's
    """See Tensor.to; a pair where the dtype is complex."""
    if not any(isinstance(value, torch.dtype) and value.is_complex for value in (*args, *named.values())):
        return TO(x, *args, **named)
    return ComplexPair(x, torch.zeros_like(x)).alike("to", *args, **named)


ZEROS, TO = torch.zeros, Tensor.to


def einsum(equation: str, *operands: Any) -> ComplexPair:  # noqa: ANN401 - pairs or tensors
    """See torch.einsum, of one or two tensors."""
    if len(operands) == 1:
        return ComplexPair(*(torch.einsum(equation, part) for part in (operands[0].real, operands[0].imag)))
    if len(operands) > 2:  # noqa: PLR2004 - a product
        raise UnsupportedOperator("einsum", "complex numbers in more than two tensors at once are not covered")
    return product_by(lambda x, y: torch.einsum(equation, x, y))(*operands)


METHODS: Mapping[str, Callable[..., Any]] = {  # functions of torch, too
    "pow": power,
    "log": logarithm,
    "exp": exponential,
    "masked_fill": lambda x, mask, value: choose(mask, value, x),
}
COVERED: Mapping[Any, Callable[..., Any]] = {
    **{getattr(torch, name): rule for name, rule in METHODS.items()},
    **{getattr(Tensor, name): rule for name, rule in METHODS.items()},
    Tensor.__pow__: power,
    torch.where: choose,
    F.pad: pad,
    torch.abs: magnitude,
    Tensor.abs: magnitude,
    torch.angle: angle,
    Tensor.angle: angle,
    torch.is_complex: ComplexPair.is_complex,
    torch.real: lambda x: x.real,
    torch.imag: lambda x: x.imag,
    torch.view_as_real: view_as_real,
    Tensor.real.__get__: lambda x: x.real,  # type: ignore[attr-defined]  # a getter in C
    Tensor.imag.__get__: lambda x: x.imag,  # type: ignore[attr-defined]
    **{getattr(Tensor, turn).__get__: getattr(ComplexPair, turn).fget for turn in ("T", "H", "mT", "mH")},
    Tensor.__getitem__: ComplexPair.__getitem__,
    torch.zeros_like: lambda x: ComplexPair(torch.zeros_like(x.real), torch.zeros_like(x.imag)),
    torch.conj: ComplexPair.conj,
    Tensor.conj: ComplexPair.conj,
    torch.cat: side_by_side(torch.cat),
    torch.stack: side_by_side(torch.stack),
    torch.einsum: einsum,
    torch.matmul: product_by(torch.matmul),
    Tensor.matmul: product_by(torch.matmul),
    Tensor.__matmul__: product_by(torch.matmul),
    torch.bmm: product_by(torch.bmm),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), lambda x, y: y * x),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), lambda x, y: y + x),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__), lambda x, y: -y + x),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__), quotient),
}
COMPLEX_OVERRIDES: Mapping[Any, Callable[..., Any]] = {
    torch.complex: of_one_shape,
    torch.polar: polar,
    torch.view_as_complex: view_as_complex,
    torch.zeros: zeros,
    Tensor.to: to,
}


def is_complex_call(func: Any, args: Sequence[Any]) -> bool:  # noqa: ANN401 - a function of torch
    """Whether a function that pairs cover gets a complex number or a complex tensor, as one of the module's own."""
    covered = func in COVERED or getattr(func, "__name__", "") in ALIKE.union(SEVERAL)
    return covered and any(isinstance(x, complex) or (isinstance(x, Tensor) and x.is_complex()) for x in args)


def as_pair(value: Any) -> Any:  # noqa: ANN401 - an argument of any function
    """A complex number or tensor as a pair, anything else as it is. Of a constant the parts are constants."""
    if isinstance(value, complex):
        return ComplexPair(value.real, value.imag)  # type: ignore[arg-type]  # numbers serve as well
    if not (isinstance(value, Tensor) and value.is_complex()):
        return value
    if torch.compiler.is_exporting() and type(value) is Tensor:  # from outside of the graph: what it computes is none
        with _disable_current_modes():
            return ComplexPair(value.real.clone(), value.imag.clone())
    return ComplexPair(value.real, value.imag)


def call_of_pairs(func: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's
    """A covered function, with pairs in the place of complex arguments."""
    return ComplexPair.__torch_function__(func, (), tuple(as_pair(x) for x in args), kwargs)
