"""A convolution and its gradients, written as matrix products where they are faster. Layout NCHW, any number of sizes.

No runtime has fast convolutions for weights that are inputs, as they are in training; all have fast products. The batch
may be symbolic; every other size is a plain number. LiteRT has no transposed convolution with padding, so what fell on
the padding is cut off afterwards.
"""

# ruff: noqa: PLR0913, PLR0917, FBT001 - the functions of a decomposition table have torch's own signatures

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from export.compiler.decompositions import depthwise
from export.compiler.decompositions import transposed as transposing

aten = torch.ops.aten
MIN_PRODUCT_SIZE = 16  # channels, and values that a row of the kernel sees; below, a product has too little to do
MAX_KERNEL_ROWS = 11  # of a kernel; those of a weight gradient's convolution can be as high as the image


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Input [batch, in, *size], weight [out, in / groups, *kernel] -> [batch, out, *size]; others stay as they are."""
    if transposed and (_fixed(x, weight) or min(max(stride), max(dilation)) > 1):
        return transposing.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    conv = ConvolutionSpec(tuple(stride), tuple(padding), tuple(dilation), groups)
    if transposed or not (_fixed(x, weight) and conv.has_row_slices and _prefers_products(weight)):
        return NotImplemented  # type: ignore[no-any-return]  # how a decomposition declines
    out = conv.by_rows(x, weight)
    return out if bias is None else out + bias.reshape([-1, 1, 1])


def convolution_in_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """As `convolution`, for a step. Where weights may become constants a runtime has faster convolutions of its own."""
    if transposed or _fixed(x, weight) or not depthwise.suits_bands(x, weight, groups):
        return convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    out = depthwise.convolution(x, weight, stride, padding, dilation)
    return out if bias is None else out + bias.reshape([-1, 1, 1])


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
    conv = ConvolutionSpec(tuple(stride), tuple(padding), tuple(dilation), groups)
    given, seen = (x, grad) if transposed else (grad, x)  # a transposed convolution takes what the other one gives
    to_input = conv.forward if transposed else conv.grad_input
    return (
        to_input(grad, x, weight) if output_mask[0] else None,
        conv.grad_weight(given, seen, weight) if output_mask[1] else None,
        grad.sum([0, *range(2, grad.dim())]) if output_mask[2] else None,
    )


class ConvolutionSpec:
    """The numbers of one convolution, one per spatial dimension."""

    def __init__(
        self, stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int
    ) -> None:
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.zeros, self.ones = [0] * len(stride), [1] * len(stride)

    @property
    def has_row_slices(self) -> bool:
        """Two dimensions, one group, and windows that go down by single rows: `rows` are then plain slices."""
        return self.groups == 1 and len(self.stride) == 2 and self.stride[0] == 1  # noqa: PLR2004

    def rows(self, x: Tensor, kernel: Sequence[int]) -> list[Tensor]:
        """What each row of the kernel sees: [wide * in, batch * out_height * out_width], one per row."""
        (ph, pw), (dh, dw), (high, wide), (batch, ins, height, width) = self.padding, self.dilation, kernel, x.shape
        oh, ow = height + 2 * ph - dh * (high - 1), (width + 2 * pw - dw * (wide - 1) - 1) // self.stride[1] + 1
        padded = x.transpose(0, 1)
        if ph or pw:
            padded = aten.constant_pad_nd.default(padded, [pw, pw, ph, ph])
        reach = self.stride[1] * (ow - 1) + 1
        columns = torch.cat([padded[..., j : j + reach : self.stride[1]] for j in range(0, dw * wide, dw)])
        columns = columns.reshape([wide * ins, batch, (height + 2 * ph) * ow])
        tops = range(0, dh * ow * high, dh * ow)
        return [columns.narrow(2, top, oh * ow).reshape([wide * ins, batch * oh * ow]) for top in tops]

    def by_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution as one product per row of the kernel."""
        outs, ins, high, wide = weight.shape
        seen = self.rows(x, (high, wide))
        own = weight.permute([2, 0, 3, 1]).reshape([high, outs, wide * ins])
        out = _sum([own.select(0, i) @ row for i, row in enumerate(seen)])
        oh = x.shape[2] + 2 * self.padding[0] - self.dilation[0] * (high - 1)
        return out.reshape([outs, x.shape[0], oh, -1]).transpose(0, 1)

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution itself: the gradient for the input of the transposed one."""
        whole = _convolution(grad, weight, self.stride, self.padding, self.dilation, self.groups)
        return _cut(whole, self.zeros, x)

    def grad_input(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Every output spreads its gradient over the window that it came from."""
        # LiteRT turns a transposed convolution of unit stride into one with twice the padding: for the WeCFL CNN
        # 8.6 ms, as products 3.3; ONNX Runtime takes 2.4 against 3.6.
        if set(self.stride) == {1} and (self.groups > 1 or _fixed(x)):
            return (self.by_columns if self.has_row_slices else self.by_turned_kernel)(grad, x, weight)
        return self.by_transposed(grad, x, weight)

    def by_transposed(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """A transposed convolution, for any stride; what no window reached is its output padding."""
        sizes = zip(x.shape[2:], self.padding, self.dilation, weight.shape[2:], self.stride, strict=True)
        unreached = [(size + 2 * p - d * (k - 1) - 1) % s for size, p, d, k, s in sizes]
        numbers = self.stride, self.padding, self.dilation
        out = aten.convolution.default(grad, weight, None, *numbers, True, unreached, self.groups)  # noqa: FBT003
        return cast("Tensor", out)

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

    def by_columns(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """For unit stride where rows are slices: one product sums over the kernel's rows, its columns are added."""
        (outs, ins, high, wide), (batch, _, height, width) = weight.shape, x.shape
        (dh, dw), (ph, pw), ow = self.dilation, self.padding, grad.shape[3]
        margin = max(dh * (high - 1) - ph, 0)
        given = grad.transpose(0, 1).reshape([outs, batch, -1])
        if margin:
            given = aten.constant_pad_nd.default(given, [margin * ow, margin * ow])
        tops = [(ph + margin - i * dh) * ow for i in range(high)]
        given = torch.cat([given.narrow(2, top, height * ow) for top in tops]).reshape([high * outs, -1])
        own = weight.permute([3, 1, 2, 0]).reshape([wide * ins, high * outs])
        spread = aten.mm.default(own, given).reshape([wide, ins, batch, height, ow])
        parts = [aten.constant_pad_nd.default(spread.select(0, j), [j * dw, (wide - 1 - j) * dw]) for j in range(wide)]
        return _sum(parts).narrow(3, pw, width).transpose(0, 1)

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Matrix products where they are faster, else a convolution of x with the gradient."""
        if self.has_row_slices and (_prefers_products(weight) or not _fixed(x)):
            outs, ins, high, wide = weight.shape
            given = grad.permute([0, 2, 3, 1]).reshape([-1, outs])
            products = torch.cat([aten.mm.default(row, given) for row in self.rows(x, (high, wide))])
            return products.reshape([high, wide, ins, outs]).permute([3, 2, 0, 1])
        if depthwise.suits_pairs(x, weight, self.groups):
            return depthwise.grad_weight(grad, x, weight, self.stride, self.padding, self.dilation, self.groups)
        return self.by_correlation(grad, x, weight)

    def by_correlation(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """One convolution with batch and channel swapped, stride and dilation swapped, cut to the kernel's size.

        Samples are its channels; those of another group are other channels.
        """
        ins = weight.shape[1]
        seen = x.transpose(0, 1)  # [in, batch, *size]
        if self.groups > 1:
            seen = seen.reshape([self.groups, ins, -1, *x.shape[2:]]).transpose(0, 1).reshape([ins, -1, *x.shape[2:]])
        swapped = seen, grad.transpose(0, 1)  # [in / groups, groups * batch, *size], [out, batch, *out_size]
        out = _convolution(*swapped, self.dilation, self.padding, self.stride, self.groups)
        for i, size in enumerate(weight.shape[2:]):  # out: [in / groups, out, *kernel or more]
            if out.shape[2 + i] != size:
                out = out.narrow(2 + i, 0, size)
        return out.transpose(0, 1)


def _fixed(*tensors: Tensor) -> bool:
    """A fixed batch means LiteRT."""
    return all(isinstance(size, int) for tensor in tensors for size in tensor.shape)


def _prefers_products(weight: Tensor) -> bool:
    """Whether LiteRT is faster with products: enough to do in each of them, and few of them."""
    outs, ins, high, wide = weight.shape
    return min(outs, ins * wide) >= MIN_PRODUCT_SIZE and high <= MAX_KERNEL_ROWS


def _convolution(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    nothing = [0] * len(stride)  # output padding
    out = aten.convolution.default(x, weight, None, stride, padding, dilation, False, nothing, groups)  # noqa: FBT003
    return cast("Tensor", out)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


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
