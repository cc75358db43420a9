"""Convolutions of many small groups over narrow images, as products of whole rows. Layout NCHW, two dimensions.

A runtime copies x for every place of the kernel; with one channel per group its products then have a single row. The
products here pair whole rows of an image with whole rows of the output. Part of what they compute is zero or unused,
and this part grows with the image's width. The limits in `suits_bands` and `suits_pairs` come from ONNX Runtime's
times. The batch may be symbolic; every other size is a plain number.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from export.compiler.decompositions.conv_args import ConvArgs

aten = torch.ops.aten
IMAGE_DIMENSIONS = 4  # dimensions of x
MAX_WIDTH_IN_KERNELS = 3  # image width over kernel width; at 3, a band fills a third of its table
MAX_ROW_VALUES = 64  # values in a row of one group


def suits_bands(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether `convolution` applies, and is faster than the runtime's own."""
    alone = weight.shape[0] == groups > 1 == weight.shape[1]  # not x.shape[1], in a weight gradient the batch
    return alone and x.dim() == IMAGE_DIMENSIONS and x.shape[3] <= MAX_WIDTH_IN_KERNELS * weight.shape[3]


def suits_pairs(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether `grad_weight` applies, and is faster than a convolution of x with the gradient."""
    return groups > 1 and x.dim() == IMAGE_DIMENSIONS and weight.shape[1] * x.shape[3] <= MAX_ROW_VALUES


def convolution(x: Tensor, weight: Tensor, conv: ConvArgs) -> Tensor:
    """Input [batch, channels, height, width], weight [channels, 1, *kernel] -> [batch, channels, *out_size].

    For each row of the kernel, rows of x are multiplied by a table [width, out_width] that holds the kernel's row as a
    band.
    """
    (channels, _, high, wide), (batch, _, height, width) = weight.shape, x.shape
    (down, across), (dh, dw), (ph, pw) = conv.stride, conv.dilation, conv.padding
    whole = width + 2 * pw
    oh, ow = (height + 2 * ph - dh * (high - 1) - 1) // down + 1, (whole - dw * (wide - 1) - 1) // across + 1
    row = aten.constant_pad_nd.default(weight.reshape([channels, high, wide, 1]).transpose(0, 1), [0, dw - 1])
    row = row.reshape([high, channels, wide * dw]).narrow(2, 0, dw * (wide - 1) + 1)
    # Copies of the row, each longer by `across` than a row of the table: reshaped, they lie as a band.
    row = aten.constant_pad_nd.default(row, [0, whole + across - row.shape[2]]).unsqueeze(2)
    bands = row.expand([high, channels, ow, whole + across]).reshape([high, channels, -1]).narrow(2, 0, ow * whole)
    bands = bands.reshape([high, channels, ow, whole]).narrow(3, pw, width).transpose(2, 3)
    seen = _margins(x.transpose(0, 1).reshape([channels, batch, -1]), ph * width)
    seen = seen.reshape([channels, batch, height + 2 * ph, width])
    parts: list[Tensor] = [
        aten.bmm.default(_rows(seen, i * dh, down, oh).reshape([channels, -1, width]), bands.select(0, i))
        for i in range(high)
    ]
    return reduce(torch.add, parts).reshape([channels, batch, oh, ow]).transpose(0, 1)


def grad_weight(grad: Tensor, x: Tensor, weight: Tensor, conv: ConvArgs) -> Tensor:
    """The gradient of the weight [out, in / groups, *kernel].

    For each row of the kernel a product pairs every column of x with every column of the gradient, summed over samples
    and rows. The gradient at one place of the kernel is the sum of the pairs at that place's distance.
    """
    groups = conv.groups
    (outs, ins, high, wide), (oh, ow), (batch, _, height, width) = weight.shape, grad.shape[2:], x.shape
    (down, across), (dh, dw), (ph, pw) = conv.stride, conv.dilation, conv.padding
    seen = _margins(_grouped(x, groups).reshape([groups, batch, -1]), ph * ins * width)
    seen = seen.reshape([groups, batch, height + 2 * ph, ins * width])
    given = _grouped(grad, groups).reshape([groups, -1, outs // groups * ow])
    pairs = []
    for i in range(high):
        rows = _rows(seen, i * dh, down, oh).reshape([groups, -1, ins * width])
        pairs.append(aten.bmm.default(rows.transpose(1, 2), given))
    table = torch.stack(pairs).reshape([high, groups, ins, width, outs // groups, ow]).permute([0, 1, 4, 2, 3, 5])
    table = table.reshape([high, outs, ins, width * ow])
    places = []
    for left in range(-pw, dw * wide - pw, dw):
        # Column c of the gradient meets column across * c + left of x, if there is one.
        first, last = max(0, -(left // across)), min(ow - 1, (width - 1 - left) // across)
        start, step = (across * first + left) * ow + first, across * ow + 1
        met = table[..., start : start + (last - first) * step + 1 : step] if last >= first else None
        places.append(torch.zeros_like(table[..., 0]) if met is None else met.sum([-1]))
    return torch.stack(places, -1).permute([1, 2, 0, 3])


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[batch, channels, height, width] -> [groups, batch, height, channels / groups, width]."""
    if x.shape[1] == groups:
        return x.transpose(0, 1).unsqueeze(3)
    return x.reshape([x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]]).permute([1, 0, 3, 2, 4])


def _margins(planes: Tensor, size: int) -> Tensor:
    """Zeros at both ends of the last dimension."""
    return aten.constant_pad_nd.default(planes, [size, size]) if size else planes


def _rows(x: Tensor, first: int, step: int, count: int) -> Tensor:
    """[a, b, height, width] -> [a, b, count, width], from row `first`, every `step` rows."""
    return x[:, :, first : first + step * (count - 1) + 1 : step]
