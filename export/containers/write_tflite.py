"""Write graphs as one TFLite file with a signature per function and a fixed batch, and run such a file.

Inputs and outputs have positional names: args_0..., output_0... in the order of program.json.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import getitem
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from edge_client.protocol.task import Array
from export.silence import suppress_output

AXES_OF_CONV1D = 3  # samples, channels, places


def to_tflite(signatures: Mapping[str, tuple[nn.Module, Sequence[Tensor]]]) -> bytes:
    """Signature name -> (module over flat tensors, example arguments of the fixed shapes) -> one file."""
    with suppress_output():
        builder = _converter()
        for name, (module, args) in signatures.items():
            builder = builder.signature(name, module, tuple(args))
        with _no_needless_trace():
            return bytes(builder.convert().model_content())


def _no_needless_trace() -> AbstractContextManager[object]:
    """Without the converter's first trace of graphs in which it would decompose nothing but convolutions of one axis.

    The graphs of `trace_function` are made of core operators already.
    """
    from litert_torch import fx_infra

    decompose, conv = fx_infra.safe_run_decompositions, torch.ops.aten.convolution.default

    def decompose_if_needed(exported: ExportedProgram, table: Any = None, can_skip: bool = True) -> ExportedProgram:  # noqa: ANN401, FBT001, FBT002 - litert-torch's own
        calls = [node for node in exported.graph.nodes if node.op == "call_function"]
        flat = [node for node in calls if node.target == conv and node.args[0].meta["val"].dim() == AXES_OF_CONV1D]
        known = all(isinstance(node.target, torch._ops.OpOverload) or node.target is getitem for node in calls)  # noqa: SLF001 - no public name
        if table and known and not flat and not any(node.target in table for node in calls if node.target != conv):
            return exported
        decomposed: ExportedProgram = decompose(exported, table, can_skip)
        return decomposed

    return patch.object(fx_infra, "safe_run_decompositions", decompose_if_needed)


def to_named_tflite(module: nn.Module, sample: Mapping[str, Tensor]) -> bytes:
    """One signature, "serving_default", with the names of `sample` and of the returned dict, for any TFLite runtime."""
    with suppress_output():
        made = _converter().signature("serving_default", module, sample_kwargs=dict(sample)).convert()
        return bytes(made.model_content())


def _converter() -> Any:  # noqa: ANN401 - the package has no types
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read once, when the converter's library is loaded
    import litert_torch

    litert_torch.config.show_progress = False
    return litert_torch


def open_tflite(file: bytes, signature: str) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """A function over the file's own names, one thread."""
    from ai_edge_litert.interpreter import Interpreter

    with suppress_output():
        interpreter = Interpreter(model_content=file, num_threads=1)
        interpreter.allocate_tensors()  # within suppress_output, as it prints a line
        runner = interpreter.get_signature_runner(signature)
    return lambda feeds: {name: np.asarray(value) for name, value in runner(**feeds).items()}
