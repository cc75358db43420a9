"""A convolution's gradients, written as convolutions and products, are autograd's."""

# ruff: noqa: FBT003 - these functions have torch's own signatures

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

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
from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import make_source
from export.compiler.tracing import trace_function

aten = torch.ops.aten
TOLERANCE = 1e-11  # float64; sums of fewer than a thousand products

small = st.integers(1, 3)
pair = st.tuples(small, small)
margins = st.tuples(st.integers(0, 3), st.integers(0, 3))
gaps = st.tuples(st.integers(1, 2), st.integers(1, 2))
Pair = tuple[int, int]


def fits(size: Pair, kernel: Pair, padding: Pair, dilation: Pair) -> bool:
    """Whether the kernel lies within the padded image."""
    return all(d * (k - 1) + 1 - 2 * p <= n for n, k, p, d in zip(size, kernel, padding, dilation, strict=True))


def noise(*shape: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)


def same(ours: Tensor | None, theirs: Tensor) -> bool:
    return ours is not None and torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@settings(max_examples=150)
@given(
    size=st.integers(4, 9),
    kernel=pair,
    stride=pair,
    padding=margins,
    dilation=gaps,
    groups=st.sampled_from([(1, 1, 3), (1, 2, 3), (2, 4, 2), (3, 3, 6)]),
)
def test_gradients_are_autograds_for_any_stride_padding_dilation_and_groups(
    size: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: tuple[int, int, int]
) -> None:
    count, ins, outs = groups
    x = noise(2, ins, size, size + 1, seed=0)
    weight = noise(outs, ins // count, *kernel, seed=1)
    bias = torch.zeros(outs, dtype=torch.float64, requires_grad=True)
    assume(fits((size, size + 1), kernel, padding, dilation))
    out = torch.nn.functional.conv2d(x, weight, bias, stride, padding, dilation, count)
    grad = noise(*out.shape, seed=2)
    expected = torch.autograd.grad(out, [x, weight, bias], grad)
    got = convolution_backward(
        grad, x.detach(), weight.detach(), [outs], stride, padding, dilation, False, [0, 0], count, [True] * 3
    )
    for ours, theirs in zip(got, expected, strict=True):
        assert same(ours, theirs)


@settings(max_examples=60)
@given(
    size=st.integers(4, 8),
    kernel=pair,
    padding=margins,
    dilation=gaps,
)
def test_every_way_to_the_inputs_gradient_agrees(size: int, kernel: Pair, padding: Pair, dilation: Pair) -> None:
    """Each of the three is the fastest for some shapes; a program uses one of them."""
    assume(fits((size, size), kernel, padding, dilation))
    x = noise(2, 3, size, size, seed=0)
    weight = noise(4, 3, *kernel, seed=1)
    out = torch.nn.functional.conv2d(x, weight, None, 1, padding, dilation)
    grad = noise(*out.shape, seed=2)
    (expected,) = torch.autograd.grad(out, x, grad)
    conv = ConvArgs(stride=(1, 1), padding=padding, dilation=dilation)
    for grad_input in (by_transposed, by_flipped_kernel, by_columns):
        assert same(grad_input(grad, x.detach(), weight, conv), expected)


@settings(max_examples=40)
@given(
    size=st.integers(4, 8),
    kernel=pair,
    stride=small,
    padding=margins,
    dilation=gaps,
)
def test_a_product_per_row_of_the_kernel_is_the_convolution(
    size: int, kernel: Pair, stride: int, padding: Pair, dilation: Pair
) -> None:
    assume(fits((size, size + 1), kernel, padding, dilation))
    x = noise(2, 3, size, size + 1, seed=0)
    weight = noise(4, 3, *kernel, seed=1)
    expected = torch.nn.functional.conv2d(x, weight, None, (1, stride), padding, dilation)
    got = by_rows(x, weight, ConvArgs(stride=(1, stride), padding=padding, dilation=dilation))
    assert same(got, expected)


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
        assert same(ours, theirs)


@pytest.mark.parametrize(("groups", "convolutions"), [(1, 1), (2, 2)])
def test_the_gradient_of_a_weight_of_one_dimension_is_a_product(groups: int, convolutions: int) -> None:
    """Of several groups it is a convolution, which runtimes have for it, if slowly."""
    module = nn.Sequential(nn.Conv1d(2, 4, 3, groups=groups), nn.Flatten(), nn.Linear(24, 3))
    traced = trace_function(ForwardPasses(make_source(module, input=(2, 8))), "step", batch=4, dynamic=True)
    assert [node.target for node in traced.graph.graph.nodes].count(aten.convolution.default) == convolutions


def test_a_list_of_one_number_is_for_every_axis() -> None:
    x, weight = noise(2, 3, 5, 6, seed=0), noise(4, 3, 3, 3, seed=1)
    out = torch.nn.functional.conv2d(x, weight, None, [2], [1], [2])
    grad = noise(*out.shape, seed=2)
    expected = torch.autograd.grad(out, [x, weight], grad)
    got = convolution_backward(
        grad, x.detach(), weight.detach(), None, [2], [1], [2], False, [0, 0], 1, [True, True, False]
    )
    for ours, theirs in zip(got, expected, strict=False):
        assert same(ours, theirs)


@settings(max_examples=60)
@given(
    size=st.integers(4, 8),
    kernel=pair,
    stride=pair,
    padding=margins,
    dilation=gaps,
    groups=st.sampled_from([(2, 4, 2), (2, 2, 4), (3, 3, 3)]),
)
def test_every_way_of_a_grouped_convolution_agrees(
    size: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: tuple[int, int, int]
) -> None:
    count, ins, outs = groups
    assume(fits((size, size + 1), kernel, padding, dilation))
    x = noise(2, ins, size, size + 1, seed=0)
    weight = noise(outs, ins // count, *kernel, seed=1)
    out = torch.nn.functional.conv2d(x, weight, None, stride, padding, dilation, count)
    grad = noise(*out.shape, seed=2)
    (expected,) = torch.autograd.grad(out, weight, grad)
    own = weight.detach()
    conv = ConvArgs(stride=stride, padding=padding, dilation=dilation, groups=count)
    for got in (depthwise.grad_weight(grad, x, own, conv), by_correlation(grad, x, own, conv)):
        assert same(got, expected)
    if count == ins == outs:
        assert same(depthwise.convolution(x, own, conv), out)
