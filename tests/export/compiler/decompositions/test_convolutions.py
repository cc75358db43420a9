"""A convolution's gradients, written as convolutions and products, are autograd's."""

# ruff: noqa: FBT003 - these functions have torch's own signatures

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from export.compiler.decompositions import depthwise
from export.compiler.decompositions.conv_args import ConvArgs
from export.compiler.decompositions.convolutions import (
    by_columns,
    by_correlation,
    by_flipped_kernel,
    by_rows,
    by_transposed,
    convolution_backward,
)

TOLERANCE = 1e-11  # float64; sums of fewer than a thousand products

small = st.integers(1, 3)


@settings(max_examples=150)
@given(
    size=st.integers(4, 9),
    kernel=st.tuples(small, small),
    stride=st.tuples(small, small),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.sampled_from([(1, 1, 3), (1, 2, 3), (2, 4, 2), (3, 3, 6)]),
)
def test_gradients_are_autograds_for_any_stride_padding_dilation_and_groups(
    size: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: tuple[int, int, int],
) -> None:
    count, ins, outs = groups
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, ins, size, size + 1, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(outs, ins // count, *kernel, generator=draw, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(outs, dtype=torch.float64, requires_grad=True)
    reach = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    assume(reach[0] <= size and reach[1] <= size + 1)
    out = torch.nn.functional.conv2d(x, weight, bias, stride, padding, dilation, count)
    grad = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    expected = torch.autograd.grad(out, [x, weight, bias], grad)
    got = convolution_backward(
        grad, x.detach(), weight.detach(), [outs], stride, padding, dilation, False, [0, 0], count, [True] * 3
    )
    for ours, theirs in zip(got, expected, strict=True):
        assert ours is not None
        assert torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@settings(max_examples=60)
@given(
    size=st.integers(4, 8),
    kernel=st.tuples(small, small),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_every_way_to_the_inputs_gradient_agrees(
    size: int, kernel: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> None:
    """Each of the three is the fastest for some shapes; a program uses one of them."""
    draw = torch.Generator().manual_seed(0)
    reach = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    assume(max(reach) <= size)
    x = torch.randn(2, 3, size, size, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, *kernel, generator=draw, dtype=torch.float64)
    out = torch.nn.functional.conv2d(x, weight, None, 1, padding, dilation)
    grad = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    (expected,) = torch.autograd.grad(out, x, grad)
    conv = ConvArgs(stride=(1, 1), padding=padding, dilation=dilation)
    for grad_input in (by_transposed, by_flipped_kernel, by_columns):
        assert torch.allclose(grad_input(grad, x.detach(), weight, conv), expected, rtol=0, atol=TOLERANCE)


@settings(max_examples=40)
@given(
    size=st.integers(4, 8),
    kernel=st.tuples(small, small),
    stride=small,
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_a_product_per_row_of_the_kernel_is_the_convolution(
    size: int, kernel: tuple[int, int], stride: int, padding: tuple[int, int], dilation: tuple[int, int]
) -> None:
    draw = torch.Generator().manual_seed(0)
    reach = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    assume(reach[0] <= size and reach[1] <= size + 1)
    x = torch.randn(2, 3, size, size + 1, generator=draw, dtype=torch.float64)
    weight = torch.randn(4, 3, *kernel, generator=draw, dtype=torch.float64)
    expected = torch.nn.functional.conv2d(x, weight, None, (1, stride), padding, dilation)
    got = by_rows(x, weight, ConvArgs(stride=(1, stride), padding=padding, dilation=dilation))
    assert torch.allclose(got, expected, rtol=0, atol=TOLERANCE)


def test_one_dimension_works_as_two_do() -> None:
    x = torch.arange(12, dtype=torch.float64).reshape(2, 1, 6).requires_grad_()
    weight = torch.tensor([[[1.0, -2.0, 0.5]]], dtype=torch.float64, requires_grad=True)
    out = torch.nn.functional.conv1d(x, weight, stride=2, padding=1)
    expected = torch.autograd.grad(out.sum(), [x, weight])
    ones = torch.ones_like(out)
    got = convolution_backward(
        ones, x.detach(), weight.detach(), None, [2], [1], [1], False, [0], 1, [True, True, False]
    )
    assert got[2] is None
    for ours, theirs in zip(got, expected, strict=False):
        assert ours is not None
        assert torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@settings(max_examples=60)
@given(
    size=st.integers(4, 8),
    kernel=st.tuples(small, small),
    stride=st.tuples(small, small),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.sampled_from([(2, 4, 2), (2, 2, 4), (3, 3, 3)]),
)
def test_every_way_of_a_grouped_convolution_agrees(
    size: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: tuple[int, int, int],
) -> None:
    count, ins, outs = groups
    draw = torch.Generator().manual_seed(0)
    reach = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    assume(reach[0] <= size and reach[1] <= size + 1)
    x = torch.randn(2, ins, size, size + 1, generator=draw, dtype=torch.float64)
    weight = torch.randn(outs, ins // count, *kernel, generator=draw, dtype=torch.float64, requires_grad=True)
    out = torch.nn.functional.conv2d(x, weight, None, stride, padding, dilation, count)
    grad = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    (expected,) = torch.autograd.grad(out, weight, grad)
    own = weight.detach()
    conv = ConvArgs(stride=stride, padding=padding, dilation=dilation, groups=count)
    for got in (depthwise.grad_weight(grad, x, own, conv), by_correlation(grad, x, own, conv)):
        assert torch.allclose(got, expected, rtol=0, atol=TOLERANCE)
    if count == ins == outs:
        assert torch.allclose(depthwise.convolution(x, own, conv), out, rtol=0, atol=TOLERANCE)
