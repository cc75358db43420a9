"""`x.data` in a user's forward: what torch's tracer, and its count of writes into a tensor, do not see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

READ, ASSIGN = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]  # torch's descriptor
REPLACED = "a tensor gets another `.data`, which no graph holds: write into it, as x.data.copy_(new), or make a new one"


class DataReplacedError(RuntimeError):
    """A forward gives a tensor other memory, unseen by what writes its operators down."""


class DetachedData(TorchFunctionMode):
    """In it `x.data` is `x.detach()`, of the same memory. Where it is `traced`, no tensor may get another `.data`."""

    def __init__(self, *, traced: bool = False) -> None:
        super().__init__()
        self._traced = traced

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        if func == ASSIGN and same_memory(*args):  # `x.data += y` ends so
            return None
        if func == ASSIGN and self._traced:
            raise DataReplacedError(REPLACED)
        return torch.detach(args[0]) if func == READ else func(*args, **(kwargs or {}))


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether they are one tensor's numbers, in the same order."""
    return shares_memory(one, other) and one.shape == other.shape and one.stride() == other.stride()


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether one of them is a view of the other, or both of a third."""
    return torch._C._is_alias_of(one, other)  # type: ignore[attr-defined,no-any-return]  # noqa: SLF001 - no public name
