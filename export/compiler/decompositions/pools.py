"""Pooling and its gradients, one axis after the other. Layout [batch, channels, height, width].

The maximum of a window is the largest of its rows' maxima, and its sum is the sum of its rows' sums. So windows over
single rows are enough: slices, comparisons, sums and interleaving. For windows over columns the planes are turned,
because runtimes copy whole rows many times faster than single values. Scatter is not used: LiteRT accepts it only in
special forms. The batch may be symbolic; every other size is a plain number.
"""

# ruff: noqa: PLR0913, PLR0917, FBT001, FBT002 - the functions of a decomposition table have torch's own signatures

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's custom

from export.compiler.decompositions.supported_ops import UnsupportedOperator

aten = torch.ops.aten
INFINITY = float("inf")


@dataclass(frozen=True, kw_only=True)
class PoolWindows:
    """Windows over rows [..., size, width]: place i of window o is row o * stride + i * dilation - padding."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    ceil_mode: bool = False

    @property
    def count(self) -> int:
        """How many windows there are. With ceil_mode the last may reach beyond the padding, but not start there."""
        free = self.size + 2 * self.padding - self.dilation * (self.kernel - 1) - 1
        count = (free + (self.stride - 1 if self.ceil_mode else 0)) // self.stride + 1
        starts_outside = self.ceil_mode and (count - 1) * self.stride >= self.size + self.padding
        return count - 1 if starts_outside else count

    @property
    def missing(self) -> int:
        """How many rows beyond the padding the last window covers."""
        reach = (self.count - 1) * self.stride + self.dilation * (self.kernel - 1) + 1
        return max(0, reach - self.size - 2 * self.padding)

    def views(self, x: Tensor, outside: float) -> list[Tensor]:
        """[..., size, width] -> for each place in a window, every window's row there: [..., count, width]."""
        long = self._phase_length * self.stride
        x = _fit(_pad(x, self.padding, 0, outside), long, outside)
        if self.stride > 1:
            x = x.reshape([*x.shape[:-2], self._phase_length, self.stride, x.shape[-1]])
        phases = [x.select(-2, r) for r in range(self.stride)] if self.stride > 1 else [x]
        starts = [divmod(i * self.dilation, self.stride) for i in range(self.kernel)]
        return [phases[phase].narrow(-2, first, self.count) for first, phase in starts]

    def spread(self, parts: Sequence[Tensor]) -> Tensor:
        """The transpose of `views`: add every part's rows to those that they came from. -> [..., size, width]."""
        phases: list[Tensor | None] = [None] * self.stride
        for i, part in enumerate(parts):
            first, phase = divmod(i * self.dilation, self.stride)
            moved, known = _pad(part, first, self._phase_length - self.count - first, 0.0), phases[phase]
            phases[phase] = moved if known is None else known + moved
        some = cast("Tensor", phases[0])  # place 0 is in it
        whole = some
        if self.stride > 1:
            whole = torch.stack([torch.zeros_like(some) if p is None else p for p in phases], -2)
            whole = whole.reshape([*some.shape[:-2], self._phase_length * self.stride, some.shape[-1]])
        if self.padding:
            whole = whole.narrow(-2, self.padding, whole.shape[-2] - self.padding)
        return _fit(whole, self.size, 0.0)

    def populations(self, like: Tensor, *, with_padding: bool) -> Tensor:
        """[count]: how many rows each window averages over, with or without the padding, never beyond it."""
        low, high = (-self.padding, self.size + self.padding) if with_padding else (0, self.size)
        starts = torch.arange(self.count, dtype=like.dtype, device=like.device) * self.stride - self.padding
        return (starts + self.kernel).clamp(max=high) - starts.clamp(min=low)

    @property
    def _phase_length(self) -> int:
        """Rows o * stride + r for one r, as many as any place in a window needs."""
        return self.count + self.dilation * (self.kernel - 1) // self.stride


def max_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Unchanged without ceil_mode. Runtimes count windows differently with it, so the missing rows become part of x."""
    if not ceil_mode:
        return NotImplemented  # type: ignore[no-any-return]  # how a decomposition declines
    rows, columns = _axes(x, kernel, stride, padding, dilation, ceil_mode)
    beyond = [0, columns.missing, 0, rows.missing]
    whole = aten.constant_pad_nd.default(x, beyond, -INFINITY) if any(beyond) else x
    out, at = aten.max_pool2d_with_indices.default(whole, kernel, stride, padding, dilation)
    wide = columns.size + columns.missing
    return out, at // wide * columns.size + at % wide


def max_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """The first maximum of a window takes the gradient, as in torch: first by row, then by column."""
    rows, columns = _axes(x, kernel, stride, padding, dilation, ceil_mode)
    across = columns.views(_turn(x), -INFINITY)
    widest = reduce(torch.maximum, across)  # [batch, channels, window, height]
    down = rows.views(_turn(widest), -INFINITY)
    most = maxima_of_pool(reduce(torch.maximum, down), indices)
    given = rows.spread(_to_first(down, most, grad))
    return _turn(columns.spread(_to_first(across, widest, _turn(given))))


@torch.library.custom_op("fedcenters::maxima_of_pool", mutates_args=())
def maxima_of_pool(maxima: Tensor, indices: Tensor) -> Tensor:  # noqa: ARG001 - the pool's node in a graph
    """The maxima: a mark in a graph that they are the output of the pool with these indices (equal_nodes.py)."""
    return maxima.clone()


@maxima_of_pool.register_fake
def _maxima_of_pool(maxima: Tensor, indices: Tensor) -> Tensor:  # noqa: ARG001 - as above
    return torch.empty_like(maxima)


MAXIMA_OF_POOL = torch.ops.fedcenters.maxima_of_pool.default  # its node in a graph


def adaptive_max_pool2d(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Equal windows side by side. Raises UnsupportedOperator where the sizes do not divide."""
    out = aten.max_pool2d_with_indices.default(x, _adaptive_kernel(x, size))
    return cast("tuple[Tensor, Tensor]", out)


def adaptive_max_pool2d_backward(grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """The gradient of `adaptive_max_pool2d`."""
    kernel = _adaptive_kernel(x, grad.shape[-2:])
    return max_pool2d_backward(grad, x, kernel, kernel, [0], [1], False, indices)  # noqa: FBT003 - torch's signature


def avg_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Unchanged where windows fit without padding. Others become sums over rows, as runtimes disagree about them.

    ONNX's converter leaves a divisor of the model's own out.
    """
    if not (ceil_mode or any(padding) or divisor_override is not None):
        return NotImplemented  # type: ignore[no-any-return]  # how a decomposition declines
    rows, columns = _axes(x, kernel, stride, padding, [1], ceil_mode)
    down = reduce(torch.add, rows.views(x, 0.0))
    total = _turn(reduce(torch.add, columns.views(_turn(down), 0.0)))
    return _share(total, rows, columns, count_include_pad, divisor_override)


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
    """The gradient of `avg_pool2d`: every value of a window gets the same share."""
    rows, columns = _axes(x, kernel, stride, padding, [1], ceil_mode)
    share = _share(grad, rows, columns, count_include_pad, divisor_override)
    down = rows.spread([share] * rows.kernel)
    return _turn(columns.spread([_turn(down)] * columns.kernel))


def _axes(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[PoolWindows, PoolWindows]:
    """Windows over rows and columns. Torch gives one number for both axes; an empty stride is the kernel's size."""
    stride = stride or kernel
    rows, columns = (
        PoolWindows(
            size=x.shape[at],
            kernel=kernel[at if len(kernel) > 1 else 0],
            stride=stride[at if len(stride) > 1 else 0],
            padding=padding[at if len(padding) > 1 else 0],
            dilation=dilation[at if len(dilation) > 1 else 0],
            ceil_mode=ceil_mode,
        )
        for at in (-2, -1)
    )
    return rows, columns


def _adaptive_kernel(x: Tensor, size: Sequence[int]) -> list[int]:
    have = list(x.shape[-len(size) :])
    if any(h % s for h, s in zip(have, size, strict=True)):
        raise UnsupportedOperator(
            f"adaptive_max_pool{len(size)}d",
            f"{have} does not divide into {list(size)} equal windows; choose sizes that do, or AdaptiveAvgPool",
        )
    return [h // s for h, s in zip(have, size, strict=True)]


def _share(total: Tensor, rows: PoolWindows, columns: PoolWindows, with_padding: bool, divisor: int | None) -> Tensor:
    """[..., windows, windows] divided by how many values each window averages over."""
    if divisor is not None:
        return total / divisor
    high, wide = (axis.populations(total, with_padding=with_padding) for axis in (rows, columns))
    return total / (high.reshape(-1, 1) * wide)


def _to_first(views: Sequence[Tensor], largest: Tensor, grad: Tensor) -> list[Tensor]:
    """For each view, the gradient where it is the first that equals the largest."""
    rest, parts = grad, []
    for view in views[:-1]:
        part = (view == largest).to(grad.dtype) * rest
        rest = rest - part
        parts.append(part)
    return [*parts, rest]  # the last view takes what no earlier view took


def _turn(x: Tensor) -> Tensor:
    return x.transpose(-1, -2)


def _pad(x: Tensor, above: int, below: int, value: float) -> Tensor:
    if not (above or below):
        return x
    return cast("Tensor", aten.constant_pad_nd.default(x, [0, 0, above, below], value))


def _fit(x: Tensor, size: int, value: float) -> Tensor:
    """Drop rows at the end, or add rows of `value`, until there are `size`."""
    have = x.shape[-2]
    return x.narrow(-2, 0, size) if have > size else _pad(x, 0, size - have, value)


MAX_POOL_OPTIONS = ("dilation", "ceil_mode", "return_indices")  # in this order after the padding


def _pool3d(pool: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A pool of three axes by the one of two axes: first height and width, then depth; ties go the same way."""

    def pooled(x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *rest: Any, **named: Any) -> Tensor:  # noqa: ANN401
        each = [_three(value) for value in (kernel_size, stride or kernel_size, padding)]
        averages = pool is F.avg_pool2d
        names = ("ceil_mode", "count_include_pad", "divisor_override") if averages else MAX_POOL_OPTIONS
        told = dict(zip(names, rest, strict=False)) | named
        if told.pop("divisor_override", None) is not None or told.pop("return_indices", False):
            raise UnsupportedOperator("pool3d", "divisor_override and return_indices are not covered")
        dilation = _three(told.pop("dilation", 1))
        flat = x.flatten(0, -4)
        more = {} if averages else {"dilation": dilation[1:]}
        flat = pool(flat, *(value[1:] for value in each), **told, **more)
        size = flat.shape[-2:]
        more = {} if averages else {"dilation": (dilation[0], 1)}
        deep = pool(
            flat.flatten(2).unsqueeze(1),
            *((v[0], other) for v, other in zip(each, (1, 1, 0), strict=True)),
            **told,
            **more,
        )
        return deep.reshape([*x.shape[:-3], deep.shape[-2], *size])

    return pooled


def _three(value: Any) -> Sequence[int]:  # noqa: ANN401 - one number or three
    return (value,) * 3 if isinstance(value, int) else tuple(value) * (3 if len(value) == 1 else 1)


def adaptive_avg_pool3d(x: Tensor, output_size: Any) -> Tensor:  # noqa: ANN401 - one number or three, of which each may be None
    """The mean over height and width, then over depth."""
    depth, high, wide = _adaptive_sizes(x, output_size)
    flat = F.adaptive_avg_pool2d(x.flatten(0, -4), (high, wide))
    deep = F.adaptive_avg_pool2d(flat.flatten(2).unsqueeze(1), (depth, high * wide))
    return deep.reshape([*x.shape[:-3], depth, high, wide])


def adaptive_max_pool3d(x: Tensor, output_size: Any, return_indices: bool = False) -> Tensor:  # noqa: ANN401 - torch's
    """Equal windows."""
    kernel = _adaptive_kernel(x, _adaptive_sizes(x, output_size))
    return POOL_OVERRIDES[F.max_pool3d](x, kernel, return_indices=return_indices)  # type: ignore[no-any-return]


def _adaptive_sizes(x: Tensor, sizes: Any) -> list[int]:  # noqa: ANN401 - as above
    """The sizes of three axes, of which None stays as it is."""
    return [have if size is None else size for size, have in zip(_three(sizes), x.shape[-3:], strict=True)]


def lp_pool3d(x: Tensor, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Tensor:  # noqa: ANN401 - one number or three
    """Torch's formula on our pools: the root of the sum of a window's powers; the largest or least size at infinity."""
    if abs(norm_type) == INFINITY:
        sign = math.copysign(1, norm_type)
        found: Tensor = POOL_OVERRIDES[F.max_pool3d](sign * x.abs(), kernel_size, stride, 0, 1, ceil_mode)
        return sign * found
    mean = POOL_OVERRIDES[F.avg_pool3d](x.pow(norm_type), kernel_size, stride, 0, ceil_mode)
    total: Tensor = torch.sign(mean) * torch.relu(torch.abs(mean)) * math.prod(_three(kernel_size))
    return total.pow(1.0 / norm_type)


POOL_OVERRIDES: Mapping[Any, Callable[..., Any]] = {
    F.max_pool3d: _pool3d(F.max_pool2d),
    F.avg_pool3d: _pool3d(F.avg_pool2d),
    F.lp_pool3d: lp_pool3d,
    F.adaptive_avg_pool3d: adaptive_avg_pool3d,
    F.adaptive_max_pool3d: adaptive_max_pool3d,
}
POOL_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.max_pool2d_with_indices.default: max_pool2d,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
    aten.adaptive_max_pool2d.default: adaptive_max_pool2d,
    aten.adaptive_max_pool2d_backward.default: adaptive_max_pool2d_backward,
    aten.avg_pool2d.default: avg_pool2d,
    aten.avg_pool2d_backward.default: avg_pool2d_backward,
}
