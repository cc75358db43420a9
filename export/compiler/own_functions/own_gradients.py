"""Calls of the user's own torch.autograd.Function in a forward pass, with their own `backward`.

torch.export runs such a function's `forward` and forgets its `backward`: a straight-through estimator would have no
gradient. So each call is one operator of the exported graph, and then a small module that torch.func differentiates:
the second stage traces the user's `forward` and `backward` into plain operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction
from torch.fx import GraphModule

from export.compiler.decompositions.supported_ops import UnsupportedOperator
from export.compiler.forward_overrides import ForwardOverrides

APPLY = Function.__dict__["apply"]
LIBRARY: Any = torch.library.Library("fedcenters", "DEF")  # type: ignore[no-untyped-call]  # torch's
LIBRARY.define("own_function(Tensor[] inputs, int number) -> Tensor[]")
OPERATOR = torch.ops.fedcenters.own_function.default
NUMBERS = count()


class KeptValues:
    """What `forward` leaves for `backward`, in place of autograd's context; functions add attributes of their own."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(x, Tensor) and x.is_floating_point() for x in arguments)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *_: object) -> None: ...

    def mark_non_differentiable(self, *_: object) -> None: ...

    def set_materialize_grads(self, _value: bool) -> None: ...  # noqa: FBT001 - torch's own; gradients are never None

    def mark_dirty(self, *_: object) -> None:
        raise UnsupportedOperator("mark_dirty", "an autograd.Function that writes into its inputs is not covered")


class OwnCall:
    """One call of a function, without its tensors."""

    def __init__(self, function: Any, arguments: Sequence[Any]) -> None:  # noqa: ANN401 - a class of Function
        self.function = function
        self.places = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
        self.others = [None if isinstance(x, Tensor) else x for x in arguments]
        self.single = True  # whether it gives one tensor and no tuple; `forward` finds out

    def forward(self, kept: KeptValues, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The function's outputs, and what it keeps."""
        with _inner_calls(_forward_only):
            out = _forward_of(self.function, kept, self.arguments(tensors))
        self.single = isinstance(out, Tensor)
        outs = [out] if self.single else list(out)
        if not all(isinstance(x, Tensor) for x in outs):
            raise UnsupportedOperator(self.function.__name__, "it gives something else than tensors")
        return [x.clone() for x in outs]  # an operator gives no views of its inputs

    def backward(self, kept: KeptValues, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The function's own gradients of its tensors.

        torch leaves a mode while it calls `torch.autograd.grad` within it, so what is replaced is replaced again.
        """
        with ForwardOverrides(), _inner_calls(_forward_only):
            found = inspect.unwrap(self.function.backward)(kept, *grads)  # without once_differentiable
        return tuple((found if isinstance(found, tuple) else (found,))[i] for i in self.places)

    def arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Those of the call, with these tensors."""
        out = list(self.others)
        for place, value in zip(self.places, tensors, strict=True):
            out[place] = value
        return out


class OwnFunction(nn.Module):
    """The call as a module: it takes a list of tensors and gives one."""

    def __init__(self, call: OwnCall) -> None:
        super().__init__()
        self.call = call

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        call, kept = self.call, KeptValues(self.call.arguments(tensors))

        class Differentiable(Function):
            """In the form that torch.func knows; once for each call, as `kept` is."""

            @staticmethod
            def forward(*given: Tensor) -> tuple[Tensor, ...]:
                return tuple(call.forward(kept, given))

            @staticmethod
            def setup_context(*_: object) -> None: ...

            @staticmethod
            def backward(_ctx: object, *grads: Tensor) -> tuple[Tensor | None, ...]:
                return call.backward(kept, grads)

        # torch has no such rule for functionalize, which takes the operators of `forward` one by one
        with patch.dict(custom_function_call.functorch_table, {TransformType.Functionalize: _plainly}):
            return list(Differentiable.apply(*tensors))  # type: ignore[no-untyped-call]


CALLS: dict[int, OwnCall] = {}  # of the pass that is exported now


@contextmanager
def calls_as_operators() -> Iterator[None]:
    """While a forward pass is exported, and until `with_own_gradients` has its graph."""
    try:
        with patch.object(_SingleLevelFunction, "apply", classmethod(_as_operator), create=True):
            yield  # which `Function.apply` calls, also where a library keeps it under another name
    finally:
        CALLS.clear()


def with_own_gradients(module: GraphModule) -> GraphModule:
    """The module, changed: each operator is the function again."""
    for node in [node for node in module.graph.nodes if node.target is OPERATOR]:
        tensors, number = node.args
        name = f"own_function_{number}"
        module.add_submodule(name, OwnFunction(CALLS[number]))
        node.op, node.target, node.args = "call_module", name, (tensors,)
    module.recompile()
    return module


def _as_operator(cls: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401 - torch's own
    """Within `Function.apply`. torch's own functions stay."""
    if cls.__module__.startswith("torch."):
        return _torchs_own(cls, *args, **named)
    arguments = _bound(cls, args, named)
    number, call = next(NUMBERS), OwnCall(cls, arguments)
    CALLS[number] = call
    outs = OPERATOR([x for x in arguments if isinstance(x, Tensor)], number)
    return outs[0] if call.single else tuple(outs)


def _bound(cls: Any, args: Sequence[Any], named: dict[str, Any]) -> Sequence[Any]:  # noqa: ANN401
    """Every argument by its place; only functions with `setup_context` take named ones and defaults."""
    if not _has_setup(cls):
        return args
    bound = inspect.signature(cls.forward).bind(*args, **named)
    bound.apply_defaults()
    return bound.args


def _has_setup(cls: Any) -> bool:  # noqa: ANN401
    """Whether the function has torch's newer form, in which `forward` takes no context."""
    return cls.setup_context is not _SingleLevelFunction.setup_context


@contextmanager
def _inner_calls(apply: Callable[..., Any], active: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Functions are called by `apply`, also where their own one was bound before: with no transform it asks here."""
    with (
        patch("torch._C._are_functorch_transforms_active", active),
        patch.object(_SingleLevelFunction, "apply", classmethod(apply), create=True),
    ):
        yield


def _torchs_own(cls: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401
    return super(_SingleLevelFunction, cls).apply(*args, **named)


def _forward_only(cls: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401
    """A function within another one's forward or backward, where no gradient is taken."""
    if cls.__module__.startswith("torch."):
        with _inner_calls(_torchs_own, transforms_are_active):
            return APPLY.__get__(None, cls)(*args, **named)
    arguments = _bound(cls, args, named)
    return _forward_of(cls, KeptValues(arguments), arguments)


def _forward_of(cls: Any, kept: KeptValues, arguments: Sequence[Any]) -> Any:  # noqa: ANN401
    if not _has_setup(cls):
        return cls.forward(kept, *arguments)
    out = cls.forward(*arguments)
    cls.setup_context(kept, tuple(arguments), out)
    return out


def _plainly(_interpreter: object, function: Any, *given: Tensor) -> Any:  # noqa: ANN401
    return function.forward(*given)


@torch.library.register_fake("fedcenters::own_function", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _shapes(inputs: Sequence[Tensor], number: int) -> list[Tensor]:
    call = CALLS[number]
    return call.forward(KeptValues(call.arguments(inputs)), inputs)
