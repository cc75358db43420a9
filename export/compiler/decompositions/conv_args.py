"""The arguments of a convolution after its tensors, as `aten.convolution` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ConvArgs:
    """Each tuple holds one number per spatial dimension; an empty `output_padding` stands for zeros."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    groups: int = 1

    @classmethod
    def from_aten(
        cls,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,  # noqa: FBT001 - torch's own order
        output_padding: Sequence[int],
        groups: int,
    ) -> ConvArgs:
        """The arguments in the order in which an operator's call has them; a single number is that of every axis."""
        axes = max(map(len, (stride, padding, dilation, output_padding)))
        each = [
            tuple(given) * (axes if len(given) == 1 else 1) for given in (stride, padding, dilation, output_padding)
        ]
        return cls(
            stride=each[0],
            padding=each[1],
            dilation=each[2],
            transposed=transposed,
            output_padding=each[3],
            groups=groups,
        )

    @property
    def zeros(self) -> tuple[int, ...]:
        return (0,) * len(self.stride)

    @property
    def ones(self) -> tuple[int, ...]:
        return (1,) * len(self.stride)

    @property
    def has_one_line(self) -> bool:
        """Of one dimension and one group, not transposed: as an image of one line it can be matrix products."""
        return len(self.stride) == 1 == self.groups and not self.transposed

    @property
    def as_image(self) -> ConvArgs:
        """Of x [batch, in, 1, size] and weight [out, in, 1, kernel], for one of a single dimension."""
        return replace(
            self, stride=(1, *self.stride), padding=(0, *self.padding), dilation=(1, *self.dilation), output_padding=()
        )

    def to_aten(self) -> tuple[Sequence[int] | bool | int, ...]:
        """The arguments in the order in which an operator's call has them."""
        more = self.output_padding or self.zeros
        return self.stride, self.padding, self.dilation, self.transposed, more, self.groups

    def apply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The operator itself, without a bias: x [batch, in, *size] -> [batch, out, *out_size]."""
        return cast("Tensor", torch.ops.aten.convolution.default(x, weight, None, *self.to_aten()))


def add_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    """`out` [batch, channels, *size] plus `bias` [channels], if there is one."""
    return out if bias is None else out + bias.reshape([-1, *[1] * (out.dim() - 2)])
