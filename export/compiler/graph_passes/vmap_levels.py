"""Calls of torch.vmap in an exported forward pass, for a second stage that adds transforms of its own around them.

torch.export writes a call of vmap as plain nodes: one more level of nesting, operators over tensors of this level, one
level less. The level is a number, that of the export. The second stage runs the same nodes within `functionalize` and
`grad`, where the level is another one: torch then fails, and leaves its stack of transforms as it was at that place, so
that nothing else in the process can be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._C._functorch import get_dynamic_layer_stack_depth, pop_dynamic_layer_stack_and_undo_to_depth
from torch.fx import GraphModule, Node

from export.compiler.decompositions.supported_ops import UnsupportedOperator
from export.own_thread import replaced_here

ENTERS, LEAVES = "_vmap_increment_nesting", "_vmap_decrement_nesting"  # of torch._functorch.predispatch
LEVEL_AT = {"_add_batch_dim": 2, "_remove_batch_dim": 1}  # which argument is the level


def with_own_levels(module: GraphModule) -> GraphModule:
    """The module, changed: each node takes the level that its own vmap gives when it runs."""
    entered = list[Node]()
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == ENTERS:
            entered.append(node)
        elif name == LEAVES:
            entered.pop()
        elif name in LEVEL_AT:
            node.update_arg(LEVEL_AT[name], entered[-1])
    module.recompile()
    return module


@contextmanager
def transforms_left() -> Iterator[None]:
    """Leave, at the end, every transform of torch.func that was entered and that an exception kept open."""
    depth = get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if get_dynamic_layer_stack_depth() > depth:
            pop_dynamic_layer_stack_and_undo_to_depth(depth)


@contextmanager
def no_gradients() -> Iterator[None]:
    """Where torch would give an unclear reason later, raise UnsupportedOperator for a gradient in forward."""

    def refused(name: str) -> Callable[..., None]:
        def refuse(*_: object, **__: object) -> None:
            raise UnsupportedOperator(name, "a gradient in forward is not covered")

        return refuse

    functions = replaced_here(torch._functorch.eager_transforms, "grad_increment_nesting", refused("torch.func"))  # noqa: SLF001
    with functions, replaced_here(torch.autograd, "_engine_run_backward", refused("torch.autograd.grad")):
        yield
