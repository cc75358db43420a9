"""Random operators of a training pass, computed from uniform numbers that are an input of the step.

A graph that drew numbers itself would repeat one draw in every step, or differ between runtimes. Here each random
operator takes the next columns of `noise` [batch, numbers per sample], in the order of the forward pass. Equal numbers
give the same masks in a traced graph, in torch's own float32 and in float64.

The numbers are multiples of 2^-24 below 1 (edge_client/training/noise.py), which float32 holds exactly. A probability
is rounded up to such a multiple before it is compared, so that no rounding decides: `u >= p` drops with probability p.
A normal number takes two uniform ones (Box and Muller 1958); none is farther from 0 than 5.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from edge_client.errors import ProgramRefused
from export.compiler.decompositions.supported_ops import UnsupportedOperator
from export.dispatch_mode import PlainDispatchMode

aten = torch.ops.aten
UNIFORM_STEPS = 2**24  # a number is k / UNIFORM_STEPS with an integer k from 0 to UNIFORM_STEPS - 1
Draw = Callable[[Sequence[int]], Tensor]  # shape -> uniform numbers of the program's dtype


def _keep_mask(u: Tensor, p: float) -> Tensor:
    """True with probability 1 - p; booleans."""
    return u >= math.ceil(p * UNIFORM_STEPS) / UNIFORM_STEPS


def _dropout(draw: Draw, x: Tensor, p: float, _train: object) -> tuple[Tensor, Tensor]:
    kept = _keep_mask(draw(x.shape), p)
    return x * kept.to(x.dtype) * (1 / (1 - p)), kept


def _rrelu(draw: Draw, x: Tensor, slopes: Tensor, low: float = 1 / 8, high: float = 1 / 3, *_: object) -> Tensor:
    """A slope below zero for each value; `slopes` keeps them for torch's gradient."""
    return x * slopes.copy_(torch.where(x > 0, torch.ones_like(x), _uniform(draw, x, low, high)))


def _bernoulli(draw: Draw, x: Tensor, p: float = 0.5) -> Tensor:
    return _keep_mask(draw(x.shape), 1 - p).to(x.dtype)


def _bernoulli_each(draw: Draw, p: Tensor) -> Tensor:
    """One probability per value."""
    return (draw(p.shape) < p).to(p.dtype)


def _uniform(draw: Draw, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * draw(x.shape)


def _normal(draw: Draw, shape: Sequence[int], mean: Tensor | float = 0.0, std: Tensor | float = 1.0) -> Tensor:
    radius = torch.sqrt(-2 * torch.log(1 - draw(shape)))
    return mean + std * (radius * torch.cos(2 * math.pi * draw(shape)))


def _normal_like(draw: Draw, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _normal(draw, x.shape, mean, std)


def _normal_around(draw: Draw, mean: Tensor | float, std: Tensor | float = 1.0) -> Tensor:
    """One mean or standard deviation per value."""
    shapes = [value.shape for value in (mean, std) if isinstance(value, Tensor)]
    return _normal(draw, torch.broadcast_shapes(*shapes), mean, std)  # type: ignore[no-untyped-call]


def _exponential(draw: Draw, x: Tensor, rate: float = 1.0) -> Tensor:
    """Above 0, as torch's, for a logarithm follows (gumbel_softmax)."""
    return torch.log1p(-draw(x.shape).clamp(min=0.5 / UNIFORM_STEPS)) * (-1 / rate)


def _whole(draw: Draw, low: int, high: int, shape: Sequence[int]) -> Tensor:
    """From `low` to `high` - 1, as floating point numbers.

    The product with a number below 1 does not reach its other factor. Raises UnsupportedOperator beyond 2^24, where
    most whole numbers would never be drawn.
    """
    if max(abs(low), abs(high), high - low) > UNIFORM_STEPS:
        raise UnsupportedOperator("randint", f"whole numbers are drawn up to {UNIFORM_STEPS:,}")
    return torch.floor(draw(shape) * (high - low)) + low


# The rule's result replaces the operator's; operators that write into an argument are in IN_PLACE_RULES.
RANDOM_RULES: Mapping[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _dropout,
    aten.rrelu_with_noise.default: _rrelu,
    aten.bernoulli.default: _bernoulli_each,
    aten.bernoulli.p: _bernoulli,
    aten.rand.default: lambda draw, size: draw(size),
    aten.rand_like.default: lambda draw, x: draw(x.shape),
    aten.uniform.default: _uniform,
    aten.randn.default: _normal,
    aten.randn_like.default: _normal_like,
    aten.normal_functional.default: _normal_like,
    aten.normal.Tensor_float: _normal_around,
    aten.normal.float_Tensor: _normal_around,
    aten.normal.Tensor_Tensor: _normal_around,
    aten.normal.float_float: lambda draw, mean, std, size: _normal(draw, size, mean, std),
    aten.exponential.default: _exponential,
}
WHOLE_RULES: Mapping[Any, Callable[..., Tensor]] = {  # their result becomes of the dtype that is asked for
    aten.randint.default: lambda draw, high, size: _whole(draw, 0, high, size),
    aten.randint.low: _whole,
    aten.randint_like.default: lambda draw, x, high: _whole(draw, 0, high, x.shape),
    aten.randint_like.low_dtype: lambda draw, x, low, high: _whole(draw, low, high, x.shape),
}
IN_PLACE_RULES: Mapping[Any, Callable[..., Tensor]] = {
    aten.rrelu_with_noise_.default: _rrelu,
    aten.bernoulli_.float: _bernoulli,
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal_like,
    aten.exponential_.default: _exponential,
}
COVERED_OPERATORS = frozenset(
    str(o.overloadpacket).removeprefix("torch.ops.") for o in (*RANDOM_RULES, *WHOLE_RULES, *IN_PLACE_RULES)
)


RANDOM_SLOPES = frozenset({aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default})


def draws(operator: Any, args: Sequence[Any]) -> bool:  # noqa: ANN401 - torch's
    """Whether this call of a random operator draws: random slopes have a switch for training."""
    return operator not in RANDOM_SLOPES or tuple(args[4:5]) == (True,)


TWICE = frozenset(f"aten.{name}" for name in ("randn", "randn_like", "normal", "normal_", "normal_functional"))


class NoiseReader(PlainDispatchMode):
    """A context in which random operators read `noise` [batch, numbers per sample], from left to right.

    The draws whose numbers are in `shared`, counted from 0, belong to no sample, as a mask of weights: they read the
    first row alone. Enter it outside of torch.func's transforms, so that it sees their plain tensors.
    """

    def __init__(self, noise: Tensor, shared: AbstractSet[int] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noise, self.shared, self.taken, self.draws = noise, shared, 0, 0

    def take(self, shape: Sequence[int]) -> Tensor:
        """The next columns in this shape, row by row; flat first, as torch may confuse two sizes."""
        shared = self.draws in self.shared
        rows = self.noise[:1] if shared else self.noise
        columns = math.prod(shape) // (1 if shared else self.noise.shape[0])
        u = rows[:, self.taken : self.taken + columns].reshape(-1)
        self.taken, self.draws = self.taken + columns, self.draws + 1
        return u.reshape(list(shape))

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        if not draws(func, args):
            return func(*args, **(kwargs or {}))
        if func in RANDOM_RULES:
            return RANDOM_RULES[func](self.take, *args)
        if func in WHOLE_RULES:
            usual = args[0].dtype if isinstance(args[0], Tensor) else torch.int64
            wanted = (kwargs or {}).get("dtype") or usual
            drawn = WHOLE_RULES[func](self.take, *args)
            return drawn if wanted.is_floating_point else drawn.to(wanted)  # else in the precision of the program
        if func in IN_PLACE_RULES:
            return args[0].copy_(IN_PLACE_RULES[func](self.take, *args))
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """Raise ProgramRefused unless the pass used every number."""
        if self.taken != self.noise.shape[1]:
            raise ProgramRefused(
                f"a training pass draws {self.taken} random numbers per sample here, and {self.noise.shape[1]} there",
                hint="draw the same random numbers in every training pass",
            )
