"""Transposed convolutions as LiteRT has them: without padding, and dilated only at unit stride.

Layout NCHW, any number of dimensions. Padding cuts rows off the unpadded result; output padding keeps some of them. A
dilated kernel becomes a longer kernel with zeros between its values. The gradients are those of the convolution that
is transposed (export/compiler/decompositions/convolutions.py). The batch may be symbolic; every other size is a plain
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from export.compiler.decompositions.conv_args import ConvArgs, add_bias

aten = torch.ops.aten


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:  # noqa: ANN401 - torch's own
    """Replace `aten.convolution`: x [batch, in, *size], weight [in, out / groups, *kernel] -> [batch, out, *out_size].

    The bias is [out]; `args` are those of `ConvArgs.from_aten`. Returns NotImplemented where every runtime has the
    convolution as it is.
    """
    conv = ConvArgs.from_aten(*args)
    far_apart = max(conv.stride) > 1 and max(conv.dilation) > 1
    if not conv.transposed or not (far_apart or any(conv.padding) or any(conv.output_padding)):
        return NotImplemented  # type: ignore[no-any-return]  # how a decomposition declines
    numbers = zip(
        x.shape[2:], weight.shape[2:], conv.stride, conv.padding, conv.dilation, conv.output_padding, strict=True
    )
    sizes = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + more for n, k, s, p, d, more in numbers]
    unpadded = replace(conv, padding=conv.zeros, output_padding=())
    if far_apart:
        weight, unpadded = _with_gaps(weight, conv.dilation), replace(unpadded, dilation=conv.ones)
    out = unpadded.apply(x, weight)
    for dim, (before, size) in enumerate(zip(conv.padding, sizes, strict=True), 2):
        missing = before + size - out.shape[dim]  # rows that no window reached
        if missing > 0:
            out = cast("Tensor", aten.constant_pad_nd.default(out, [0, 0] * (out.dim() - 1 - dim) + [0, missing]))
        out = out.narrow(dim, before, size)
    return add_bias(out, bias)


def _with_gaps(weight: Tensor, dilation: Sequence[int]) -> Tensor:
    """[..., *kernel] -> [..., *dilation * kernel], with zeros after each value, after the last one too."""
    for dim, gap in enumerate(dilation, 2):
        rows = torch.stack([weight, *[torch.zeros_like(weight)] * (gap - 1)], dim + 1)
        weight = rows.flatten(dim, dim + 1)
    return weight
