"""A user's code in float64, though it names float32, makes such tensors or holds some outside of its parameters.

And in float32 though it asks for half precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from export.own_thread import replaced_here


@contextmanager
def without_autocast() -> Iterator[None]:
    """`torch.autocast` in a user's code does nothing in this thread: no runtime trains in half precision."""
    with (
        replaced_here(torch.autocast, "__enter__", lambda self: self),
        replaced_here(torch.autocast, "__exit__", lambda *_: None),
    ):
        yield


WIDER_CALLS = {Tensor.float: Tensor.double}
MADE = (torch.zeros, torch.ones, torch.empty, torch.eye)  # in float32 where no dtype is named
WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Float64Mode(TorchFunctionMode):
    """In it `x.float()`, `torch.zeros(n)` and a function's own float32 constants meet torch's calls as float64.

    A module moved by `to(torch.float64)` leaves these as they are, and a product of the two widths is an error.
    """

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        if func is Tensor.__deepcopy__:  # its argument is all that was copied before
            return func(*args, **(kwargs or {}))  # type: ignore[no-untyped-call]  # torch's own
        given, named = tree_map(_widened, (args, kwargs or {}), is_leaf=_is_size)
        if func in MADE:
            named = {"dtype": torch.float64} | named
        return tree_map(_widened, WIDER_CALLS.get(func, func)(*given, **named), is_leaf=_is_size)


def as_in(dtype: str) -> AbstractContextManager[object]:
    """Where a user's code runs for a program of this dtype, without being compared or trained."""
    return Float64Mode() if dtype == "float64" else nullcontext()


def _is_size(value: object) -> bool:
    """A torch.Size, which must not become a tuple: `x.new(size)` has that size, and `x.new((2, 3))` these numbers."""
    return isinstance(value, torch.Size)


def _widened(value: Any) -> Any:  # noqa: ANN401 - anything that torch takes and gives
    if isinstance(value, Tensor):
        return value.to(WIDER[value.dtype]) if value.dtype in WIDER else value
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value
