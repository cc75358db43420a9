"""Convolutions of many small groups over narrow images, as products of whole rows. Layout NCHW, two dimensions.

A runtime copies x for every place of the kernel, and one channel per group leaves it products of a single row. Between
whole rows of an image and of the output there are products of useful size. Part of what those compute is zero or not
needed, more of it the wider the image; `suits_bands` and `suits_pairs` say how far that pays, by ONNX Runtime's times.
The batch may be symbolic; every other size is a plain number. Knows no model, no file and no runtime.
"""

# ruff: noqa: PLR0913, PLR0917 - a convolution has as many numbers

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

aten = torch.ops.aten
IMAGE_DIMENSIONS = 4  # dimensions of x
MIN_BAND_RATIO = 3  # times as wide as the kernel: there a band is a third of its table
MAX_ROW_VALUES = 64  # values in a row of one group


def suits_bands(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether `convolution` covers it, and beats the runtime's."""
    alone = x.shape[1] == weight.shape[0] == groups > 1
    return alone and x.dim() == IMAGE_DIMENSIONS and x.shape[3] <= MIN_BAND_RATIO * weight.shape[3]


def suits_pairs(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether `grad_weight` covers it, and beats a convolution of x with the gradient."""
    return groups > 1 and x.dim() == IMAGE_DIMENSIONS and weight.shape[1] * x.shape[3] <= MAX_ROW_VALUES


def convolution(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Input [batch, channels, height, width], weight [channels, 1, *kernel] -> [batch, channels, *out_size].

    For each row of the kernel, rows of x times a table [width, out_width] in which that row stands as a band.
    """
    (channels, _, high, wide), (batch, _, height, width) = weight.shape, x.shape
    (down, across), (dh, dw), (ph, pw) = stride, dilation, padding
    whole = width + 2 * pw
    oh, ow = (height + 2 * ph - dh * (high - 1) - 1) // down + 1, (whole - dw * (wide - 1) - 1) // across + 1
    row = aten.constant_pad_nd.default(weight.reshape([channels, high, wide, 1]).transpose(0, 1), [0, dw - 1])
    row = row.reshape([high, channels, wide * dw]).narrow(2, 0, dw * (wide - 1) + 1)
    # One after the other, each longer by `across` than the row where it stands: so the band steps on.
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


def grad_weight(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient for the weight [out, in / groups, *kernel].

    For each row of the kernel a product pairs every column of x with every column of the gradient, summed over samples
    and rows. A place of the kernel is the sum of the pairs that lie as far apart as it says.
    """
    (outs, ins, high, wide), (oh, ow), (batch, _, height, width) = weight.shape, grad.shape[2:], x.shape
    (down, across), (dh, dw), (ph, pw) = stride, dilation, padding
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
    """Of [..., height, width]."""
    return x[:, :, first : first + step * (count - 1) + 1 : step]
