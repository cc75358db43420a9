"""Pooling and its gradients, written without scatter, are torch's; ties go to the first maximum."""

# ruff: noqa: FBT001 - hypothesis draws booleans too

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's custom

from export.compiler.decompositions import pools
from export.compiler.decompositions.supported_ops import UnsupportedOperator

TOLERANCE = 1e-12  # float64; sums of fewer than a hundred values


@dataclass(frozen=True, kw_only=True)
class Pool:
    """What one pooling layer is asked to do, per axis."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil_mode: bool

    @property
    def layout(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int], bool]:
        """In the order of torch's arguments."""
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode


def both(values: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(values, values)


@st.composite
def drawn(draw: st.DrawFn, *, largest_dilation: int = 1) -> Pool:
    """Windows that touch, overlap or leave gaps, in an image that holds at least one."""
    kernel = draw(both(st.integers(1, 4)))
    pool = Pool(
        size=draw(both(st.integers(1, 9))),
        kernel=kernel,
        stride=draw(both(st.integers(1, 4))),
        padding=(draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2))),
        dilation=draw(both(st.integers(1, largest_dilation))),
        ceil_mode=draw(st.booleans()),
    )
    reach = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(pool.dilation, pool.kernel, pool.padding, strict=True)]
    assume(all(r <= s for r, s in zip(reach, pool.size, strict=True)))
    assume(all(every_window_sees_a_value(pool, axis) for axis in (0, 1)))
    return pool


def every_window_sees_a_value(pool: Pool, axis: int) -> bool:
    """Torch writes out of bounds where a dilated window sees padding only."""
    count = F.max_pool2d(torch.empty(1, *pool.size, device="meta"), *pool.layout).shape[1 + axis]
    firsts = [window * pool.stride[axis] - pool.padding[axis] for window in range(count)]
    places = range(0, pool.dilation[axis] * pool.kernel[axis], pool.dilation[axis])
    return all(any(0 <= first + place < pool.size[axis] for place in places) for first in firsts)


def noise(shape: Any, seed: int = 0) -> Tensor:  # noqa: ANN401 - a size
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=150)
@given(pool=drawn(largest_dilation=2), values=st.integers(1, 4))
def test_max_pooling_gives_the_gradient_to_the_first_of_equal_values(pool: Pool, values: int) -> None:
    x = torch.randint(values, (2, 3, *pool.size), generator=torch.Generator().manual_seed(values))
    x = x.double().requires_grad_()  # few values: ties everywhere; one value: a flat image
    out, indices = F.max_pool2d(x, *pool.layout, return_indices=True)
    grad = noise(out.shape)
    (expected,) = torch.autograd.grad(out, x, grad)
    got = pools.max_pool2d_backward(grad, x.detach(), *pool.layout, indices)
    assert torch.allclose(got, expected, rtol=0, atol=TOLERANCE)


@settings(max_examples=60)
@given(pool=drawn(largest_dilation=2))
def test_a_pool_that_rounds_its_size_up_is_one_of_a_larger_image(pool: Pool) -> None:
    x = noise((2, 3, *pool.size))
    assume(pool.ceil_mode)
    out, indices = pools.max_pool2d(x, *pool.layout)
    expected, where = F.max_pool2d(x, *pool.layout, return_indices=True)
    assert torch.equal(out, expected)
    assert torch.equal(indices, where)


@settings(max_examples=150)
@given(pool=drawn(), count_padding=st.booleans(), divisor=st.sampled_from([None, 3]))
def test_average_pooling_and_its_gradient_are_torchs(pool: Pool, count_padding: bool, divisor: int | None) -> None:
    x = noise((2, 3, *pool.size)).requires_grad_()
    how = (pool.kernel, pool.stride, pool.padding, pool.ceil_mode, count_padding, divisor)
    expected = F.avg_pool2d(x, *how)
    out = pools.avg_pool2d(x.detach(), *how)
    if pool.ceil_mode or any(pool.padding) or divisor is not None:
        assert torch.allclose(out, expected, rtol=0, atol=TOLERANCE)
    else:
        assert out is NotImplemented  # every runtime has it
    grad = noise(expected.shape)
    (back,) = torch.autograd.grad(expected, x, grad)
    assert torch.allclose(pools.avg_pool2d_backward(grad, x.detach(), *how), back, rtol=0, atol=TOLERANCE)


@settings(max_examples=60)
@given(count=both(st.integers(1, 4)), times=both(st.integers(1, 3)), values=st.integers(1, 4))
def test_adaptive_max_pooling_into_equal_windows_is_torchs(
    count: tuple[int, int], times: tuple[int, int], values: int
) -> None:
    size = [c * t for c, t in zip(count, times, strict=True)]
    x = torch.randint(values, (2, 3, *size), generator=torch.Generator().manual_seed(values)).double().requires_grad_()
    expected, where = F.adaptive_max_pool2d(x, count, return_indices=True)
    out, indices = pools.adaptive_max_pool2d(x.detach(), count)
    assert torch.equal(out, expected)
    assert torch.equal(indices, where)
    grad = noise(out.shape)
    (back,) = torch.autograd.grad(expected, x, grad)
    got = pools.adaptive_max_pool2d_backward(grad, x.detach(), indices)
    assert torch.allclose(got, back, rtol=0, atol=TOLERANCE)


def test_adaptive_max_pooling_into_unequal_windows_is_refused_with_the_sizes() -> None:
    with pytest.raises(UnsupportedOperator, match=r"\[9, 9\] does not divide into \[4, 3\] equal windows"):
        pools.adaptive_max_pool2d(torch.zeros(1, 1, 9, 9), [4, 3])
