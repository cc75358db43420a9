"""Operators that work axis by axis: adaptive averages, values picked by index, sampled grids. Any layout.

Values are picked by `index_select`, which every runtime has: a product would make NaN of an infinity beside them. Their
gradient is a product with a one-hot matrix, as in the gradient of an embedding, for LiteRT has no scatter. Upsampling
(nearest, bilinear, bicubic) and padding by reflection arrive as picks by index, too, and are products both ways. A
sampled grid has matrices of its own for each sample, and replaces the call in the forward pass. The batch may be
symbolic; every other size is a plain number.
"""

# ruff: noqa: FBT001, FBT002 - the functions of a decomposition table have torch's own signatures
# ruff: noqa: SLF001 - torch writes several public operators with a leading underscore

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's custom
from torch.utils._python_dispatch import _disable_current_modes

from export.compiler.decompositions.supported_ops import UnsupportedOperator

aten = torch.ops.aten
Indices = Sequence[Tensor | None]
WHOLE = (torch.int64, torch.int32)


def adaptive_avg_pool2d(x: Tensor, size: Sequence[int]) -> Tensor:
    """[..., height, width] -> [..., *size]; windows of nearly equal length, overlapping where sizes do not divide."""
    for axis, count in zip((-2, -1), size, strict=True):
        x = through(x, axis, _averages(x.shape[axis], count, x))
    return x


def adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of `adaptive_avg_pool2d`: every value of a window gets the same share."""
    for axis in (-2, -1):
        grad = through(grad, axis, _averages(x.shape[axis], grad.shape[axis], grad).t())
    return grad


def index(x: Tensor, indices: Indices) -> Tensor:
    """x[:, :, i, j] with integer indices, negative ones from the end. Raises UnsupportedOperator for boolean ones."""
    return _picks("index", x, indices).take(x)


def resample(x: Tensor, indices: Indices) -> Tensor:
    """`index` for the columns of finite images: ONNX Runtime multiplies twice as fast as it picks single values."""
    if not x.dtype.is_floating_point:
        return index(x, indices)
    return _picks("index", x, indices).take(
        x, lambda x, axis, rows: through(x, axis, _one_hot(rows, x.shape[axis], x.dtype))
    )


def index_put(x: Tensor, indices: Indices, values: Tensor, accumulate: bool = False) -> Tensor:
    """The gradient of `index`: x plus `values` at the indexed places; a place indexed twice gets both.

    Without `accumulate` the values replace those of x, and of a place indexed twice the last one stays. With it whole
    numbers are added as float32, which holds them up to 2^24. Raises
    UnsupportedOperator for boolean indices, unless they put one number at every place of a mask.
    """
    given = [(axis, rows) for axis, rows in enumerate(indices) if rows is not None]
    if len(given) == 1 and given[0][1].dtype == torch.bool and values.numel() == 1:
        axis, mask = given[0]
        mask = mask.reshape([*[1] * axis, *mask.shape, *[1] * (x.dim() - axis - mask.dim())])
        number = values.reshape([])
        return torch.where(mask, x + number if accumulate else number, x)
    if accumulate and not x.dtype.is_floating_point:
        return index_put(x.to(torch.float32), indices, values.to(torch.float32), accumulate).to(x.dtype)
    picks = _picks("index_put", x, indices)
    return x + picks.sums(values) if accumulate else torch.where(picks.hit(values), picks.lasts(values), x)


@dataclass(frozen=True, kw_only=True)
class AxisPicks:
    """Indices axis by axis: move the axes in `order`, reshape to `flat`, pick `rows` of each axis from `first` on."""

    sizes: Sequence[int]  # of the tensor
    order: Sequence[int]  # indexed axes come first where others are between them, as torch's result has them
    flat: Sequence[int]  # sizes in that order, with the indexed axes as one where their indices vary together
    first: int  # the first axis of `flat` that is indexed
    rows: Sequence[Tensor]  # [picked] each, none negative
    shape: Sequence[int]  # of all picks together

    def take(self, x: Tensor, pick: Callable[[Tensor, int, Tensor], Tensor] = aten.index_select.default) -> Tensor:
        x = x.permute(list(self.order)).reshape(list(self.flat))
        for axis, rows in enumerate(self.rows, self.first):
            x = pick(x, axis, rows)
        return x.reshape(self._picked(self.shape))

    def sums(self, values: Tensor) -> Tensor:
        """The gradient of `take`: at each place the sum of its values."""
        return self._placed(values, lambda x, axis, chosen: through(x, axis, chosen.t()))

    def hit(self, values: Tensor) -> Tensor:
        """Whether a place has a value."""
        return self.sums(torch.ones_like(values, dtype=_floats(values))) > 0

    def lasts(self, values: Tensor) -> Tensor:
        """At each place its last value; others hold any value."""

        def last(x: Tensor, axis: int, chosen: Tensor) -> Tensor:
            numbers = torch.arange(chosen.shape[0], dtype=chosen.dtype, device=chosen.device)
            rows = (chosen * numbers.unsqueeze(1)).amax(0).to(torch.int64)
            return cast("Tensor", aten.index_select.default(x, axis, rows))

        return self._placed(values, last)

    def _placed(self, values: Tensor, place: Callable[[Tensor, int, Tensor], Tensor]) -> Tensor:
        """`place`: values, axis and [picked, size] ones where a value belongs -> values with all places of the axis."""
        values = values.expand(self._picked(self.shape)).reshape(self._picked([rows.shape[0] for rows in self.rows]))
        for axis, rows in enumerate(self.rows, self.first):
            values = place(values, axis, _one_hot(rows, self.flat[axis], _floats(values)))
        back = [self.order.index(axis) for axis in range(len(self.order))]
        return values.reshape([self.sizes[axis] for axis in self.order]).permute(back)

    def _picked(self, shape: Sequence[int]) -> list[int]:
        return [*self.flat[: self.first], *shape, *self.flat[self.first + len(self.rows) :]]


def _picks(operator: str, x: Tensor, indices: Indices) -> AxisPicks:
    at = [axis for axis, rows in enumerate(indices) if rows is not None]
    given = [rows for rows in indices if rows is not None]
    if any(rows.dtype not in WHOLE for rows in given):
        said = (
            "a boolean mask picks another number of values each time; write it with torch.where, and a mask that "
            "stays as the positions that it picks, h[:, [0, 2]]"
        )
        raise UnsupportedOperator(operator, said, _by_mask)
    first, order = at[0], list(range(x.dim()))
    if at != list(range(first, first + len(at))):
        first, order = 0, [*at, *(axis for axis in order if axis not in at)]
    shape = list(torch.broadcast_shapes(*(rows.shape for rows in given)))  # type: ignore[no-untyped-call]
    sizes, flat = [x.shape[axis] for axis in at], [x.shape[axis] for axis in order]
    # The dimensions along which each index varies, from the end; rising ones are rows, then columns, as in a grid.
    varies = [[d - rows.dim() for d, n in enumerate(rows.shape) if n != 1] for rows in given]
    grid = all(len(dims) == 1 for dims in varies) and all(a < b for a, b in pairwise(varies))
    if len(at) > 1 and not grid:
        whole = given[0].new_zeros([])
        for rows, size in zip(given, sizes, strict=True):
            whole = whole * size + _from_start(rows, size)
        flat[first : first + len(at)] = sizes = [math.prod(sizes)]
        given = [whole.expand(shape)]
    return AxisPicks(
        sizes=list(x.shape),
        order=order,
        flat=flat,
        first=first,
        rows=[_from_start(rows.reshape(-1), size) for rows, size in zip(given, sizes, strict=True)],
        shape=shape,
    )


def _by_mask(_operator: str, args: Sequence[Any]) -> bool:
    """Whether a call with these arguments, a tensor and its indices, has a mask among them."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(rows, Tensor) and rows.dtype not in WHOLE for rows in indices)


def _from_start(rows: Tensor, size: int) -> Tensor:
    """Negative numbers count from the end."""
    return torch.where(rows < 0, rows + size, rows)


def _one_hot(rows: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[picked], none negative -> [picked, size]."""
    return (rows.reshape(-1, 1) == torch.arange(size, dtype=rows.dtype, device=rows.device)).to(dtype)


def _floats(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype.is_floating_point else torch.float32


def _averages(size: int, count: int, like: Tensor) -> Tensor:
    """[count, size]: window o averages from floor(o size / count) up to ceil((o + 1) size / count)."""
    window, value = torch.arange(count, device=like.device).reshape(-1, 1), torch.arange(size, device=like.device)
    inside = ((window * size < (value + 1) * count) & ((window + 1) * size > value * count)).to(like.dtype)
    return inside / inside.sum(1, keepdim=True)


def through(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """Multiply `axis` of x, `size` values long, by the matrix [count, size]."""
    last = x.movedim(axis, -1)
    out = last.reshape(-1, matrix.shape[1]) @ matrix.t()
    return out.reshape([*last.shape[:-1], matrix.shape[0]]).movedim(-1, axis)


def grid_sample(
    x: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """[batch, channels, *sizes] at the points of `grid` [batch, *out, axes] -> [batch, channels, *out].

    -1 and 1 are the ends of an axis, and the last axis is the first number of a point. The first axis takes a product,
    each further one a sum over [batch, points, channels, size]. Raises UnsupportedOperator for modes that mix more than
    two neighbours of an axis.
    """
    if mode not in {"bilinear", "nearest"} or padding_mode not in {"zeros", "border"}:
        raise UnsupportedOperator("grid_sample", f"mode={mode!r} with padding_mode={padding_mode!r} is not covered")
    batch, channels, sizes, out = x.shape[0], x.shape[1], x.shape[2:], grid.shape[1:-1]
    points = grid.reshape([batch, -1, len(sizes)])
    shares = [
        _shares(points[..., -1 - i], size, mode, padding_mode, corners=bool(align_corners))
        for i, size in enumerate(sizes)
    ]
    found = torch.bmm(shares[0], x.movedim(1, -1).reshape([batch, sizes[0], -1]))
    for share in shares[1:]:
        found = (found.reshape([*share.shape, -1]) * share.unsqueeze(-1)).sum(2)
    return found.reshape([batch, *out, channels]).movedim(-1, 1)


def _shares(at: Tensor, size: int, mode: str, padding: str, *, corners: bool) -> Tensor:
    """[batch, points] between -1 and 1 -> [batch, points, size]: how much of each place of an axis a point takes."""
    at = (at + 1) * ((size - 1) / 2) if corners else ((at + 1) * size - 1) * 0.5
    if padding == "border":  # torch's own gradient at an end is 0
        inside = (at > 0) & (at < size - 1)
        at = torch.where(inside, at, at.detach().clamp(0, size - 1))
    places = torch.arange(size, device=at.device, dtype=at.dtype)
    if mode == "nearest":
        return (at.detach().round().unsqueeze(-1) == places).to(at.dtype)
    before = at.detach().floor()
    beyond = (at - before).unsqueeze(-1)
    first, second = (((before + i).unsqueeze(-1) == places).to(at.dtype) for i in (0, 1))
    return first * (1 - beyond) + second * beyond


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """[batch, axes, axes + 1] -> the grid [batch, *size[2:], axes] for `grid_sample`."""
    axes = len(size) - 2
    lines = [
        (torch.arange(n, dtype=theta.dtype) * 2 + (1 - n)) / (max(n - 1, 1) if align_corners else n)
        for n in reversed(size[2:])
    ]
    whole = [line.reshape([-1, *[1] * i]).expand(list(size[2:])) for i, line in enumerate(lines)]
    base = torch.stack([*whole, torch.ones_like(whole[0])], -1).reshape(-1, axes + 1)
    return (base @ theta.transpose(1, 2)).reshape([theta.shape[0], *size[2:], axes])


def interpolate(
    x: Tensor,
    *,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    antialias: bool = False,
    **named: Any,  # noqa: ANN401 - torch's
) -> Tensor:
    """With `antialias` [batch, channels, height, width] times a matrix for each axis, which torch makes of an identity.

    Other calls stay torch's. Raises UnsupportedOperator for other heights of images one pixel wide: in each row torch
    2.13 gives the values of the first one.
    """
    if not antialias:
        return INTERPOLATE(x, size=size, scale_factor=scale_factor, **named)
    antialiased = {"antialias": True} | named
    with _disable_current_modes():
        small = INTERPOLATE(torch.zeros(1, 1, *x.shape[2:]), size=size, scale_factor=scale_factor, **antialiased)
    high, wide = small.shape[2:]
    if wide == 1 < high != x.shape[2]:
        raise UnsupportedOperator(
            "interpolate",
            "with antialias torch itself gives every row of an image one pixel wide the same values; "
            "interpolate to two pixels and take their mean",
        )
    for axis in (2, 3):
        count, factor = (v[axis - 2] if isinstance(v, Sequence) else v for v in (size, scale_factor))
        length = x.shape[axis]
        with _disable_current_modes():
            wanted: Any = {"scale_factor": (factor, 1.0)} if count is None else {"size": (count, length)}
            whole = torch.eye(length, dtype=torch.float64)[None, None]
            matrix = INTERPOLATE(whole, **wanted, **antialiased)[0, 0].to(x.dtype)
        x = through(x, axis, matrix)
    return x


INTERPOLATE = F.interpolate
GRID_OVERRIDES: Mapping[Any, Callable[..., Any]] = {
    F.grid_sample: grid_sample,
    F.affine_grid: affine_grid,
    F.interpolate: interpolate,
}
AXIS_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten._adaptive_avg_pool2d.default: adaptive_avg_pool2d,
    aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool2d_backward,
    aten.index.Tensor: index,
    aten._unsafe_index.Tensor: resample,
    aten.index_put.default: index_put,
    aten._unsafe_index_put.default: index_put,
}
