"""Pooling's gradients, written without scatter, are autograd's; ties go to the first maximum."""

# ruff: noqa: FBT001, FBT003 - these functions have torch's own signatures

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812 - torch's custom

from export.operators import Unsupported
from export.pools import avg_pool2d_backward, max_pool2d_backward


@settings(max_examples=60)
@given(
    size=st.tuples(st.integers(3, 8), st.integers(3, 8)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    values=st.integers(1, 4),
)
def test_max_pooling_gives_the_gradient_to_the_first_of_equal_values(
    size: tuple[int, int], kernel: tuple[int, int], values: int
) -> None:
    draw = torch.Generator().manual_seed(values)
    x = torch.randint(0, values, (2, 3, *size), generator=draw).double().requires_grad_()  # few values: ties everywhere
    out, indices = F.max_pool2d(x, kernel, return_indices=True)
    grad = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    (expected,) = torch.autograd.grad(out, x, grad)
    got = max_pool2d_backward(grad, x.detach(), kernel, kernel, [0, 0], [1, 1], False, indices)
    assert torch.equal(got, expected)


@settings(max_examples=60)
@given(
    size=st.integers(4, 8),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
)
def test_average_pooling_shares_the_gradient_like_torch(size: int, kernel: int, stride: int, padding: int) -> None:
    padding = min(padding, kernel // 2)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, size, size, generator=draw, dtype=torch.float64, requires_grad=True)
    out = F.avg_pool2d(x, kernel, stride, padding)
    grad = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    (expected,) = torch.autograd.grad(out, x, grad)
    got = avg_pool2d_backward(grad, x.detach(), [kernel], [stride], [padding], False, True, None)
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "ceil"),
    [([1, 1], [0, 0], [1, 1], False), ([2, 2], [1, 1], [1, 1], False), ([2, 2], [0, 0], [2, 2], False)],
)
def test_overlapping_padded_or_dilated_max_pooling_is_refused(
    stride: list[int], padding: list[int], dilation: list[int], ceil: bool
) -> None:
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(Unsupported, match="overlapping, padded or dilated"):
        max_pool2d_backward(x, x, [2, 2], stride, padding, dilation, ceil, x)


def test_average_pooling_that_does_not_count_its_padding_is_refused() -> None:
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(Unsupported, match="padding that does not count"):
        avg_pool2d_backward(x, x, [2, 2], [2, 2], [1, 1], False, False, None)
