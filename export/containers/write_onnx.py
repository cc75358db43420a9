"""Write exported programs as ONNX files (opset 18, IR version 10 or lower, any batch size), and open such a file.

ONNX Runtime 1.19, the newest version for old boards, refuses newer files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.export import ExportedProgram

from edge_client.protocol.task import Array
from export.containers import onnx_float64
from export.containers.quick_exporter import quick_exporter
from export.silence import suppress_output

OPSET = 18
MAX_IR_VERSION = 10
UNUSED_RULES = (  # of onnxscript, by the first letters of their names
    "SlicesSplit",  # tries every pair of slices: quadratic, and minutes where kernels are many
    *("FuseSuccessive", "FuseMinMax", "FuseMaxMin"),  # give the bounds of two clamps of one value the same names
)


def to_onnx(exported: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """Serialise with these port names, in order. ONNX names are unique: an output named like an input gets "new/"."""
    with suppress_output(), _exact_rules(), quick_exporter(OPSET):
        made = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=[f"new/{name}" if name in inputs else name for name in outputs],
            custom_translation_table=dict(onnx_float64.onnx_translations()),
            verbose=False,
            optimize=True,
        )
    if made is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    proto = made.model_proto
    proto.ir_version = min(proto.ir_version, MAX_IR_VERSION)
    _turn_within_products(proto.graph)
    _strip(proto)
    return onnx_bytes(proto)


@contextmanager
def _exact_rules() -> Iterator[None]:
    """With onnxscript's rules for equal numbers alone, where it takes 1e-8 for 0 and 1.00001 for 1.

    `h / (h.sum(1) + 1e-9)` would lose its bound. And without its rules of UNUSED_RULES.
    """
    from onnxscript import rewriter
    from onnxscript.rewriter import _matcher

    equal = SimpleNamespace(isclose=lambda one, other, **_: one == other)
    every = rewriter._DEFAULT_REWRITE_RULES  # noqa: SLF001 - its optimizer takes no rules as an argument
    kept = tuple(rule for rule in every if not (rule.name or "").startswith(UNUSED_RULES))
    with patch.object(rewriter, "_DEFAULT_REWRITE_RULES", kept), patch.object(_matcher, "math", equal):
        yield


def bake_weights(file: bytes, weights: Mapping[str, Array]) -> bytes:
    """The same graph with these inputs turned into constants: milliseconds, where an export takes a second."""
    import onnx

    proto = onnx.load_model_from_string(file)
    rest = [port for port in proto.graph.input if port.name not in weights]
    del proto.graph.input[:]
    proto.graph.input.extend(rest)
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(value), name) for name, value in weights.items()
    )
    return onnx_bytes(proto)


def onnx_bytes(proto: Any) -> bytes:  # noqa: ANN401 - onnx has no types
    """The file of a model; equal models give equal bytes."""
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def _turn_within_products(graph: Any) -> None:  # noqa: ANN401 - onnx has no types
    """Let a Gemm turn its factor itself, as for `x @ w.T`, without a node that copies w: ONNX Runtime misses some."""
    turned = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Transpose" and [list(one.ints) for one in node.attribute] == [[1, 0]]
    }
    for gemm in [node for node in graph.node if node.op_type == "Gemm" and node.input[1] in turned]:
        (flag,) = [one for one in gemm.attribute if one.name == "transB"] or [gemm.attribute.add(name="transB", type=2)]
        flag.i, gemm.input[1] = 1 - flag.i, turned[gemm.input[1]]
    read = {name for node in graph.node for name in node.input} | {port.name for port in graph.output}
    kept = [node for node in graph.node if node.op_type != "Transpose" or node.output[0] in read]
    del graph.node[:]
    graph.node.extend(kept)


def _strip(proto: Any) -> None:  # noqa: ANN401 - onnx has no types
    """Drop stack traces and notes, which hold paths of this machine and are most of a small file."""
    del proto.metadata_props[:]
    proto.graph.doc_string = ""
    for holder in (proto.graph, *proto.functions):
        del holder.metadata_props[:]
        for node in holder.node:
            del node.metadata_props[:]
            node.doc_string = ""
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info, *proto.graph.initializer):
        del value.metadata_props[:]
        value.doc_string = ""


def open_onnx(file: bytes, dtype: str = "float32") -> Callable[[Mapping[str, Array]], list[Array]]:
    """A function from inputs by name, numbers of `dtype`, to outputs in the file's order; one thread."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as on a device: no telemetry
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(
        file,
        options,
        providers=["CPUExecutionProvider"],
        # This optimizer stores a factor as a float32 attribute, which is 5e-8 off in float64.
        disabled_optimizers=["MatMulScaleFusion"] if dtype == "float64" else None,
    )
    return lambda feeds: [np.asarray(out) for out in session.run(None, dict(feeds))]
