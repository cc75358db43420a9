"""Running a center's self-contained file: the stock runtimes behind one function. Each is imported only when used.

The files come from export/: input `x` [n, ...] float32, output `logits` [n, classes]; a TFLite file has batch 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_client.errors import ProgramRefused, RuntimeMissing
from edge_client.protocol.task import Array

FORMATS = ("onnx", "tflite")
FORMAT_OF = {"onnx": "onnx", "litert": "tflite", "pt2": "onnx"}  # what a device with this engine can run


def run_file(file_format: str, data: bytes, x: Array, *, threads: int = 1) -> Array:
    """Logits [n, classes] of samples `x` [n, ...]. Raises RuntimeMissing, or ProgramRefused for a file that fails."""
    runner = {"onnx": _run_onnx, "tflite": _run_tflite}[file_format]
    try:
        return runner(data, np.ascontiguousarray(x, dtype=np.float32), threads)
    except ImportError as missing:
        extra = {"onnx": "onnx", "tflite": "litert"}[file_format]
        raise RuntimeMissing(
            f"nothing here runs {file_format} files: {missing}", hint=f"pip install 'fedcenters[{extra}]'"
        ) from missing
    except Exception as wrong:  # onnxruntime's own classes have no public base
        text = (str(wrong).strip().splitlines() or [type(wrong).__name__])[0][:300]
        raise ProgramRefused(f"the {file_format} file does not run: {text}", hint="try another --format") from wrong


def _run_onnx(data: bytes, x: Array, threads: int) -> Array:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x})[0])


def _run_tflite(data: bytes, x: Array, threads: int) -> Array:
    interpreter = _interpreter(data, threads)
    interpreter.allocate_tensors()
    into, out = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]
    rows = []
    for sample in x:
        interpreter.set_tensor(into, sample[None])
        interpreter.invoke()
        rows.append(np.array(interpreter.get_tensor(out)[0]))
    return np.stack(rows)


def _interpreter(data: bytes, threads: int) -> Any:  # noqa: ANN401 - neither package has types
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        from tflite_runtime.interpreter import Interpreter
    return Interpreter(model_content=data, num_threads=threads)
