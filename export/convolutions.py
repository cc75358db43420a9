"""The backward of a convolution, written as convolutions and matrix products. Layout NCHW, any number of sizes.

The batch may be symbolic; every other size is a plain number. LiteRT has no transposed convolution with padding, so
what fell on the padding is cut off afterwards.
"""

# ruff: noqa: PLR0913, PLR0917, FBT001 - the functions of a decomposition table have torch's own signatures

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from export.operators import Unsupported

aten = torch.ops.aten


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    _bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients for the input, the weight [out, in / groups, *kernel] and the bias, as far as they are asked."""
    if transposed:
        raise Unsupported("convolution_backward", "the gradient of a transposed convolution is not covered")
    conv = Convolution(tuple(stride), tuple(padding), tuple(dilation), groups)
    return (
        conv.grad_input(grad, x, weight) if output_mask[0] else None,
        conv.grad_weight(grad, x, weight) if output_mask[1] else None,
        grad.sum([0, *range(2, grad.dim())]) if output_mask[2] else None,
    )


class Convolution:
    """The numbers of one convolution, one per spatial dimension."""

    def __init__(
        self, stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int
    ) -> None:
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.zeros, self.ones = [0] * len(stride), [1] * len(stride)

    def grad_input(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Every output spreads its gradient over the window that it came from."""
        # A fixed batch means LiteRT, which turns a transposed convolution of unit stride into one with twice the
        # padding: 16.8 ms against 8.8 where ONNX Runtime takes 1.9 against 3.9.
        if set(self.stride) == {1} and (self.groups > 1 or isinstance(x.shape[0], int)):
            return self.by_turned_kernel(grad, x, weight)
        return self.by_transposed(grad, x, weight)

    def by_transposed(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """A transposed convolution, for any stride."""
        # Without padding, and cut to size afterwards: LiteRT has no other transposed convolution.
        whole = _convolution(grad, weight, self.stride, self.zeros, self.dilation, self.groups, transposed=True)
        return _cut(whole, self.padding, x)

    def by_turned_kernel(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """For unit stride: convolve with the kernel turned round, channels swapped within each group."""
        outs, ins, *kernel = weight.shape
        turned = weight
        for dim in range(2, turned.dim()):
            turned = turned.flip(dim)  # one axis at a time: tflite-runtime 2.14 reverses two axes wrongly, in silence
        if self.groups > 1:
            turned = turned.reshape([self.groups, outs // self.groups, ins, *kernel]).transpose(1, 2)
            turned = turned.reshape([self.groups * ins, outs // self.groups, *kernel])
        else:
            turned = turned.transpose(0, 1)
        margin = [d * (k - 1) - p for d, k, p in zip(self.dilation, kernel, self.padding, strict=True)]
        whole = _convolution(grad, turned, self.ones, [max(m, 0) for m in margin], self.dilation, self.groups)
        return _cut(whole, [max(-m, 0) for m in margin], x)

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Matrix products where they are faster; else correlate x with the gradient, group by group."""
        if self.groups == 1 and len(self.stride) == 2 and self.stride[0] == 1 and x.shape[1] > 1:  # noqa: PLR2004
            return self._row_by_row(grad, x, weight)
        if self.groups == 1:
            return self._one_group(grad, x, weight.shape[2:])
        outs, ins = grad.shape[1] // self.groups, x.shape[1] // self.groups
        return torch.cat(
            [
                self._one_group(grad.narrow(1, k * outs, outs), x.narrow(1, k * ins, ins), weight.shape[2:])
                for k in range(self.groups)
            ],
            0,
        )

    def _row_by_row(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Matrix products, one per row of the kernel; windows go down by single rows, so each row's x is one slice."""
        (outs, ins, high, wide), (dh, dw), (batch, _, oh, ow) = weight.shape, self.dilation, grad.shape
        rows, reach = oh + dh * (high - 1), self.stride[1] * (ow - 1) + 1
        padded = x.transpose(0, 1)
        if any(self.padding):
            padded = aten.constant_pad_nd.default(padded, [self.padding[1]] * 2 + [self.padding[0]] * 2)
        starts = range(0, dw * wide, dw)
        columns = torch.cat([padded[:, :, :rows, j : j + reach : self.stride[1]] for j in starts])
        columns = columns.reshape([wide * ins, batch, rows * ow])
        given = grad.permute([0, 2, 3, 1]).reshape([batch * oh * ow, outs])
        tops = range(0, dh * ow * high, dh * ow)
        seen = [columns.narrow(2, top, oh * ow).reshape([wide * ins, batch * oh * ow]) for top in tops]
        products = torch.cat([aten.mm.default(row, given) for row in seen])
        return products.reshape([high, wide, ins, outs]).permute([3, 2, 0, 1])

    def _one_group(self, grad: Tensor, x: Tensor, kernel: Sequence[int]) -> Tensor:
        """A convolution with batch and channel swapped, stride and dilation swapped, cut to the kernel's size."""
        swapped = x.transpose(0, 1), grad.transpose(0, 1)  # [in, batch, *size], [out, batch, *out_size]
        out = _convolution(*swapped, self.dilation, self.padding, self.stride, 1)  # [in, out, *kernel or more]
        for i, size in enumerate(kernel):
            if out.shape[2 + i] != size:
                out = out.narrow(2 + i, 0, size)
        return out.transpose(0, 1)


def _convolution(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    transposed: bool = False,
) -> Tensor:
    nothing = [0] * len(stride)  # output padding
    out = aten.convolution.default(x, weight, None, stride, padding, dilation, transposed, nothing, groups)
    return cast("Tensor", out)


def _cut(whole: Tensor, before: Sequence[int], like: Tensor) -> Tensor:
    """Drop `before` rows at the start of each spatial dimension; at the end, drop rows or add zeros until it fits."""
    for dim, start in enumerate(before, start=2):
        after = whole.shape[dim] - start - like.shape[dim]
        if after < 0:  # rows that no window reached
            padding = [0, 0] * (whole.dim() - 1 - dim) + [0, -after]
            whole = cast("Tensor", aten.constant_pad_nd.default(whole, padding))
        if start or after > 0:
            whole = whole.narrow(dim, start, like.shape[dim])
    return whole
