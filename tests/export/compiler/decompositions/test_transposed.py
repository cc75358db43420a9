"""Transposed convolutions written without padding, and their gradients, are torch's."""

# ruff: noqa: FBT003 - these functions have torch's own signatures

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812 - torch's custom

from export.compiler.decompositions.convolutions import convolution_backward
from export.compiler.decompositions.transposed import convolution

TOLERANCE = 1e-11  # float64; sums of fewer than a thousand products


@settings(max_examples=150)
@given(data=st.data(), dims=st.integers(1, 2), groups=st.sampled_from([(1, 1, 3), (1, 2, 3), (2, 4, 2), (3, 3, 6)]))
def test_a_transposed_convolution_and_its_gradients_are_torchs(
    data: st.DataObject, dims: int, groups: tuple[int, int, int]
) -> None:
    def each(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=dims, max_size=dims))

    count, ins, outs = groups
    size, kernel, stride, padding, dilation = each(2, 5), each(1, 3), each(1, 3), each(0, 2), each(1, 3)
    more = [min(m, max(s, d) - 1) for m, s, d in zip(each(0, 2), stride, dilation, strict=True)]
    facts = zip(size, kernel, stride, padding, dilation, more, strict=True)
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + m >= 0 for n, k, s, p, d, m in facts))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, ins, *size, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(ins, outs // count, *kernel, generator=draw, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(outs, generator=draw, dtype=torch.float64, requires_grad=True)
    forward = (F.conv_transpose1d, F.conv_transpose2d)[dims - 1]
    expected = forward(x, weight, bias, stride, padding, more, count, dilation)
    out = convolution(x, weight, bias, stride, padding, dilation, True, more, count)
    if any(padding) or any(more) or (max(stride) > 1 and max(dilation) > 1):
        assert torch.allclose(out, expected, rtol=0, atol=TOLERANCE)
    else:
        assert out is NotImplemented  # every runtime has it
    grad = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    back = torch.autograd.grad(expected, [x, weight, bias], grad)
    got = convolution_backward(
        grad, x.detach(), weight.detach(), [outs], stride, padding, dilation, True, more, count, [True] * 3
    )
    for ours, theirs in zip(got, back, strict=True):
        assert ours is not None
        assert torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def test_a_plain_convolution_stays_as_it_is() -> None:
    x = torch.zeros(1, 1, 3)
    assert convolution(x, x, None, [1], [1], [1], False, [0], 1) is NotImplemented
