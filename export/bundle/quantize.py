"""Quantize the files of a center. `verify` measures what each scheme costs on real samples.

    fp16          weights in half precision, computed in float32: half the bytes, the smallest change
    int8          weights in 8 bits with one scale per output channel, computed in float32: a quarter of the bytes
    int8-static   weights and activations in 8 bits, with ranges seen on calibration samples: a quarter of the bytes,
                  and integer arithmetic where a machine has it

Each ONNX weight is stored small before one Cast or DequantizeLinear, which any ONNX Runtime since 1.19 opens. It folds
a Cast when it loads the file, and dequantizes at each run. Static ranges are those of ONNX Runtime. TFLite files come
from ai-edge-quantizer. DECISIONS.md has the figures of these and of other tools.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.errors import ProgramRefused, UsageError
from edge_client.protocol.task import Array
from export.bundle.bundle_contents import LabelledSamples
from export.containers.write_onnx import onnx_bytes
from export.diagnostics import converter_missing, raise_for_machine
from export.silence import suppress_output

SCHEMES = ("fp16", "int8", "int8-static")
SCHEMES_OF = {"onnx": SCHEMES, "tflite": SCHEMES, "pt2": ()}
MIN_QUANTIZED_VALUES = (
    64  # values; smaller tensors (biases, norms) stay in float32: they take few bytes and need their digits
)
LARGEST_QUANTIZED = 65504  # float16's largest; a mask's -1e9 or -inf leaves its neighbours in a row no digits
MAX_CALIBRATION_SAMPLES = 128  # samples
INT8_MAX = 127


def supported_schemes(fmt: str, schemes: Sequence[str]) -> Iterator[str]:
    """Those of `schemes` that the format supports."""
    return (scheme for scheme in schemes if scheme in SCHEMES_OF[fmt])


def quantize_file(file: bytes, fmt: str, scheme: str, calibration: LabelledSamples | None = None) -> bytes:
    """A self-contained file of `fmt`, made smaller. Raises UsageError, or ProgramRefused where a tool cannot do it."""
    if scheme not in SCHEMES_OF[fmt]:
        raise UsageError(f"{fmt} has no {scheme}", hint=f"{fmt} has: {', '.join(SCHEMES_OF[fmt]) or 'none'}")
    x = _ranges_from(calibration).x if scheme == "int8-static" else np.empty(0, np.float32)
    make = _onnx if fmt == "onnx" else _tflite
    try:
        with suppress_output():
            return make(file, scheme, x)
    except ImportError as wrong:
        raise converter_missing(wrong) from wrong
    except Exception as wrong:  # the tools raise many kinds; what they cannot convert is a refusal
        text = raise_for_machine(wrong)
        raise ProgramRefused(f"{fmt} cannot be quantized to {scheme}: {text}", hint="leave this scheme out") from wrong


def _ranges_from(calibration: LabelledSamples | None) -> LabelledSamples:
    if calibration is None:
        raise UsageError("int8-static needs calibration samples", hint="give training samples with --calibration")
    return calibration.subsample(MAX_CALIBRATION_SAMPLES)


def _onnx(file: bytes, scheme: str, x: Array) -> bytes:
    if scheme == "int8-static":
        return _onnx_static(file, x)
    import onnx

    def halved(value: Array, name: str) -> tuple[list[Any], Any]:
        stored = onnx.numpy_helper.from_array(value.astype(np.float16), f"{name}.half")
        return [stored], onnx.helper.make_node("Cast", [stored.name], [name], f"{name}.float", to=1)

    def scaled(value: Array, name: str) -> tuple[list[Any], Any]:
        scale = np.abs(value).reshape(len(value), -1).max(axis=1) / INT8_MAX
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        small = np.rint(value / scale.reshape(-1, *[1] * (value.ndim - 1))).astype(np.int8)
        parts = {"int8": small, "scale": scale, "zero": np.zeros(len(scale), np.int8)}
        stored = [onnx.numpy_helper.from_array(part, f"{name}.{ending}") for ending, part in parts.items()]
        inputs = [tensor.name for tensor in stored]
        return stored, onnx.helper.make_node("DequantizeLinear", inputs, [name], f"{name}.float", axis=0)

    return _with_small_weights(file, halved if scheme == "fp16" else scaled)


def _with_small_weights(file: bytes, store: Callable[[Array, str], tuple[list[Any], Any]]) -> bytes:
    """Store every weight matrix by `store`: value and name -> its tensors, and the node that restores it."""
    import onnx

    proto = onnx.load_model_from_string(file)
    kept, nodes = [], []
    for tensor in proto.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor)
        matrix = value.dtype == np.float32 and value.ndim > 1 and value.size >= MIN_QUANTIZED_VALUES
        if not matrix or np.abs(value).max() > LARGEST_QUANTIZED:
            kept.append(tensor)
            continue
        stored, node = store(value, tensor.name)
        kept += stored
        nodes.append(node)
    nodes += proto.graph.node
    del proto.graph.initializer[:], proto.graph.node[:]
    proto.graph.initializer.extend(kept)
    proto.graph.node.extend(nodes)
    onnx.checker.check_model(proto)
    return onnx_bytes(proto)


def _onnx_static(file: bytes, x: Array) -> bytes:
    """ONNX Runtime's own: QDQ nodes, a scale per output channel of the weights, smallest and largest activations.

    Weights are unsigned as activations are: an x86 processor without VNNI adds pairs of unsigned times signed products
    in 16 bits, which saturate.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # the package has no types
        def __init__(self) -> None:
            self._left = iter(x)

        def get_next(self) -> dict[str, Array] | None:
            row = next(self._left, None)
            return None if row is None else {"x": row[np.newaxis]}

    with tempfile.TemporaryDirectory(prefix="fedcenters-") as name:
        whole, ready, small = (Path(name) / part for part in ("whole.onnx", "ready.onnx", "small.onnx"))
        whole.write_bytes(file)
        quant_pre_process(str(whole), str(ready), skip_symbolic_shape=True)
        quantize_static(
            str(ready),
            str(small),
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QUInt8,
        )
        proto = onnx.load(str(small))
    del proto.metadata_props[:]  # the tool's own
    proto.metadata_props.extend(onnx.load_model_from_string(file).metadata_props)
    return onnx_bytes(proto)


def _tflite(file: bytes, scheme: str, x: Array) -> bytes:
    from ai_edge_quantizer import calibrator, quantizer, recipe, recipe_manager
    from ai_edge_quantizer.algorithm_manager import AlgorithmName
    from ai_edge_quantizer.qtyping import TFLOperationName
    from ai_edge_quantizer.utils import qsv_utils

    if scheme == "int8-static":
        tool = quantizer.Quantizer(bytearray(file), recipe.static_wi8_ai8())
        for end in (TFLOperationName.INPUT, TFLOperationName.OUTPUT):  # x and logits stay float32
            tool.update_quantization_recipe(".*", end, algorithm_key=AlgorithmName.NO_QUANTIZE)
        # The tool's own `calibrate` averages each range over the samples, which cuts off what is rare: 6 points on
        # CIFAR-10. Smallest and largest, as the others take them, cost nothing.
        seen = calibrator.Calibrator(bytearray(file), num_threads=1, qsv_update_func=qsv_utils.min_max_update)
        manager = recipe_manager.RecipeManager()
        manager.load_quantization_recipe(tool.get_quantization_recipe())
        seen.calibrate({"serving_default": [{"x": row[np.newaxis]} for row in x]}, manager)
        return bytes(tool.quantize(seen.get_model_qsvs()).quantized_model)
    tool = quantizer.Quantizer(bytearray(file))
    bits, how = (16, AlgorithmName.FLOAT_CASTING) if scheme == "fp16" else (8, AlgorithmName.MIN_MAX_UNIFORM_QUANT)
    tool.add_weight_only_config(".*", TFLOperationName.ALL_SUPPORTED, num_bits=bits, algorithm_key=how)
    return bytes(tool.quantize().quantized_model)
