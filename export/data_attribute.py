"""`x.data` in a user's forward: what torch's tracer, and its count of writes into a tensor, do not see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

READ, ASSIGN = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]  # torch's descriptor


class DetachedData(TorchFunctionMode):
    """In it `x.data` is `x.detach()`, of the same memory; `assigned` are the tensors whose `.data` was replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.assigned: list[Tensor] = []

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        if func == ASSIGN:
            if _same_memory(*args):  # `x.data += y` ends so
                return None
            self.assigned.append(args[0])
        return torch.detach(args[0]) if func == READ else func(*args, **(kwargs or {}))


def _same_memory(one: Tensor, other: Tensor) -> bool:
    alias: bool = torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]  # noqa: SLF001 - no public name
    return alias and one.shape == other.shape and one.stride() == other.stride()
