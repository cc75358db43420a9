"""Transposed convolutions as LiteRT has them: without padding, and dilated only where unit stride goes with it.

Layout NCHW, any number of sizes. Padding cuts rows off what an unpadded one gives, output padding leaves some more; a
dilated kernel is a longer one with zeros in between. Their gradients are those of the convolution that they transpose:
export/compiler/decompositions/convolutions.py. The batch may be symbolic; every other size is a plain number.
"""

# ruff: noqa: PLR0913, PLR0917, FBT001 - the functions of a decomposition table have torch's own signatures

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

aten = torch.ops.aten


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
    """Input [batch, in, *size], weight [in, out / groups, *kernel] -> [batch, out, *size]; others stay as they are."""
    far_apart = max(stride) > 1 and max(dilation) > 1
    if not transposed or not (far_apart or any(padding) or any(output_padding)):
        return NotImplemented  # type: ignore[no-any-return]  # how a decomposition declines
    numbers = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, output_padding, strict=True)
    sizes = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + more for n, k, s, p, d, more in numbers]
    nothing, ones = [0] * len(stride), [1] * len(stride)
    if far_apart:
        weight, dilation = _with_gaps(weight, dilation), ones
    out = aten.convolution.default(x, weight, None, stride, nothing, dilation, True, nothing, groups)  # noqa: FBT003
    for dim, (before, size) in enumerate(zip(padding, sizes, strict=True), 2):
        missing = before + size - out.shape[dim]  # rows that no window reached
        if missing > 0:
            out = aten.constant_pad_nd.default(out, [0, 0] * (out.dim() - 1 - dim) + [0, missing])
        out = out.narrow(dim, before, size)
    return cast("Tensor", out if bias is None else out + bias.reshape([-1, *[1] * len(stride)]))


def _with_gaps(weight: Tensor, dilation: Sequence[int]) -> Tensor:
    """[..., *kernel] -> [..., *dilation * kernel], zeros after each value; what the last ones reach is cut off."""
    for dim, gap in enumerate(dilation, 2):
        rows = torch.stack([weight, *[torch.zeros_like(weight)] * (gap - 1)], dim + 1)
        weight = rows.flatten(dim, dim + 1)
    return weight
