"""A center in 8 bits answers alike on every processor."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort

from edge_client.protocol.task import Array
from export.bundle.center_files import export_center
from export.bundle.quantize import quantize_file
from export.bundle.run_source import LabelledSamples
from tests.support.programs import model


def logits(file: bytes, x: Array, level: ort.GraphOptimizationLevel) -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    found: Array = session.run(["logits"], {"x": x})[0]
    return found


def test_the_8_bit_products_of_a_static_file_are_those_of_its_float_arithmetic() -> None:
    known, rng = model("digits-mlp"), np.random.default_rng(0)
    x = rng.standard_normal((8, *known.input)).astype(np.float32)
    file = quantize_file(export_center(known.module, known.input, "onnx"), "onnx", "int8-static", LabelledSamples(x=x))
    plain = logits(file, x, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)  # each value is made a float before a product
    fast = logits(file, x, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    assert np.abs(fast - plain).max() < 0.05 * np.abs(plain).max()
    stored = {tensor.data_type for tensor in onnx.load_from_string(file).graph.initializer}
    assert onnx.TensorProto.UINT8 in stored
    assert onnx.TensorProto.INT8 not in stored  # its products saturate on x86 without VNNI
