"""One center as one file that knows nothing of us: input "x", output "logits", weights inside.

ONNX takes any batch size, TFLite one sample at a time. Any torch module can be written; a center of a bundle is its
program's own `infer` graph with the center's weights put in (`with_weights`), so no model code is needed here.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from edge_client.errors import ProgramRefused, UsageError
from edge_client.protocol.task import Flat, Schema
from export.onnx import to_onnx
from export.quiet import quiet
from export.tflite import to_named_tflite
from export.tracing import MAX_BATCH, quiet_warnings

Format = Literal["onnx", "tflite"]
FORMATS = ("onnx", "tflite")
EXAMPLE_BATCH = 2


def export_center(module: nn.Module, sample_shape: Sequence[int], fmt: str) -> bytes:
    """The module in inference mode, for samples of `sample_shape` (without batch), dtype float32."""
    if fmt not in FORMATS:
        raise UsageError(f"unknown format {fmt!r}", hint=f"use one of {', '.join(FORMATS)}")
    network = _Named(module)
    try:
        return _onnx(network, sample_shape) if fmt == "onnx" else _tflite(network, sample_shape)
    except Exception as wrong:  # exporters raise many kinds; what they cannot convert is a refusal
        text = (str(wrong).strip().splitlines() or [repr(wrong)])[0][:300]
        raise ProgramRefused(f"this model cannot be written as {fmt}: {text}", hint="use another format") from wrong


def with_weights(infer: bytes, schema: Schema, vector: Flat) -> nn.Module:
    """A program's `infer` container (.pt2) with the weights [schema.size] put in: x [batch, ...] -> logits."""
    with quiet():
        graph = torch.export.load(io.BytesIO(infer)).module(check_guards=False)
    tensors = [torch.from_numpy(np.array(value)) for value in schema.split(vector).values()]
    return _Center(graph, tensors)


class _Center(nn.Module):
    """A graph over flat tensors, all but the last fixed."""

    def __init__(self, graph: nn.Module, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._call = (graph,)  # in a tuple: an exported graph refuses eval(), so it is no child of ours
        for i, tensor in enumerate(tensors):
            self.register_buffer(f"t{i}", tensor)
        self._count = len(tensors)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        (logits,) = self._call[0](*(getattr(self, f"t{i}") for i in range(self._count)), x)
        return logits  # type: ignore[no-any-return]


class _Named(nn.Module):
    """Outputs by name; the exporters carry the name into the file."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.eval()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.module(x)}


def _onnx(network: nn.Module, sample_shape: Sequence[int]) -> bytes:
    dims = {"x": {0: Dim("batch", min=1, max=MAX_BATCH)}}
    with quiet_warnings():
        made = torch.export.export(
            network, (torch.zeros(EXAMPLE_BATCH, *sample_shape),), dynamic_shapes=dims, strict=False
        )
    return to_onnx(made, ["x"], ["logits"])


def _tflite(network: nn.Module, sample_shape: Sequence[int]) -> bytes:
    return to_named_tflite(network, {"x": torch.zeros(1, *sample_shape)})
