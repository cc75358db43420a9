"""Values picked and placed by number, slices with steps, norms of vectors: as in torch, with their gradients.

Each network runs twice, in torch and with the operators of the decomposition table in place of torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom
from torch.utils._python_dispatch import TorchDispatchMode

from edge_client.errors import ProgramRefused
from export.compiler.decompositions import picks
from export.compiler.decompositions.indexing import INDEXING_DECOMPOSITIONS
from export.compiler.decompositions.table import OWN_DECOMPOSITIONS
from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import compile_program, make_source
from export.compiler.tracing import trace_function

TOLERANCE = 1e-12  # float64; sums of fewer than a hundred values
BOUNDS = torch.tensor([-1.0, 0.0, 1.0, 1.5]).double()
BYTES = torch.tensor([[3, 0, 2, 1, 9]], dtype=torch.uint8)
ROWS = torch.tensor([[3, 0], [1, 1]])
TWICE, PLACES = torch.tensor([[[4, 0, 4]]]), torch.tensor([3, 0, 0, 3, 3])


def reduced(how: str, x: Tensor, *, kept: bool) -> Tensor:
    wide = torch.cat([x[:, :1], x * 2], 1)
    return wide.scatter_reduce(1, ROWS.reshape(2, 2, 1).expand(2, 2, 5), x[:, 2:], how, include_self=kept)


def _low_digits() -> Tensor:
    """[2, 4, 5]: what is left of numbers from 2^40 on that were picked and placed."""
    big, rows = 2**40 + torch.arange(40).reshape(2, 4, 5), ROWS.reshape(2, 2, 1).expand(2, 2, 5)
    placed = torch.full_like(big, 2**40).scatter(2, torch.tensor([[[4, 0]]]).expand(2, 4, 2), big[..., 1:3])
    placed[:, torch.tensor([1, 3])] = big[:, :2]
    least = big.scatter_reduce(1, rows, big[:, 2:] - 7, "amin") + big.scatter_reduce(1, rows, big[:, 2:] + 7, "amax")
    picked = big.gather(1, rows).sum(1, keepdim=True) + big.flip(1).cummin(1).values + big.cummax(2).values
    return (placed + least + picked - 7 * 2**40).double()


def _counted_in_bytes() -> Tensor:
    """[5]: bytes hold no count of 256, as of the padding in a long text."""
    none, everywhere = torch.zeros(5, dtype=torch.uint8), torch.zeros(256, dtype=torch.int64)
    put = none.scatter(0, everywhere, 1) + none.scatter(0, everywhere, torch.full((256,), 2, dtype=torch.uint8))
    return (put + none.scatter_reduce(0, everywhere, torch.full((256,), 4, dtype=torch.uint8), "amax")).double()


NETWORKS: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda x: x.gather(1, ROWS.reshape(2, 2, 1).expand(2, 2, 5)),
    "gather of a part": lambda x: x.gather(2, ROWS.reshape(1, 2, 2)),
    "scatter_add": lambda x: torch.ones(2, 4, 5).double().scatter_add(1, ROWS.reshape(2, 2, 1).expand(2, 2, 3), x),
    "scatter": lambda x: x.scatter(2, torch.tensor([[[4, 0]]]).expand(2, 4, 2), x[..., :2] * 2),
    "scatter of a number": lambda x: x.scatter(1, torch.tensor([[[2]]]), 7.0),
    "scatter to a place named twice": lambda x: x.scatter(2, TWICE.expand(2, 4, 3), x[..., :3] * 2),
    "scatter of a number to a place named twice": lambda x: x.scatter(2, TWICE, 3.0) * 2,
    "bytes at a place named 256 times": lambda x: x * _counted_in_bytes(),
    **{
        f"scatter_reduce {how}{' beside what was there' if kept else ''}": partial(reduced, how, kept=kept)
        for how in ("sum", "mean", "amax", "amin")
        for kept in (False, True)
    },
    "means of whole numbers": lambda x: x * torch.arange(5).scatter_reduce(0, PLACES, 9 * PLACES - 8, "mean"),
    "a spread of everything": lambda x: x * x.var(()),
    "a number where a mask of an axis is": lambda x: _masked(x, x[0, 0, 0]),
    "diagonals": lambda x: x.diagonal(1, 1, 2) * torch.diag_embed(x[:, :3, 2], -1).diagonal(-1, 1, 2)[:, :1],
    "a diagonal in place": lambda x: x.diagonal_scatter(x[:, 0, :3] * 2, 2, 1, 2),
    "middles": lambda x: _untied(x).median(1).values * _untied(x).kthvalue(2, 2, keepdim=True).values[..., 0].sum(),
    "ranks among bounds": lambda x: (
        x * (torch.bucketize(x.round(), BOUNDS) + torch.bucketize(x.round(), BOUNDS, right=True, out_int32=True))
    ),
    "ranks among the bounds of each row": lambda x: (
        x * torch.searchsorted(x.sort(-1).values, x) + torch.searchsorted(BOUNDS, x.round(), side="right")
    ),
    "the ranks of NaN": lambda x: (
        x * torch.bucketize(_with_nan(x), BOUNDS) + torch.searchsorted(BOUNDS, _with_nan(x), right=True)
    ),
    "powers of two, signs and what is infinite": lambda x: (
        torch.exp2(x)
        + x * torch.signbit(x * 0)
        + x * torch.isinf(1 / (x > 0).double())
        + x * torch.signbit(TWICE - 4)[..., :1]
    ),
    "functions of exponents": lambda x: (
        torch.log10(x.abs() + 1) + torch.log2(x * x + 1) + x.sinh() * x.cosh() + x.tan()
    ),
    "any": lambda x: x * (x > 1).any(1, keepdim=True) + x * (x > 9).any() + x * (x > 1).any((0, 2), keepdim=True),
    "whole numbers beyond float32's": lambda x: x * _low_digits(),
    "index_select": lambda x: x.index_select(-1, torch.tensor([4, 0, 0])),
    "windows": lambda x: x.unfold(1, 2, 1).unfold(2, 3, 2),
    "cumsum": lambda x: x.cumsum(1) * x.cumsum(-1),
    "cumulated extremes": lambda x: (
        x.cummax(1).values * x.cummax(1).indices + x.round().cummin(-1).values * x.round().cummin(-1).indices
    ),
    "the larger or smaller": lambda x: torch.fmax(x, x[:, :1]) * 2 + torch.fmin(_with_nan(x), x[..., :1]),
    "lengths": lambda x: torch.hypot(x, x[:, :1] * 1e200) + torch.hypot(x + 3, x),
    "a length beside an infinity": lambda x: torch.hypot(x, torch.full_like(x, torch.inf)) + x,
    "signs": lambda x: torch.copysign(x, x[:, :1] * -0.0) * 2 + torch.copysign(x, -3.0) + torch.erfc(x),
    "either": lambda x: x * ((x > 0) ^ (x[:, :1] < 1)) + x * torch.logical_xor(x.round(), x > 1),
    "roll": lambda x: x.roll((-1, 7), (1, 2)) * x.roll(3),
    "extremes": lambda x: x.max(1).values + x.min(1, keepdim=True).values[:, 0] * x.argmax(1) + x.argmin(),
    "topk": lambda x: torch.cat(
        [*(a.double() for a in _untied(x).topk(2, 1)), _untied(x).topk(1, 1, largest=False).values], 1
    ),
    "an order undone": lambda x: x.gather(1, x.sum(0, keepdim=True).argsort(1).argsort(1)),
    "sort": lambda x: x.sort(-1, descending=True).values * x.sort(1).values,
    "a stable order": lambda x: math.prod(x.sort(stable=True, dim=1, descending=True)) * x,
    "slices with steps": lambda x: x[:, ::3, 1::2] * x[:, 1::2, :2],
    "rounding": lambda x: x * x.floor() + x.trunc() + x % 0.7 + torch.fmod(x, 0.3) * x,
    "whole numbers": lambda x: x * (torch.arange(-2, 3) % 3) + torch.fmod(torch.arange(-2, 3), 2) * x,
    "whole numbers by fractions": lambda x: x * (torch.arange(-2, 3) % 1.5) + torch.fmod(torch.arange(-2, 3), 0.75) * x,
    "extremes of bytes": lambda x: x * BYTES.argmin(1) + x * BYTES.min(1).indices + x * BYTES.min(1).values,
    "a diagonal of booleans": lambda x: x[:, :4, :4] * ~(x > 0).diagonal(0, 1, 2).unsqueeze(1),
    "norms": lambda x: sum(torch.linalg.vector_norm(x, p, 1) * x.sum(1) for p in (0, 1, 2, 3, torch.inf)),
    "a norm of nothing": lambda x: (x * 0).norm(dim=1) + x[:, 0],
    "spread": lambda x: x.std(1) * x.var((0, 2), correction=0)[0],
    "assigned": lambda x: _assigned(x),  # noqa: PLW0108 - defined below
    "frozen statistics": lambda x: _frozen_norm(x),  # noqa: PLW0108 - defined below
}


def _frozen_norm(x: Tensor) -> Tensor:
    mean, variance, weight, bias = torch.rand(4, 4).double().unbind()
    return F.batch_norm(x, mean, variance, weight, bias, training=False)


def _masked(x: Tensor, number: Tensor) -> Tensor:
    put, rows = torch.ops.aten.index_put, torch.tensor([True, False, True, False])
    out: Tensor = put(put(x * 2, [None, rows], number.detach()), [x[..., 0] > 0], torch.tensor(2.5).double(), True)  # noqa: FBT003 - torch's signature
    return out


def _with_nan(x: Tensor) -> Tensor:
    return x.masked_fill(x > 1, torch.nan)


def _untied(x: Tensor) -> Tensor:
    """Of equal values torch.topk takes any."""
    return x * torch.linspace(1, 2, x.numel(), dtype=x.dtype).reshape(x.shape)


def _assigned(x: Tensor) -> Tensor:
    out = x * 2
    out[:, 1:3] = x[:, :2]
    out[:, :, 4] = x[:, :, 0]
    return out


class OwnOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook
    """A context in which the table's functions stand for torch's operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used: set[Any] = set()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        own = {**OWN_DECOMPOSITIONS, **INDEXING_DECOMPOSITIONS}.get(func)
        out = NotImplemented if own is None else own(*args, **(kwargs or {}))
        if out is NotImplemented:
            return func(*args, **(kwargs or {}))
        self.used.add(func)
        return out


@pytest.mark.parametrize("name", NETWORKS)
def test_values_and_gradients_are_torchs(name: str) -> None:
    values = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[0, 0] = values[0, 1]  # ties

    def run() -> list[Tensor]:
        x = (values[:, :2, :3] if name == "scatter_add" else values).clone().requires_grad_()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            out = NETWORKS[name](x)
        weight = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)
        return [out.detach(), *torch.autograd.grad(out, x, weight)]

    expected = run()
    with OwnOperators() as ours:
        found = run()
    assert ours.used
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, rtol=0, atol=TOLERANCE)


PRODUCTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "prod": lambda of, x: of.prod(x, 1) * of.prod(x, -1, keepdim=True)[..., 0].sum() + of.prod(x),
    "cumprod": lambda of, x: of.cumprod(x, 1) * of.cumprod(x, -1),
    "logcumsumexp": lambda of, x: of.logcumsumexp(x, 1) * of.logcumsumexp(x * 300, -1),
    "whole numbers": lambda of, x: x * of.prod(torch.arange(1, 6) > 2, 0) * of.cumprod(torch.arange(1, 6), 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_products_and_their_gradients_are_torchs_with_zeros_too(name: str, zeros: int) -> None:
    values = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[0, 0, :zeros] = values[1, :zeros, 2] = 0

    def run(functions: Any) -> list[Tensor]:  # noqa: ANN401 - torch, or a module with functions of the same names
        x = values.clone().requires_grad_()
        out = PRODUCTS[name](functions, x)
        weight = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)
        return [out.detach(), *torch.autograd.grad(out, x, weight)]

    for found, expected in zip(run(picks), run(torch), strict=True):
        assert torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_cumulated_sum_knows_infinity_and_leaves_what_stands_before_it() -> None:
    x = torch.tensor([[1.0, torch.inf, 2.0, 3.0], [4.0, 5.0, -torch.inf, 6.0]])
    assert torch.equal(picks.cumsum(x, 1), x.cumsum(1))
    assert torch.equal(picks.cumsum(x, -1, dtype=torch.float64), x.cumsum(1, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_whole_numbers_that_float32_cannot_tell_apart_are_ordered_and_summed(dtype: torch.dtype) -> None:
    x = 2**24 + torch.tensor([[1, 3, 2, 7], [5, 4, 6, 0]], dtype=dtype)
    for found, expected in zip(picks.topk(x, 3, 1), x.topk(3, 1), strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(picks.sort(x, 0), x.sort(0), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(picks.argmax(x, 1), x.argmax(1))
    assert torch.equal(picks.cumsum(x, 1), x.cumsum(1))


def test_the_largest_of_values_without_a_bound_stands_at_its_last_place() -> None:
    x = torch.tensor([[-torch.inf, -torch.inf, 1.0], [2.0, 2.0, -torch.inf]])
    for found, expected in zip(picks.cummax(x, 1), x.cummax(1), strict=True):
        assert torch.equal(found, expected)


class Extremes(nn.Module):
    """Scales answers by the largest and smallest of negative whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, low = self.body(x), torch.arange(5) * torch.tensor([1, -1, 1, -1, 1]) - 9
        rows = torch.tensor([0, 1, 1, 3, 0])
        placed = (low - 40).scatter_reduce(0, rows, low, "amax") + low.scatter_reduce(0, rows, low - 40, "amin")
        run = low.cummax(0).values * 10 + low.cummin(0).values + low.cummax(0).indices
        scaled: Tensor = h * (placed + run).float()
        return scaled


@pytest.mark.parametrize("engine", ["onnx", "litert"])
def test_a_runtime_compares_negative_whole_numbers(engine: str) -> None:
    compile_program(Extremes(), input=(6,), classes=5, batch=4, engines=(engine,))  # refuses what differs from torch


class Picking(nn.Linear):
    call: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.call(super().forward(x))


def trace(call: Callable[[Tensor], Tensor]) -> None:
    module = Picking(4, 3)
    module.call = call
    trace_function(ForwardPasses(make_source(module, input=(4,))), "step", batch=4, dynamic=True)


OTHERS = torch.tensor([0, 0, 2])


@pytest.mark.filterwarnings("ignore:index_reduce")  # in beta
@pytest.mark.parametrize(
    ("call", "instead", "hint"),
    [
        (
            lambda h: h.repeat_interleave(torch.tensor([1, 2, 1]), dim=1),
            lambda h: h[:, torch.tensor([0, 1, 1, 2])],
            r"h\[:, torch.tensor\(\[0, 1, 1, 2\]\)\]",
        ),
        (
            lambda h: h.index_reduce(1, OTHERS, h * 2, "amax"),
            lambda h: h.scatter_reduce(1, OTHERS.expand_as(h), h * 2, "amax"),
            r"h.scatter_reduce\(1, index.expand_as\(source\), source, 'amax'\)",
        ),
    ],
)
def test_what_is_refused_is_told_with_what_compiles_in_its_place(
    call: Callable[[Tensor], Tensor], instead: Callable[[Tensor], Tensor], hint: str
) -> None:
    h = torch.randn(5, 3)
    assert torch.equal(call(h), instead(h))
    with pytest.raises(ProgramRefused, match=hint):
        trace(call)
    trace(instead)
