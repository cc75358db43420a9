"""Write centers as self-contained files: input "x", output "logits", weights inside.

ONNX and pt2 take any batch size, TFLite one sample at a time. Any torch module can be written. A center of a bundle
is its program's own `infer` graph with the center's weights (`load_infer_module`), so the model's code is not needed.
A stacked file holds several centers and has the input "center" [1] int32 before "x".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from edge_client.engines.pt2 import read_exported, refuse_code
from edge_client.errors import ProgramRefused, UsageError
from edge_client.protocol.codecs import decode_frozen
from edge_client.protocol.program import FROZEN, Program
from edge_client.protocol.task import Array, Flat, Schema
from export.compiler.forward_pass import MAX_BATCH
from export.containers.quick_conversion import quick_conversion
from export.containers.write_onnx import onnx_bytes, to_onnx
from export.containers.write_pt2 import to_pt2
from export.containers.write_tflite import to_named_tflite
from export.diagnostics import converter_missing, quiet_warnings, raise_for_machine
from export.silence import suppress_output

FILE_FORMATS = ("onnx", "tflite", "pt2")
EXAMPLE_BATCH = 2


def export_center(module: nn.Module, sample_shape: Sequence[int], fmt: str) -> bytes:
    """The module in inference mode, for samples of `sample_shape` (without batch), dtype float32."""
    return _export_file(module.eval(), (), sample_shape, fmt)


def export_stacked(
    infer: bytes, schema: Schema, centers: Flat, sample_shape: Sequence[int], fmt: str, frozen: Sequence[Array] = ()
) -> bytes:
    """All `centers` [K, schema.size] in one file, over a program's `infer` container (.pt2) and its frozen tensors."""
    stacked = _Stacked(infer, schema, centers, frozen)
    return _export_file(stacked, (torch.zeros(1, dtype=torch.int32),), sample_shape, fmt)


def frozen_tensors(program: Program, files: Mapping[str, bytes]) -> dict[str, Array]:
    """The frozen parameters by name, from the files by hash; none where the program's containers take none."""
    held = next((containers[FROZEN] for containers in program.containers.values() if FROZEN in containers), None)
    if held is None or program.frozen is None:
        return {}
    return decode_frozen(files[held.sha256], program.frozen, program.dtype)


def _export_file(module: nn.Module, first: tuple[Tensor, ...], sample_shape: Sequence[int], fmt: str) -> bytes:
    """`module`(*first, x) as a file; `first` are example inputs of fixed shapes that come before x."""
    if fmt not in FILE_FORMATS:
        raise UsageError(f"unknown format {fmt!r}", hint=f"use one of {', '.join(FILE_FORMATS)}")
    names = ("center", "x") if first else ("x",)
    try:
        with quick_conversion():
            if fmt == "tflite":
                given = dict(zip(names, (*first, torch.zeros(1, *sample_shape)), strict=True))
                return to_named_tflite((_NamedStack if first else _Named)(module), given)
            made = _any_batch(module, (*first, torch.zeros(EXAMPLE_BATCH, *sample_shape)))
            return to_pt2(made) if fmt == "pt2" else name_batch_dimension(to_onnx(made, names, ["logits"]))
    except ImportError as wrong:
        raise converter_missing(wrong) from wrong
    except Exception as wrong:  # exporters raise many kinds; what they cannot convert is a refusal
        text = raise_for_machine(wrong)
        raise ProgramRefused(f"this model cannot be written as {fmt}: {text}", hint="use another format") from wrong


def _any_batch(module: nn.Module, example: tuple[Tensor, ...]) -> ExportedProgram:
    """Only the last input, x, has a batch."""
    dims = (*[None] * (len(example) - 1), {0: Dim("batch", min=1, max=MAX_BATCH)})
    with quiet_warnings():
        return torch.export.export(module, example, dynamic_shapes=dims, strict=False)


def name_batch_dimension(file: bytes) -> bytes:
    """The same ONNX file with the first dimension of `x`, and all dimensions that follow from it, named "batch"."""
    import onnx

    proto = onnx.load_model_from_string(file)
    drawn = next(port for port in proto.graph.input if port.name == "x").type.tensor_type.shape.dim[0].dim_param
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if drawn and drawn in dim.dim_param:
                dim.dim_param = dim.dim_param.replace(drawn, "batch")
    return onnx_bytes(proto)


def with_metadata(file: bytes, facts: Mapping[str, Any]) -> bytes:
    """The same ONNX file with each fact as JSON in its `metadata_props`; equal facts give equal bytes."""
    import onnx

    proto = onnx.load_model_from_string(file)
    onnx.helper.set_model_props(proto, {key: json.dumps(facts[key]) for key in sorted(facts)})
    return onnx_bytes(proto)


def load_infer_module(
    infer: bytes, schema: Schema, vector: Flat, told: str = "", *, frozen: Sequence[Array] = ()
) -> nn.Module:
    """A program's `infer` container (.pt2) with the weights [schema.size] put in: x [batch, ...] -> logits.

    `told`: what the module shows itself as; `frozen`: the program's frozen tensors.
    """
    tensors = [torch.from_numpy(np.array(value)) for value in schema.split(vector).values()]
    return _Center(_infer_graph(infer), tensors, _tensors(frozen), told)


@lru_cache(maxsize=1)
def _infer_graph(infer: bytes) -> nn.Module:
    """The graph of an `infer` container. It has no state, so one is read for all centers of a program."""
    refuse_code(infer, "the graph of the centers")
    with suppress_output():
        return read_exported(infer).module(check_guards=False)  # type: ignore[no-any-return]


def _tensors(arrays: Sequence[Array]) -> list[Tensor]:
    return [torch.from_numpy(np.array(value)) for value in arrays]


class _Center(nn.Module):
    """A graph over flat tensors: the center's weights, x, and what is frozen."""

    def __init__(self, graph: nn.Module, tensors: Sequence[Tensor], frozen: Sequence[Tensor], told: str) -> None:
        super().__init__()
        self._told = told
        self._call = (graph,)  # in a tuple: an exported graph refuses eval(), so it is no child of ours
        for i, tensor in enumerate(tensors):
            self.register_buffer(f"t{i}", tensor)
        self._count = len(tensors)
        _hold(self, frozen)
        self.eval()

    def __repr__(self) -> str:
        return f"Center({self._told})"

    def forward(self, x: Tensor) -> Tensor:
        (logits,) = self._call[0](*(getattr(self, f"t{i}") for i in range(self._count)), x, *_held(self))
        return logits  # type: ignore[no-any-return]


class _Stacked(nn.Module):
    """A graph over flat tensors; the first input chooses the weights from stacks."""

    def __init__(self, infer: bytes, schema: Schema, centers: Flat, frozen: Sequence[Array]) -> None:
        super().__init__()
        self._call = (_infer_graph(infer),)
        rows = [schema.split(vector) for vector in centers]
        for i, tensor in enumerate(schema.tensors):
            stack = np.stack([row[tensor.name] for row in rows])
            self.register_buffer(f"t{i}", torch.from_numpy(stack))
        self._count = len(schema.tensors)
        _hold(self, _tensors(frozen))
        self.eval()

    def forward(self, center: Tensor, x: Tensor) -> Tensor:
        stacks = (getattr(self, f"t{i}") for i in range(self._count))
        (logits,) = self._call[0](*(stack.index_select(0, center).squeeze(0) for stack in stacks), x, *_held(self))
        return logits  # type: ignore[no-any-return]


def _hold(module: nn.Module, frozen: Sequence[Tensor]) -> None:
    for i, tensor in enumerate(frozen):
        module.register_buffer(f"frozen{i}", tensor)


def _held(module: nn.Module) -> list[Tensor]:
    return [value for name, value in module.named_buffers(recurse=False) if name.startswith("frozen")]


class _Named(nn.Module):
    """A module with a named output; the TFLite exporter writes the names of inputs and outputs into the file."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.eval()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.module(x)}


class _NamedStack(_Named):
    """The same for a stacked file."""

    def forward(self, center: Tensor, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # another signature is its point
        return {"logits": self.module(center, x)}
