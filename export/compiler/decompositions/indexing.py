"""Slices, diagonals, splits, repeats and embeddings, as recurrent networks and transformers use them, without scatter.

LiteRT accepts scatter only in special forms. The batch may be symbolic; every other size is a plain number.
"""

# ruff: noqa: FBT001 - the functions of a decomposition table have torch's own signatures
# ruff: noqa: SLF001 - torch writes several public operators with a leading underscore

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from export.compiler.decompositions.norms import batch_norm_training
from export.compiler.decompositions.supported_ops import UnsupportedOperator

aten = torch.ops.aten
EVERYTHING = 2**62  # as the end of a slice


def embedding_backward(grad: Tensor, indices: Tensor, count: int, padding: int, by_frequency: bool) -> Tensor:
    """[..., width] and [...] -> [count, width], as a product with one-hot rows: tokens x count, for small vocabularies.

    The row `padding` gets no gradient (-1: there is no such row). Raises UnsupportedOperator for `by_frequency`.
    """
    if by_frequency:
        raise UnsupportedOperator("aten.embedding", "scale_grad_by_freq is not covered")
    tokens = torch.arange(count, device=grad.device, dtype=indices.dtype).reshape(1, -1)
    chosen = (indices.reshape(-1, 1) == tokens).to(grad.dtype)  # [tokens, count]
    if padding >= 0:
        chosen = chosen * (tokens != padding).to(grad.dtype)
    return chosen.t() @ grad.reshape(-1, grad.shape[-1])


def embedding(rows: Tensor, table: Tensor, *rest: Any, sparse: bool = False, **named: Any) -> Tensor:  # noqa: ANN401, ARG001 - torch's
    """Torch's own, with a dense gradient: a `sparse` one is the same numbers, and no graph has such a tensor."""
    return EMBEDDING(rows, table, *rest, **named)


def embedding_bag(  # noqa: PLR0913 - what torch's function gives on
    rows: Tensor,
    table: Tensor,
    *,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    **_: object,
) -> Tensor:
    """[batch, n] rows of `table` -> [batch, width]: their mean, sum or largest values without the padding's.

    0 for a bag of nothing else. Raises UnsupportedOperator for bags of several lengths, for `max_norm` and for
    `scale_grad_by_freq`.
    """
    if offsets is not None or rows.dim() == 1 or max_norm is not None:
        raise UnsupportedOperator("embedding_bag", "only rows [batch, n] without offsets and max_norm are covered")
    if scale_grad_by_freq:
        raise UnsupportedOperator("embedding_bag", "scale_grad_by_freq is not covered")
    values = EMBEDDING(rows, table)
    if per_sample_weights is not None:
        values = values * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return values.sum(1) if mode == "sum" else values.mean(1) if mode == "mean" else values.amax(1)
    counts = (rows != padding_idx % len(table)).unsqueeze(-1).expand(values.shape)
    number = counts.to(values.dtype).sum(1)
    if mode == "max":
        return torch.where(number > 0, torch.where(counts, values, torch.full_like(values, -math.inf)).amax(1), 0)
    total = torch.where(counts, values, torch.zeros_like(values)).sum(1)
    return total if mode == "sum" else total / number.clamp(min=1)


def slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, _end: int, step: int) -> Tensor:
    """The gradient of a slice: zeros around it and, where it has steps, between its values."""
    dim = dim % len(sizes)
    size = sizes[dim]
    first = min(max(start + size if start < 0 else start, 0), size)
    if step > 1 and grad.shape[dim]:
        wide = _zeros_around(grad.unsqueeze(dim + 1), dim + 1, 0, step - 1)
        grad = wide.flatten(dim, dim + 1).narrow(dim, 0, (grad.shape[dim] - 1) * step + 1)
    return _zeros_around(grad, dim, first, size - first - grad.shape[dim])


def slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Put `source` in place of a slice, as an assignment makes it; all of the axis may be the batch."""
    if start in {None, 0} and (end is None or (isinstance(end, int) and end >= EVERYTHING)) and step == 1:
        return source.clone()
    first, last, _ = slice(start, end).indices(x.shape[dim])
    places = torch.arange(x.shape[dim], device=x.device) - first
    inside = (places >= 0) & (places < last - first)
    if step > 1:
        inside = inside & (places - places // step * step == 0)
    inside = inside.reshape([-1, *[1] * (x.dim() - 1 - dim % x.dim())])
    return torch.where(inside, slice_backward(source, x.shape, dim, first, last, step), x)


def copy(x: Tensor, source: Tensor, *_: object) -> Tensor:
    """The values of `source` in the shape and dtype of x; onnxscript's leaves the shape of `source`, as a number's."""
    return source.to(x.dtype).expand(x.shape).clone()


def select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """Put `source` in place of one row."""
    first = index % x.shape[dim]
    return slice_scatter(x, source.unsqueeze(dim), dim, first, first + 1)


def select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """The gradient of a selected row: zeros around it."""
    dim = dim % len(sizes)
    first = index % sizes[dim]
    return _zeros_around(grad.unsqueeze(dim), dim, first, sizes[dim] - first - 1)


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The places of two axes whose numbers differ by `offset`, as the last axis."""
    wide, on = _on_diagonal(x, offset, dim1, dim2)
    return torch.where(on, wide, torch.zeros_like(wide)).sum(-1).to(x.dtype)  # of booleans, too


def diagonal_backward(grad: Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Tensor:
    """The gradient of `diagonal`: zeros beside it."""
    return diagonal_scatter(grad.new_zeros(list(sizes)), grad, offset, dim1, dim2)


def diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Put `source` in place of the diagonal."""
    rows, on = _on_diagonal(x, offset, dim1, dim2)
    rows = torch.where(on, source.unsqueeze(-1).expand(rows.shape), rows)
    whole, above = x.movedim((dim1, dim2), (-2, -1)), max(-offset, 0)
    whole = slice_scatter(whole, rows, whole.dim() - 2, above, above + rows.shape[-2])
    return whole.movedim((-2, -1), (dim1, dim2))


def _on_diagonal(x: Tensor, offset: int, dim1: int, dim2: int) -> tuple[Tensor, Tensor]:
    """-> the rows that the diagonal crosses [..., rows, columns], and where in them it is [rows, columns]."""
    x = x.movedim((dim1, dim2), (-2, -1))
    above, left = max(-offset, 0), max(offset, 0)
    count = max(min(x.shape[-2] - above, x.shape[-1] - left), 0)
    on = torch.arange(count).unsqueeze(1) + left == torch.arange(x.shape[-1])
    rows = x.narrow(-2, above, count)
    return rows, on.expand(rows.shape)


def _zeros_around(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    padding = [0, 0] * (x.dim() - 1 - dim % x.dim()) + [before, after]
    return cast("Tensor", aten.constant_pad_nd.default(x, padding))


def split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    """One slice per part."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def repeat(x: Tensor, times: Sequence[int]) -> Tensor:
    """Repeat the tensor `times[d]` times along each dimension d; new dimensions come first."""
    x = x.reshape([1] * (len(times) - x.dim()) + list(x.shape))
    for dim, count in enumerate(times):
        wide = list(x.shape)
        x = x.unsqueeze(dim).expand([*wide[:dim], count, *wide[dim:]])
        x = x.reshape([*wide[:dim], count * wide[dim], *wide[dim + 1 :]])
    return x


def view(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """A view where the values lie in memory as it needs them, and else a copy.

    Torch's sort, gather, scatter and repeat give one row after another; ours may give a turned tensor. Returns
    NotImplemented where a view is possible.
    """
    try:
        with disable_proxy_modes_tracing():
            x.view(sizes)
    except (RuntimeError, ValueError):
        return x.clone(memory_format=torch.contiguous_format).view(sizes)
    return NotImplemented  # type: ignore[no-any-return]  # how a decomposition declines


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax; a row that attention masks as a whole is zeros."""
    x = x if dtype is None else x.to(dtype)
    masked = x.amax(dim, keepdim=True) == float("-inf")
    return torch.where(masked, torch.zeros_like(x), torch.softmax(x, dim))


def batch_norm_without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Instance norm, which torch expresses as batch norm of one sample with batch x channels channels."""
    nothing = x.new_zeros([x.shape[1]])
    out, mean, rstd, _, _ = batch_norm_training(x, weight, bias, nothing, nothing, training, momentum, eps)
    return out, mean, rstd


EMBEDDING = nn.functional.embedding
INDEXING_OVERRIDES: Mapping[Any, Callable[..., Any]] = {
    EMBEDDING: embedding,
    nn.functional.embedding_bag: embedding_bag,
}
INDEXING_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.embedding_dense_backward.default: embedding_backward,
    aten.copy.default: copy,
    aten.slice_backward.default: slice_backward,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.select_backward.default: select_backward,
    aten.diagonal.default: diagonal,
    aten.diagonal_backward.default: diagonal_backward,
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.split_with_sizes.default: split_with_sizes,
    aten.repeat.default: repeat,
    aten.view.default: view,
    aten._safe_softmax.default: safe_softmax,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_statistics,
}
