"""A network of functions whose gradient is their own, as quantizers and domain adversaries have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from coordinator.models.registry import ModelEntry


class StraightThrough(Function):
    """Rounded to steps of 1 / `levels`; the gradient passes where the value is within [-2, 2]."""

    @staticmethod
    def forward(x: Tensor, levels: int = 4) -> Tensor:
        steps = (x * levels).round()
        return steps / levels

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401 - torch's own
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 2), None


class Reversed(Function):
    """The same values; the gradient turns round and is clipped, so that it is no linear function."""

    @staticmethod
    def forward(ctx: Any, scale: float, x: Tensor) -> Tensor:  # noqa: ANN401
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # noqa: ANN401
        return None, (-ctx.scale * grad).clamp(-0.05, 0.05)


class RunningSums(Function):
    """Sums along the second axis and their squares, written into a copy; reversed sums are the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        sums = x.clone()
        for i in range(1, x.shape[1]):
            sums[:, i].add_(sums[:, i - 1])
        ctx.save_for_backward(sums)
        return sums, sums.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, squares: Tensor) -> Tensor:  # noqa: ANN401
        (sums,) = ctx.saved_tensors
        out: Tensor = grad + 2 * sums * squares
        for i in range(out.shape[1] - 2, -1, -1):
            out[:, i] += out[:, i + 1]
        return out


rounded: Any = StraightThrough.apply
reverse: Any = Reversed.apply
running_sums: Any = RunningSums.apply


class OwnGradients(nn.Module):
    """Each of them between two layers, in training and in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = rounded(2 * self.body(x))
        h = self.middle(reverse(0.3, torch.tanh(h)))
        return self.head(torch.cat(running_sums(h), 1))  # type: ignore[no-any-return]


ENTRIES = {"own-gradients": ModelEntry(make=OwnGradients, input=(5,), classes=3)}
