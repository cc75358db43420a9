"""Convolutions of stacked clients as matrix products, since cuDNN runs a grouped convolution one group after the other.

Inside torch.func.vmap a convolution with a weight for each client becomes one with a group for each client. As products
of windows and weights all clients are one batched matrix product (BENCHMARKS.md, "How fast is a GPU?").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's custom
from torch.overrides import TorchFunctionMode

Ints = Sequence[int]
Cut = tuple[int, int, int, int]  # the height and width of a window, the steps down and right


class ProductConvolutions(TorchFunctionMode):
    """A context in which torch.conv2d is `conv2d_by_products` where that can be: zero padding, no groups, no dilation.

    Enter it outside of torch.func's transforms: the calls within see the tensors of one client.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what func returns
        if func is torch.conv2d and (found := _by_products(*args, **(kwargs or {}))) is not None:
            return found
        return func(*args, **(kwargs or {}))


def conv2d_by_products(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Ints, padding: Ints) -> Tensor:
    """torch.conv2d: x [n, c, h, w], weight [o, c, i, j], bias [o] -> [n, o, h', w'], up to rounding.

    The windows take i times j as much memory as the padded input.
    """
    (down, right), (above, left) = stride, padding
    kernel = weight.shape[-2:]
    windows = _windows(F.pad(x, (left, left, above, above)), (kernel[0], kernel[1], down, right))
    n, _, height, width = windows.shape[:4]
    columns = windows.permute(1, 4, 5, 0, 2, 3).reshape(-1, n * height * width)
    out = (weight.reshape(len(weight), -1) @ columns).view(len(weight), n, height, width).transpose(0, 1)
    return out if bias is None else out + bias[:, None, None]


class _Windows(torch.autograd.Function):
    """Windows [n, c, h', w', i, j] of x [n, c, h, w]; `cut` is i, j and the strides.

    torch 2.13 stacks the gradient of its own windows one client after the other.
    """

    @staticmethod
    def forward(x: Tensor, cut: Cut) -> Tensor:
        found: Tensor = x.unfold(2, cut[0], cut[2]).unfold(3, cut[1], cut[3])
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Cut], output: Tensor) -> None:  # noqa: ANN401, ARG004 - torch's
        ctx.shape, ctx.cut = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - torch's
        return _overlaid(gradient, tuple(ctx.shape[2:]), ctx.cut), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], x: Tensor, cut: Cut) -> tuple[Tensor, int]:  # noqa: ANN401, ARG004
        """A window is of one sample, so clients are more samples."""
        clients = x.movedim(in_dims[0] or 0, 0)
        return torch.unflatten(_windows(clients.flatten(0, 1), cut), 0, clients.shape[:2]), 0


class _Overlaid(torch.autograd.Function):
    """The sum of windows where they came from: the gradient of `_Windows`, and the other way round."""

    @staticmethod
    def forward(windows: Tensor, size: tuple[int, int], cut: Cut) -> Tensor:
        n, c, height, _, _, _ = windows.shape
        rows = torch.ops.aten.unfold_backward(windows, [n, c, height, size[1], cut[0]], 3, cut[1], cut[3])
        found: Tensor = torch.ops.aten.unfold_backward(rows, [n, c, *size], 2, cut[0], cut[2])
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[int, int], Cut], output: Tensor) -> None:  # noqa: ANN401, ARG004
        ctx.cut = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 - torch's
        return _windows(gradient, ctx.cut), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, windows: Tensor, size: tuple[int, int], cut: Cut) -> tuple[Tensor, int]:  # noqa: ANN401, ARG004
        clients = windows.movedim(in_dims[0], 0)
        return torch.unflatten(_overlaid(clients.flatten(0, 1), size, cut), 0, clients.shape[:2]), 0


# torch does not type `apply`
_windows: Callable[..., Tensor] = _Windows.apply
_overlaid: Callable[..., Tensor] = _Overlaid.apply


def _by_products(  # noqa: PLR0913, PLR0917 - torch.conv2d's arguments
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Ints = 1,
    padding: str | int | Ints = 0,
    dilation: int | Ints = 1,
    groups: int = 1,
) -> Tensor | None:
    if input.dim() != 4 or isinstance(padding, str) or groups != 1 or set(_pair(dilation)) != {1}:  # noqa: PLR2004 - NCHW
        return None
    return conv2d_by_products(input, weight, bias, _pair(stride), _pair(padding))


def _pair(value: int | Ints) -> Ints:
    return (value, value) if isinstance(value, int) else value
