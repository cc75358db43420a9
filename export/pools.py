"""The backward of two-dimensional pooling, written as slices, comparisons and interleaving. Layout NCHW.

The batch may be symbolic; every other size is a plain number. No scatter: LiteRT accepts it only in special forms.
"""

# ruff: noqa: PLR0913, PLR0917, FBT001 - the functions of a decomposition table have torch's own signatures

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from export.convolutions import Convolution
from export.operators import Unsupported

aten = torch.ops.aten


def max_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    _indices: Tensor,
) -> Tensor:
    """Windows that touch, no overlap. A window's first maximum takes the gradient, as in torch; ties are common."""
    kh, kw = _pair(kernel)
    if _pair(stride or kernel) != (kh, kw) or any(_pair(padding)) or _pair(dilation) != (1, 1) or ceil_mode:
        raise Unsupported(
            "max_pool2d_with_indices_backward",
            "max-pooling with overlapping, padded or dilated windows, or with ceil_mode, is not covered",
        )
    (batch, channels, oh, ow) = grad.shape
    # A window's rows are adjacent already; turning its columns outwards makes every view a run of whole rows.
    whole = x[..., : oh * kh, : ow * kw].reshape([batch, channels * oh, kh * ow, kw])
    whole = whole.transpose(2, 3).reshape([batch, channels * oh, kw * kh * ow])
    views = [whole.narrow(2, (j * kh + i) * ow, ow) for i in range(kh) for j in range(kw)]
    best = views[0]
    for view in views[1:]:
        best = torch.maximum(best, view)
    rest, parts = grad.reshape(best.shape), []
    for view in views[:-1]:
        part = (view == best).to(grad.dtype) * rest
        rest = rest - part
        parts.append(part)
    parts.append(rest)  # where no other view was the first maximum, the last one is
    turned = torch.cat([parts[i * kw + j] for j in range(kw) for i in range(kh)], 2)
    back = turned.reshape([batch, channels * oh, kw, kh * ow]).transpose(2, 3)
    return _pad_end(back.reshape([batch, channels, oh * kh, ow * kw]), x.shape[-2] - oh * kh, x.shape[-1] - ow * kw)


def avg_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Windows that touch: every value of a window gets its share. Others: a depthwise transposed convolution."""
    (kh, kw), (sh, sw), (ph, pw) = _pair(kernel), _pair(stride or kernel), _pair(padding)
    if ceil_mode or (not count_include_pad and (ph or pw)):
        raise Unsupported("avg_pool2d_backward", "ceil_mode, and padding that does not count, are not covered")
    share = grad / (divisor_override or kh * kw)
    oh, ow = grad.shape[-2:]
    if (kh, kw) == (sh, sw) and not (ph or pw):
        whole = _interleave([_interleave([share] * kw, -1)] * kh, -2)
        return _pad_end(whole, x.shape[-2] - oh * kh, x.shape[-1] - ow * kw)
    channels = x.shape[1]
    ones = torch.ones([channels, 1, kh, kw], dtype=x.dtype, device=x.device)
    return Convolution((sh, sw), (ph, pw), (1, 1), channels).grad_input(share, x, ones)


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])


def _interleave(parts: Sequence[Tensor], dim: int) -> Tensor:
    """[..., n, ...] k times -> [..., n * k, ...], the parts taking turns along `dim` (negative)."""
    if len(parts) == 1:
        return parts[0]
    at = parts[0].dim() + dim
    shape = list(parts[0].shape)
    shape[at] *= len(parts)
    return torch.stack(list(parts), at + 1).reshape(shape)


def _pad_end(x: Tensor, bottom: int, right: int) -> Tensor:
    """Zeros below and to the right, for rows that no whole window covered."""
    if not (bottom or right):
        return x
    return cast("Tensor", aten.constant_pad_nd.default(x, [0, right, 0, bottom]))
