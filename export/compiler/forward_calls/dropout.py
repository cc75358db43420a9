"""Dropout as a product with a mask, and attention with it: torch's own needs the number of values as a plain number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

F = nn.functional
SELU_ALPHA = 1.7580993408473766  # minus the limit of SELU at minus infinity (Klambauer et al. 2017, section 3)
SAMPLES_CHANNELS = 2  # dimensions that a mask of whole channels keeps


def _mask(x: Tensor, p: float, shape: Sequence[int]) -> Tensor:
    """A mask of `shape` in the dtype of x: 1 with probability 1 - p, else 0."""
    return torch.bernoulli(x.detach().new_zeros(shape), 1 - p)


def _values(x: Tensor) -> Sequence[int]:
    return x.shape


def _channels(x: Tensor, batched: int = 0) -> Sequence[int]:
    """`batched`: torch takes a tensor of fewer axes for one sample, whose channels are the rows."""
    kept = SAMPLES_CHANNELS if x.dim() >= batched else 1
    return [*x.shape[:kept], *[1] * (x.dim() - kept)]


def _plain(x: Tensor, mask: Tensor, p: float) -> Tensor:
    return x * mask / (1 - p)


def _alpha(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Dropped values become SELU's limit; scale and shift then restore mean 0 and variance 1."""
    scale = 1 / math.sqrt((SELU_ALPHA * SELU_ALPHA * p + 1) * (1 - p))
    return x * (mask * scale) + (mask - 1) * (SELU_ALPHA * scale) + SELU_ALPHA * scale * p


def _dropout(
    dropped: Callable[[Tensor], Sequence[int]], apply: Callable[[Tensor, Tensor, float], Tensor], *, default: bool
) -> Callable[..., Tensor]:
    """A dropout function: `dropped` gives the mask's shape, `apply` the result; `default` is that of `training`."""

    def dropout(x: Tensor, p: float = 0.5, training: bool = default, inplace: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - torch's
        if not training or p == 0:
            return x
        out = apply(x, _mask(x, p, dropped(x)), p) if p < 1 else x * 0
        return x.copy_(out) if inplace else out

    return dropout


DROPOUT = _dropout(_values, _plain, default=True)


def _attention(  # noqa: PLR0913, PLR0917 - the arguments of torch's function
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """softmax(Q K^T / sqrt(width)) V, the formula of torch's documentation; written out only where there is dropout."""
    if dropout_p == 0 or enable_gqa:
        return ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return DROPOUT(torch._safe_softmax(scores, -1), dropout_p) @ value  # noqa: SLF001 - zeros where a row has no key


ATTENTION = F.scaled_dot_product_attention

DROPOUT_OVERRIDES: Mapping[Any, Callable[..., Tensor]] = {
    F.dropout: DROPOUT,
    torch.dropout: DROPOUT,
    F.dropout1d: _dropout(partial(_channels, batched=3), _plain, default=True),
    F.dropout2d: _dropout(_channels, _plain, default=True),
    F.dropout3d: _dropout(partial(_channels, batched=5), _plain, default=True),
    F.alpha_dropout: _dropout(_values, _alpha, default=False),
    F.feature_alpha_dropout: _dropout(_channels, _alpha, default=False),
    F.scaled_dot_product_attention: _attention,
}
