"""Operators that are one matrix per axis: adaptive averages, and values picked by index. Any layout.

Gather and scatter become products with a one-hot matrix, as in the gradient of an embedding; the product with its
transpose is the gradient. Upsampling (nearest, bilinear, bicubic) and padding by
reflection or repetition arrive as picks by index. The batch may be symbolic; every other size is a plain number.
"""

# ruff: noqa: FBT001, FBT002 - the functions of a decomposition table have torch's own signatures
# ruff: noqa: SLF001 - torch writes several public operators with a leading underscore

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from export.compiler.decompositions.supported_ops import UnsupportedOperator

aten = torch.ops.aten
Indices = Sequence[Tensor | None]


def adaptive_avg_pool2d(x: Tensor, size: Sequence[int]) -> Tensor:
    """[..., height, width] -> [..., *size]; windows of nearly equal length, overlapping where sizes do not divide."""
    for axis, count in zip((-2, -1), size, strict=True):
        x = _through(x, axis, _averages(x.shape[axis], count, x))
    return x


def adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of `adaptive_avg_pool2d`: every value of a window gets the same share."""
    for axis in (-2, -1):
        grad = _through(grad, axis, _averages(x.shape[axis], grad.shape[axis], grad).t())
    return grad


def index(x: Tensor, indices: Indices) -> Tensor:
    """x[:, :, i, j] with integer indices, negative ones from the end; each of several indices varies along one axis.

    Raises UnsupportedOperator for any other way to index.
    """
    first, picks, shape = _picks("index", x, indices)
    for axis, pick in enumerate(picks, first):
        x = _through(x, axis, pick)
    return x.reshape([*x.shape[:first], *shape, *x.shape[first + len(picks) :]])


def index_put(x: Tensor, indices: Indices, values: Tensor, accumulate: bool = False) -> Tensor:
    """The gradient of `index`: x plus `values` at the indexed places; a place indexed twice gets both.

    Raises UnsupportedOperator for an assignment (`accumulate` false).
    """
    if not accumulate:
        raise UnsupportedOperator(
            "index_put", "assigning by index is not covered; write it as a sum or with torch.where"
        )
    first, picks, shape = _picks("index_put", x, indices)
    values = values.expand([*x.shape[:first], *shape, *x.shape[first + len(picks) :]])
    values = values.reshape([*x.shape[:first], *(p.shape[0] for p in picks), *x.shape[first + len(picks) :]])
    for axis, pick in enumerate(picks, first):
        values = _through(values, axis, pick.t())
    return x + values


def _picks(operator: str, x: Tensor, indices: Indices) -> tuple[int, list[Tensor], list[int]]:
    """The first axis that is indexed, a matrix [picked, size] for it and each next one, and the shape of all picks."""
    at = [axis for axis, rows in enumerate(indices) if rows is not None]
    given = [rows for rows in indices if rows is not None]
    if not x.dtype.is_floating_point or any(rows.dtype not in {torch.int64, torch.int32} for rows in given):
        raise UnsupportedOperator(operator, "only floating point tensors can be indexed, and only by whole numbers")
    shape = list(torch.broadcast_shapes(*(rows.shape for rows in given)))  # type: ignore[no-untyped-call]
    # The dimensions along which each index varies, from the end; rising ones are rows, then columns, as in a grid.
    varies = [[d - rows.dim() for d, n in enumerate(rows.shape) if n != 1] for rows in given]
    grid = all(len(dims) == 1 for dims in varies) and all(a < b for a, b in pairwise(varies))
    if at != list(range(at[0], at[0] + len(at))) or not (grid or len(at) == 1):
        raise UnsupportedOperator(
            operator, "indices of several axes at once are not covered; index one axis after the other"
        )
    return at[0], [_one_hot(rows.reshape(-1), x.shape[axis], x) for axis, rows in zip(at, given, strict=True)], shape


def _one_hot(rows: Tensor, size: int, like: Tensor) -> Tensor:
    """[picked] -> [picked, size]."""
    rows = torch.where(rows < 0, rows + size, rows).reshape(-1, 1)
    return (rows == torch.arange(size, dtype=rows.dtype, device=rows.device)).to(like.dtype)


def _averages(size: int, count: int, like: Tensor) -> Tensor:
    """[count, size]: window o averages from floor(o size / count) up to ceil((o + 1) size / count)."""
    window, value = torch.arange(count, device=like.device).reshape(-1, 1), torch.arange(size, device=like.device)
    inside = ((window * size < (value + 1) * count) & ((window + 1) * size > value * count)).to(like.dtype)
    return inside / inside.sum(1, keepdim=True)


def _through(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """Multiply `axis` of x, `size` values long, by the matrix [count, size]."""
    last = x.movedim(axis, -1)
    out = last.reshape(-1, matrix.shape[1]) @ matrix.t()
    return out.reshape([*last.shape[:-1], matrix.shape[0]]).movedim(-1, axis)


AXIS_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten._adaptive_avg_pool2d.default: adaptive_avg_pool2d,
    aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool2d_backward,
    aten.index.Tensor: index,
    aten._unsafe_index.Tensor: index,
    aten.index_put.default: index_put,
    aten._unsafe_index_put.default: index_put,
}
