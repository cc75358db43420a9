"""A convolution and its gradients as matrix products, where those are faster. Layout NCHW, any number of dimensions.

During training the weights are inputs of the graph. For such weights every runtime has fast matrix products and slow
convolutions. The batch may be symbolic; every other size is a plain number. LiteRT has no transposed convolution with
padding, so the graph computes the unpadded one and cuts the margin off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor

from export.compiler.decompositions import depthwise, transposed
from export.compiler.decompositions.conv_args import ConvArgs, add_bias

aten = torch.ops.aten
MIN_PRODUCT_SIZE = 16  # channels, and values that one kernel row covers; a smaller product is slower than a convolution
MAX_LINE_KERNEL = 11  # of one dimension: each value is a slice, so many copies of the input take memory in a step
MAX_KERNEL_ROWS = 11  # of a kernel; in a weight gradient's convolution the kernel can be as high as the image


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:  # noqa: ANN401 - torch's own
    """Replace `aten.convolution`: x [batch, in, *size], weight [out, in / groups, *kernel] -> [batch, out, *out_size].

    The weight of a transposed convolution is [in, out / groups, *kernel], the bias [out]; `args` are those of
    `ConvArgs.from_aten`. Returns NotImplemented where the runtime's own convolution is better.
    """
    conv = ConvArgs.from_aten(*args)
    if conv.transposed and (_fixed(x, weight) or min(max(conv.stride), max(conv.dilation)) > 1):
        return transposed.convolution(x, weight, bias, *args)
    if conv.has_one_line and weight.shape[2] <= MAX_LINE_KERNEL:
        out = convolution(x.unsqueeze(2), weight.unsqueeze(2), bias, *conv.as_image.to_aten())
        return out if out is NotImplemented else out.squeeze(2)
    if conv.transposed or not (_fixed(x, weight) and has_row_slices(conv) and _prefers_products(weight)):
        return NotImplemented  # type: ignore[no-any-return]  # how a decomposition declines
    return add_bias(by_rows(x, weight, conv), bias)


def convolution_in_step(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:  # noqa: ANN401
    """As `convolution`, for the training step: narrow depthwise convolutions become products too.

    In the other functions the weights may become constants, for which a runtime has faster convolutions of its own.
    """
    conv = ConvArgs.from_aten(*args)
    if conv.transposed or _fixed(x, weight) or not depthwise.suits_bands(x, weight, conv.groups):
        return convolution(x, weight, bias, *args)
    return add_bias(depthwise.convolution(x, weight, conv), bias)


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    _bias_sizes: Sequence[int] | None,
    *args: Any,  # noqa: ANN401
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Replace `aten.convolution_backward`; `args` are those of `ConvArgs.from_aten`, then the output mask.

    Returns:
        The gradients of the input, the weight and the bias; None for each that the mask leaves out.
    """
    *numbers, output_mask = args
    conv = ConvArgs.from_aten(*numbers)
    if conv.has_one_line and weight.shape[2] <= MAX_LINE_KERNEL:
        lines = grad.unsqueeze(2), x.unsqueeze(2), weight.unsqueeze(2)
        to_x, to_weight, to_bias = convolution_backward(*lines, None, *conv.as_image.to_aten(), output_mask)
        return (
            to_x if to_x is None else to_x.squeeze(2),
            to_weight if to_weight is None else to_weight.squeeze(2),
            to_bias,
        )
    wants_input, wants_weight, wants_bias = output_mask
    # A transposed convolution's input and output are the output and the input of the plain one.
    plain = replace(conv, transposed=False, output_padding=())
    given, seen = (x, grad) if conv.transposed else (grad, x)
    to_input = forward if conv.transposed else grad_input
    return (
        to_input(grad, x, weight, plain) if wants_input else None,
        grad_weight(given, seen, weight, plain) if wants_weight else None,
        grad.sum([0, *range(2, grad.dim())]) if wants_bias else None,
    )


def convolution_backward_for_torch(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    *args: Any,  # noqa: ANN401
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Torch's own, with the bias summed apart: in torch's float32 one before a batch norm is 7e-5 off."""
    *numbers, (wants_input, wants_weight, wants_bias) = args
    if not wants_bias:
        return NotImplemented  # type: ignore[no-any-return]  # how a decomposition declines
    others = [wants_input, wants_weight, False]
    to_input, to_weight, _ = aten.convolution_backward.default(grad, x, weight, bias_sizes, *numbers, others)
    return to_input, to_weight, grad.sum([0, *range(2, grad.dim())])


def has_row_slices(conv: ConvArgs) -> bool:
    """Two dimensions, one group, and windows that go down by single rows: `rows` are then plain slices."""
    return conv.groups == 1 and len(conv.stride) == 2 and conv.stride[0] == 1  # noqa: PLR2004


def kernel_row_inputs(x: Tensor, weight: Tensor, conv: ConvArgs, *, again: bool = False) -> Iterator[Tensor]:
    """For each row of the kernel, the values of x that it multiplies: [wide * in, batch * out_height * out_width].

    Each is traced when it is asked for, just before its product, and LiteRT computes in the order of the trace: all of
    them together take `high` times as much. `again` cuts the same values by another slice, for a gradient: LiteRT's
    converter finds equal operators, and would keep the rows of the forward pass until the backward pass.
    """
    (ph, pw), (dh, dw), (high, wide) = conv.padding, conv.dilation, weight.shape[2:]
    batch, ins, height, width = x.shape
    oh, ow = height + 2 * ph - dh * (high - 1), (width + 2 * pw - dw * (wide - 1) - 1) // conv.stride[1] + 1
    padded = x.transpose(0, 1)
    if ph or pw:
        padded = aten.constant_pad_nd.default(padded, [pw, pw, ph, ph])
    reach = conv.stride[1] * (ow - 1) + 1
    columns = torch.cat([padded[..., j : j + reach : conv.stride[1]] for j in range(0, dw * wide, dw)])
    lines, across = ([height + 2 * ph, ow], 1) if again else ([(height + 2 * ph) * ow], ow)
    columns = columns.reshape([wide * ins, batch, *lines])
    for top in range(0, dh * across * high, dh * across):
        yield columns.narrow(2, top, oh * across).reshape([wide * ins, batch * oh * ow])


def by_rows(x: Tensor, weight: Tensor, conv: ConvArgs) -> Tensor:
    """The convolution as one product per row of the kernel, where `has_row_slices`."""
    outs, ins, high, wide = weight.shape
    own = weight.permute([2, 0, 3, 1]).reshape([high, outs, wide * ins])
    out = reduce(torch.add, (own.select(0, i) @ row for i, row in enumerate(kernel_row_inputs(x, weight, conv))))
    oh = x.shape[2] + 2 * conv.padding[0] - conv.dilation[0] * (high - 1)
    return out.reshape([outs, x.shape[0], oh, -1]).transpose(0, 1)


def forward(grad: Tensor, x: Tensor, weight: Tensor, conv: ConvArgs) -> Tensor:
    """The gradient of a transposed convolution's input: the plain convolution of its output's gradient."""
    return _cut(conv.apply(grad, weight), conv.zeros, x)


def grad_input(grad: Tensor, x: Tensor, weight: Tensor, conv: ConvArgs) -> Tensor:
    """The gradient of the input [batch, in, *size], by the fastest of the three functions below."""
    # LiteRT computes a transposed convolution of unit stride as a convolution with twice the padding. The WeCFL CNN
    # takes 8.6 ms with it and 3.3 ms with products; ONNX Runtime takes 2.4 ms and 3.6 ms.
    if set(conv.stride) == {1} and (conv.groups > 1 or _fixed(x)):
        return (by_columns if has_row_slices(conv) else by_flipped_kernel)(grad, x, weight, conv)
    return by_transposed(grad, x, weight, conv)


def by_transposed(grad: Tensor, x: Tensor, weight: Tensor, conv: ConvArgs) -> Tensor:
    """For any stride: a transposed convolution; input rows that no window reached become its output padding."""
    sizes = zip(x.shape[2:], conv.padding, conv.dilation, weight.shape[2:], conv.stride, strict=True)
    unreached = tuple((size + 2 * p - d * (k - 1) - 1) % s for size, p, d, k, s in sizes)
    return replace(conv, transposed=True, output_padding=unreached).apply(grad, weight)


def by_flipped_kernel(grad: Tensor, x: Tensor, weight: Tensor, conv: ConvArgs) -> Tensor:
    """For unit stride: convolve with the flipped kernel, its channels swapped within each group."""
    outs, ins, *kernel = weight.shape
    flipped = weight
    for dim in range(2, flipped.dim()):
        flipped = flipped.flip(
            dim
        )  # one axis at a time: tflite-runtime 2.14 reverses two axes wrongly and raises nothing
    if conv.groups > 1:
        flipped = flipped.reshape([conv.groups, outs // conv.groups, ins, *kernel]).transpose(1, 2)
        flipped = flipped.reshape([conv.groups * ins, outs // conv.groups, *kernel])
    else:
        flipped = flipped.transpose(0, 1)
    margin = [d * (k - 1) - p for d, k, p in zip(conv.dilation, kernel, conv.padding, strict=True)]
    unit = replace(conv, stride=conv.ones, padding=tuple(max(m, 0) for m in margin))
    return _cut(unit.apply(grad, flipped), [max(-m, 0) for m in margin], x)


def by_columns(grad: Tensor, x: Tensor, weight: Tensor, conv: ConvArgs) -> Tensor:
    """For unit stride, where `has_row_slices`: one product sums over the kernel's rows; its columns are added."""
    (outs, ins, high, wide), (batch, _, height, width) = weight.shape, x.shape
    (dh, dw), (ph, pw), ow = conv.dilation, conv.padding, grad.shape[3]
    margin = max(dh * (high - 1) - ph, 0)
    given = grad.transpose(0, 1).reshape([outs, batch, -1])
    if margin:
        given = aten.constant_pad_nd.default(given, [margin * ow, margin * ow])
    tops = [(ph + margin - i * dh) * ow for i in range(high)]
    given = torch.cat([given.narrow(2, top, height * ow) for top in tops]).reshape([high * outs, -1])
    own = weight.permute([3, 1, 2, 0]).reshape([wide * ins, high * outs])
    spread = aten.mm.default(own, given).reshape([wide, ins, batch, height, ow])
    parts = [aten.constant_pad_nd.default(spread.select(0, j), [j * dw, (wide - 1 - j) * dw]) for j in range(wide)]
    total: Tensor = reduce(torch.add, parts)
    return total.narrow(3, pw, width).transpose(0, 1)


def grad_weight(grad: Tensor, x: Tensor, weight: Tensor, conv: ConvArgs) -> Tensor:
    """The gradient of the weight: matrix products where they are faster, else a convolution of x with `grad`."""
    if has_row_slices(conv) and (_prefers_products(weight) or not _fixed(x)):
        outs, ins, high, wide = weight.shape
        if _fixed(grad):
            given = grad.permute([0, 2, 3, 1]).reshape([1, -1, outs])
            rows = kernel_row_inputs(x, weight, conv, again=True)
            # Of plain products with one factor the converter makes a single one, over a copy of all rows.
            products = torch.cat([aten.bmm.default(row.unsqueeze(0), given) for row in rows])
        else:  # ONNX Runtime turns it within the product, LiteRT does not
            # It would join a transpose of four axes with a pool's, to one that takes ten times as long.
            given = grad.flatten(2).transpose(0, 1).reshape([outs, -1]).t()
            products = torch.cat([aten.mm.default(row, given) for row in kernel_row_inputs(x, weight, conv)])
        return products.reshape([high, wide, ins, outs]).permute([3, 2, 0, 1])
    if depthwise.suits_pairs(x, weight, conv.groups):
        return depthwise.grad_weight(grad, x, weight, conv)
    return by_correlation(grad, x, weight, conv)


def by_correlation(grad: Tensor, x: Tensor, weight: Tensor, conv: ConvArgs) -> Tensor:
    """The gradient of the weight as one convolution, with batch and channel, stride and dilation swapped.

    Its channels are the samples; each group has samples of its own. The result is cut to the kernel's size.
    """
    ins = weight.shape[1]
    seen = x.transpose(0, 1)  # [in, batch, *size]
    if conv.groups > 1:
        seen = seen.reshape([conv.groups, ins, -1, *x.shape[2:]]).transpose(0, 1).reshape([ins, -1, *x.shape[2:]])
    swapped = replace(conv, stride=conv.dilation, dilation=conv.stride)
    # [in / groups, groups * batch, *size] with [out, batch, *out_size] -> [in / groups, out, *kernel or more]
    out = swapped.apply(seen, grad.transpose(0, 1))
    for i, size in enumerate(weight.shape[2:]):
        if out.shape[2 + i] != size:
            out = out.narrow(2 + i, 0, size)
    return out.transpose(0, 1)


def _fixed(*tensors: Tensor) -> bool:
    """Whether every size is a number. Only LiteRT's graphs have a fixed batch."""
    return all(isinstance(size, int) for tensor in tensors for size in tensor.shape)


def _prefers_products(weight: Tensor) -> bool:
    """Whether LiteRT is faster with products: large ones, and few of them."""
    outs, ins, high, wide = weight.shape
    return min(outs, ins * wide) >= MIN_PRODUCT_SIZE and high <= MAX_KERNEL_ROWS


def _cut(whole: Tensor, before: Sequence[int], like: Tensor) -> Tensor:
    """Drop `before` rows at the start of each spatial dimension; at its end drop rows or add zeros, as in `like`."""
    for dim, start in enumerate(before, start=2):
        after = whole.shape[dim] - start - like.shape[dim]
        if after < 0:  # rows that no window reached
            padding = [0, 0] * (whole.dim() - 1 - dim) + [0, -after]
            whole = cast("Tensor", aten.constant_pad_nd.default(whole, padding))
        if start or after > 0:
            whole = whole.narrow(dim, start, like.shape[dim])
    return whole
