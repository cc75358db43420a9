"""Write graphs as one TFLite file with a signature per function and a fixed batch, and run such a file.

Inputs and outputs have positional names: args_0..., output_0... in the order of program.json.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor, nn
from torch.export import ExportedProgram

from edge_client.protocol.task import Array
from export.containers.expand_nodes import expand_nodes
from export.containers.flat_graph import FlatGraph, exported_as_it_is
from export.containers.moved_broadcasts import move_axes_before_broadcasts
from export.containers.padded_volumes import pad_volumes_first
from export.containers.quick_lowering import quick_lowering
from export.silence import suppress_output


def to_tflite(signatures: Mapping[str, tuple[FlatGraph, Sequence[Tensor]]]) -> bytes:
    """Signature name -> (graph over flat tensors, example arguments of the fixed shapes) -> one file."""
    with suppress_output():
        builder = _converter()
        for name, (graph, args) in signatures.items():
            builder = builder.signature(name, graph, tuple(args))
        with _quick_decompositions(), _our_exports(), quick_lowering():
            return bytes(builder.convert().model_content())


@contextmanager
def _quick_decompositions() -> Iterator[None]:
    """With `expand_nodes` in the place of the converter's decompositions, where it is enough.

    The converter copies both of its tables for each function, and a copy begins with all of torch's: here they are
    plain dicts meanwhile.
    """
    from litert_torch import fx_infra
    from litert_torch.fx_infra import _safe_run_decompositions as room
    from litert_torch.fx_infra import decomp

    decompose = room.safe_run_decompositions

    def expand(exported: ExportedProgram, table: Any = None, can_skip: bool = True) -> ExportedProgram:  # noqa: ANN401, FBT001, FBT002 - litert-torch's own
        if table is not None and expand_nodes(exported, table):
            return exported
        decomposed: ExportedProgram = decompose(exported, table, can_skip)
        return decomposed

    with (
        patch.object(room, "safe_run_decompositions", expand),
        patch.object(fx_infra, "safe_run_decompositions", expand),
        patch.object(decomp, "_pre_convert_decomp", decomp.pre_convert_decomp().materialize()),
        patch.object(decomp, "_pre_lower_decomp", decomp.pre_lower_decomp().materialize()),
    ):
        yield


def _our_exports() -> AbstractContextManager[object]:
    """Without torch.export's trace of a graph that is one of operators already, and with what it can convert."""
    from litert_torch import fx_infra
    from litert_torch._convert import core

    export = core.export_torch_signature

    def take(signature: Any, *args: Any, **kwargs: Any) -> ExportedProgram:  # noqa: ANN401 - litert-torch's own
        graph = signature.module
        exported = exported_as_it_is(graph, signature.args) if isinstance(graph, FlatGraph) else None
        made: ExportedProgram = (
            export(signature, *args, **kwargs)
            if exported is None
            else fx_infra.safe_run_decompositions(exported, fx_infra.decomp.pre_convert_decomp())
        )
        move_axes_before_broadcasts(made)
        pad_volumes_first(made)
        return made

    return patch.object(core, "export_torch_signature", take)


def to_named_tflite(module: nn.Module, sample: Mapping[str, Tensor]) -> bytes:
    """One signature, "serving_default", with the names of `sample` and of the returned dict, for any TFLite runtime."""
    with suppress_output():
        builder = _converter().signature("serving_default", module, sample_kwargs=dict(sample))
        with _quick_decompositions(), _our_exports(), quick_lowering():
            return bytes(builder.convert().model_content())


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
