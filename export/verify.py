"""How far a written file is from torch: the largest absolute difference of logits on given samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from edge_client.errors import UsageError
from edge_client.protocol.task import Array
from export.onnx import run_onnx
from export.quiet import quiet
from export.tflite import open_tflite


def largest_difference(module: nn.Module, file: bytes | Path, fmt: str, x: Array) -> float:
    """`module` in inference mode against `file` ("onnx", "tflite") on x [n, *sample] float32."""
    data = file.read_bytes() if isinstance(file, Path) else file
    samples = np.ascontiguousarray(x, dtype=np.float32)
    with quiet(), torch.no_grad():
        expected = module.eval()(torch.from_numpy(samples.copy())).numpy()
    got = file_logits(data, fmt, samples)
    return float(np.abs(got - expected).max())


def file_logits(file: bytes, fmt: str, x: Array) -> Array:
    """[n, classes]: what a self-contained file answers for x [n, *sample] float32, one sample at a time for TFLite."""
    if fmt == "onnx":
        return run_onnx(file, {"x": x})[0]
    if fmt == "tflite":
        run = open_tflite(file, "serving_default")
        return np.concatenate([run({"x": row[np.newaxis]})["logits"] for row in x])
    raise UsageError(f"unknown format {fmt!r}", hint="use onnx or tflite")
