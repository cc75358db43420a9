"""Running a center's self-contained file: the stock runtimes behind one function. Each is imported only when used.

The files come from export/: input `x` [n, ...] float32, output `logits` [n, classes]; a TFLite file has batch 1.
"""

from __future__ import annotations

import numpy as np

from edge_client.engines.litert import interpreter
from edge_client.engines.onnx import session
from edge_client.errors import ProgramRefused, RuntimeMissing, raise_for_memory
from edge_client.protocol.task import Array

FILE_FORMATS = ("onnx", "tflite")
MAX_BATCH = 64  # samples at once: what a model computes on the way of one may be a hundred times as large as it
FORMAT_BY_ENGINE = {"onnx": "onnx", "litert": "tflite", "pt2": "onnx"}  # what a device with this engine can run


def run_file(file_format: str, data: bytes, x: Array, *, threads: int = 1) -> Array:
    """Logits [n, classes] of samples `x` [n, ...]. Raises RuntimeMissing, or ProgramRefused for a file that fails."""
    runner = {"onnx": _run_onnx, "tflite": _run_tflite}[file_format]
    try:
        return runner(data, np.ascontiguousarray(x, dtype=np.float32), threads)
    except (ProgramRefused, RuntimeMissing):
        raise
    except Exception as wrong:  # onnxruntime's own classes have no public base
        text = raise_for_memory(wrong)
        raise ProgramRefused(f"the {file_format} file does not run: {text}", hint="try another --format") from wrong


def _run_onnx(data: bytes, x: Array, threads: int) -> Array:
    opened = session(data, threads=threads)
    name = opened.get_inputs()[0].name
    parts = (x[at : at + MAX_BATCH] for at in range(0, len(x), MAX_BATCH))
    return np.concatenate([np.asarray(opened.run(None, {name: part})[0]) for part in parts])


def _run_tflite(data: bytes, x: Array, threads: int) -> Array:
    opened = interpreter(data, threads=threads)
    into, out = opened.get_input_details()[0]["index"], opened.get_output_details()[0]["index"]
    rows = []
    for sample in x:
        opened.set_tensor(into, sample[None])
        opened.invoke()
        rows.append(np.array(opened.get_tensor(out)[0]))
    return np.stack(rows)
