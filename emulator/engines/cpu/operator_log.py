"""Which of torch's operators a function calls, as a graph: the function runs once, and each call is written down.

torch's own make_fx would do, but it imports torch._dynamo first, which takes longer than a small run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from export.data_attribute import ASSIGN, REPLACED, DataReplacedError, same_memory
from export.dispatch_mode import PlainDispatchMode
from export.own_thread import own_random

aten = torch.ops.aten
SHAPE = "shape"  # of a node's meta: that of its tensor
BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = (aten.index.Tensor, aten._unsafe_index.Tensor)  # noqa: SLF001 - torch's name
READERS = ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage")


class DependsOnValuesError(Exception):
    """What a function calls depends on the values of its tensors, so that no list of operators stands for it."""


def log_operators(function: Callable[..., Any], given: Sequence[Tensor]) -> fx.Graph:
    """The operators of `function(*given)`, forward and backward, one placeholder for each of `given`.

    `function` gets copies with the same strides, and returns tensors, None, or tuples of these. A node's meta "shape"
    is its tensor's. Tensors that the function has from elsewhere are constants. torch's random numbers go on as if it
    had not run. Raises DependsOnValuesError, DataReplacedError, and what the function raises.
    """
    log = _OperatorLog()
    with own_random():
        copies = [log.placeholder(tensor.detach().clone()) for tensor in given]
        with _NoReaders(), log:
            results = function(*copies)
    log.graph.output(pytree.tree_map_only(Tensor, log.node_of, results))
    return log.graph


class _OperatorLog(PlainDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook
    """Below autograd and vmap: sees the operators that are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self._nodes = WeakTensorKeyDictionary()

    def placeholder(self, tensor: Tensor) -> Tensor:
        self._keep(tensor, self.graph.placeholder(f"given_{len(self.graph.nodes)}"))
        return tensor

    def node_of(self, tensor: Tensor) -> fx.Node:
        """What made the tensor; for one from outside a call that returns it."""
        if tensor not in self._nodes:
            self._keep(tensor, self.graph.call_function(constant(tensor.detach())))
        node: fx.Node = self._nodes[tensor]
        return node

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operator returns
        given = dict(kwargs or {})
        with self:
            made = func.decompose(*args, **given)
        if made is not NotImplemented:
            return made
        if _depends_on_values(func, args):
            raise DependsOnValuesError(f"{func} depends on the values of a batch")
        called = func
        if func is aten.lift_fresh.default:  # numbers of the function's own, which it may overwrite
            self._keep(args[0], self.graph.call_function(constant(args[0].clone())))
            called = aten.lift_fresh_copy.default
        node = self.graph.call_function(called, *pytree.tree_map_only(Tensor, self.node_of, (args, given)))
        made = func(*args, **given)
        if isinstance(made, Tensor):
            self._keep(made, node)
        elif isinstance(made, tuple | list):
            for n, tensor in enumerate(made):
                if isinstance(tensor, Tensor):
                    self._keep(tensor, self.graph.call_function(operator.getitem, (node, n)))
        return made

    def _keep(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta[SHAPE] = tuple(tensor.shape)
        self._nodes[tensor] = node


class _NoReaders(TorchFunctionMode):
    """Values that leave torch are not in a list of its operators."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        name = getattr(func, "__name__", "")
        if name in READERS:
            raise DependsOnValuesError(f"{name}() takes the values of a batch out of torch")
        if func == ASSIGN and not same_memory(*args):
            raise DataReplacedError(REPLACED)
        return func(*args, **(kwargs or {}))


def _depends_on_values(func: OpOverload, args: Sequence[Any]) -> bool:
    """Integers as indices give a known shape, a mask does not."""
    if func not in INDEXING:
        return not BY_VALUE.isdisjoint(func.tags)
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def constant(value: Tensor) -> Callable[[], Tensor]:
    """A call that returns `value`, so that a graph needs no module around it."""

    def held() -> Tensor:
        return value

    return held
