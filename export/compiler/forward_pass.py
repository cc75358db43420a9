"""The first of two stages of tracing: a model's forward pass as a module of torch's plain operators.

torch.export runs the user's Python here, and nothing runs it later: a model that asks whether it is being traced sees
torch's own tensors and takes the branch that it has for this. The second stage (tracing.py) differentiates the exported
module, in which no branch is left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.export import Dim
from torch.nn.attention import SDPBackend, sdpa_kernel

from edge_client.errors import ProgramRefused
from export.compiler.decompositions.supported_ops import UnsupportedOperator
from export.compiler.forward_overrides import ForwardOverrides
from export.compiler.graph_passes.inplace_writes import without_writes
from export.compiler.graph_passes.one_level_down import OneLevelDown, OneLevelUp, has_taken_name
from export.compiler.graph_passes.vmap_levels import no_gradients, transforms_left, with_own_levels
from export.compiler.operator_watch import refuse_operator, refuse_untraceable
from export.compiler.own_functions.own_gradients import calls_as_operators, with_own_gradients
from export.compiler.program_functions import (
    TraceSource,
    changed_places,
    example_inputs,
    private_copy,
    with_complex_attributes,
)
from export.data_attribute import DetachedData
from export.diagnostics import quiet_warnings
from export.float64_mode import as_in, without_autocast
from export.own_thread import ONE_AT_A_TIME, own_random, replaced_here

MAX_BATCH = 65_536
PYTHON_CODE = fx.Graph.python_code


class ForwardPasses:
    """The exported forward passes of one source, each made when it is first asked for."""

    def __init__(self, source: TraceSource) -> None:
        self.source = source
        self._made: dict[tuple[bool, int | None], TraceSource | ProgramRefused] = {}

    def staged(self, *, training: bool, batch: int, dynamic: bool) -> TraceSource:
        """The source with the pass in training or evaluation mode as its module. Raises ProgramRefused.

        A pass for any batch size serves a fixed one, too; where there is none, the pass is for `batch` alone.
        """
        found = self._pass(training, batch, None)
        if isinstance(found, ProgramRefused) and not dynamic:
            found = self._pass(training, batch, batch)
        if isinstance(found, ProgramRefused):
            raise found
        return found

    def _pass(self, training: bool, batch: int, fixed: int | None) -> TraceSource | ProgramRefused:  # noqa: FBT001 - the key
        key = (training, fixed)
        if key not in self._made:
            try:
                module = _export(self.source, training=training, batch=batch, dynamic=fixed is None)
            except ProgramRefused as refused:
                self._made[key] = refused
            else:
                self._made[key] = replace(self.source, module=module)
        return self._made[key]


def _export(source: TraceSource, *, training: bool, batch: int, dynamic: bool) -> nn.Module:
    x = example_inputs(source, "infer", batch)[-1]
    module = source.module
    if any(value.is_complex() for value in source.constants.values()):
        module = with_complex_attributes(private_copy(module, source.dtype), source.dtype)
    lower = has_taken_name(module) or (training and bool(source.buffers) and bool(changed_places(source)[0]))
    module = OneLevelDown(module) if lower else module
    sizes: Any = {0: Dim("batch", min=1, max=MAX_BATCH)}
    if next(iter(signature(module.forward).parameters.values())).kind is Parameter.VAR_POSITIONAL:
        sizes = (sizes,)  # as torch.compile makes them
    shapes = (sizes,) if dynamic else None
    try:
        with (
            tracing_context(),
            calls_as_operators(),
            no_gradients(),
            own_random(),
            as_in(source.dtype),
        ):
            exported = torch.export.export(
                module.train(training),
                (x,),
                dynamic_shapes=shapes,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            made = with_own_gradients(without_writes(with_own_levels(exported.module(check_guards=False))))
            return OneLevelUp(made) if lower else made
    except UnsupportedOperator as refused:
        refuse_operator(source, refused.operator, refused.reason, refused)
    except Exception as wrong:  # noqa: BLE001 - torch raises many kinds for what it cannot trace
        refuse_untraceable(source, wrong)


@contextmanager
def uncompiled() -> Iterator[None]:
    """What torch.compile has wrapped is called as it was written, and compiled for none of the sizes that are tried.

    Torch's switches are as it begins, whatever the caller has set: gradients, without autocast and a search for NaN,
    and float32 on the CPU where a tensor names no dtype and device; the search and the dtype are those of all threads
    meanwhile. One thread at a time, as in `tracing_context`.
    """
    with ONE_AT_A_TIME, ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        if torch.is_autocast_enabled("cpu"):
            stack.callback(torch.set_autocast_enabled, "cpu", True)  # noqa: FBT003 - its value
            torch.set_autocast_enabled("cpu", False)  # noqa: FBT003
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if (usual := torch.get_default_dtype()) is not torch.float32:
            stack.callback(torch.set_default_dtype, usual)
            torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if "torch._dynamo" in sys.modules:  # which torch.compile loads
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def tracing_context() -> Iterator[None]:
    """Without what arrives in a graph as one opaque operator: attention, LSTM and GRU.

    And without a backend of convolutions that torch takes from 16 samples: it would note a limit of the batch size.
    Distributions do not check the values of their arguments, which they do by default. einsum multiplies from left to
    right, for a search of a better order takes the batch size for a plain number. One thread at a time.
    """
    with ONE_AT_A_TIME, ExitStack() as stack:
        stack.enter_context(transforms_left())
        stack.enter_context(quiet_warnings())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(torch.backends.nnpack.flags(enabled=False))
        if torch.backends.opt_einsum.enabled:  # where it is off, torch cannot put its strategy back
            stack.enter_context(torch.backends.opt_einsum.flags(enabled=False))
        stack.enter_context(patch.object(torch.distributions.Distribution, "_validate_args", False))  # noqa: FBT003 - its value
        stack.enter_context(without_autocast())
        stack.enter_context(replaced_here(nn.modules.transformer, "_detect_is_causal_mask", _told_causal))
        before = sys.exc_info()[1]  # the caller may be in an `except` of its own
        stack.enter_context(replaced_here(fx.Graph, "python_code", partial(_text_unless_failed, before)))
        stack.enter_context(DetachedData(traced=True))
        stack.enter_context(ForwardOverrides())
        yield


def _told_causal(_mask: object, is_causal: bool | None = None, _size: object = None) -> bool:  # noqa: FBT001 - torch's
    """Only what the user says: torch's encoder and decoder look at the mask's values, for a kernel of their own."""
    return is_causal is True


def _text_unless_failed(
    before: BaseException | None,
    graph: fx.Graph,
    *args: Any,  # noqa: ANN401 - torch's
    verbose: bool = False,
    **named: Any,  # noqa: ANN401 - torch's
) -> Any:  # noqa: ANN401 - torch's
    """A graph as Python, but not the one that torch writes to stderr where a pass depends on values.

    Our modes would add nodes to that graph while it is written, in float64 without end.
    """
    if verbose and (wrong := sys.exc_info()[1]) is not None and wrong is not before:
        raise wrong
    return PYTHON_CODE(graph, *args, verbose=verbose, **named)
