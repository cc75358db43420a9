"""Measure a written file against torch: the largest difference of logits, accuracy, and latency.

A file is (bytes, format); formats are "onnx", "tflite" and "pt2".
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from edge_client.engines.onnx import session as open_session
from edge_client.engines.targets import accuracy_of
from edge_client.errors import UsageError
from edge_client.protocol.program import IGNORED
from edge_client.protocol.task import Array
from export.bundle.bundle_contents import LabelledSamples
from export.containers.write_pt2 import read_pt2
from export.containers.write_tflite import open_tflite
from export.silence import suppress_output

PARITY_LIMIT = 1e-4  # of the logits' scale; float32 runtimes differ by about 1e-6, a wrong file by about 1
WARM_UP_RUNS, TIMED_RUNS = 3, 20  # single samples
MAX_BATCH = 256  # samples in torch and ONNX Runtime; a larger batch needs more memory and as much time
Run = Callable[[Array], Array]


def parity_limit(scale: float) -> float:
    """The largest allowed difference of float32 logits of this size from torch's."""
    return PARITY_LIMIT * max(1.0, scale)


def open_model(file: bytes, fmt: str, center: int | None = None) -> Run:
    """X [n, *sample] float32 -> logits [n, ...], one thread; `center` chooses in a stacked file.

    TFLite takes its samples one at a time.
    """
    if fmt == "onnx":
        return _onnx(file, center)
    if fmt == "tflite":
        run = open_tflite(file, "serving_default")
        chosen = {} if center is None else {"center": np.array([center], np.int32)}
        return lambda x: np.concatenate([run({"x": row[np.newaxis], **chosen})["logits"] for row in x])
    if fmt == "pt2":
        with suppress_output():
            module = read_pt2(file, "the file of a center").module(check_guards=False)
        first = [] if center is None else [torch.tensor([center], dtype=torch.int32)]
        return lambda x: _in_torch(lambda rows: module(*first, rows), x)
    raise UsageError(f"unknown format {fmt!r}", hint="use onnx, tflite or pt2")


def _onnx(file: bytes, center: int | None) -> Run:
    session = open_session(file, threads=1)
    chosen = {} if center is None else {"center": np.array([center], np.int32)}

    def run(x: Array) -> Array:
        parts = [x[at : at + MAX_BATCH] for at in range(0, len(x), MAX_BATCH)]
        return np.concatenate([np.asarray(session.run(["logits"], {"x": part, **chosen})[0]) for part in parts])

    return run


def _in_torch(module: Callable[[torch.Tensor], torch.Tensor], x: Array) -> Array:
    with suppress_output(), torch.no_grad():
        parts = [torch.from_numpy(np.array(x[at : at + MAX_BATCH])) for at in range(0, len(x), MAX_BATCH)]
        return np.concatenate([module(part).numpy() for part in parts])


def torch_logits(module: nn.Module, x: Array) -> Array:
    """[n, ...]: the module in inference mode."""
    return _in_torch(module.eval(), np.ascontiguousarray(x, dtype=np.float32))


def largest_difference(module: nn.Module, file: bytes, fmt: str, x: Array, center: int | None = None) -> float:
    """`module` in inference mode against `file` on x [n, *sample] float32; `center` chooses in a stacked file."""
    return float(np.abs(file_logits(file, fmt, x, center) - torch_logits(module, x)).max())


def file_logits(file: bytes, fmt: str, x: Array, center: int | None = None) -> Array:
    """[n, classes]: what a file answers for x [n, *sample] float32."""
    return open_model(file, fmt, center)(np.ascontiguousarray(x, dtype=np.float32))


def accuracy_by_device(logits: Array, samples: LabelledSamples) -> dict[str, float]:
    """Device -> share of right answers; {} where labels are unknown, or the targets are no classes.

    A device without a label that counts is left out. Samples that no device holds are those of one, "".
    """
    if samples.y is None or not np.issubdtype(samples.y.dtype, np.integer):
        return {}
    order = np.argsort(samples.device, kind="stable")
    names, starts = np.unique(samples.device[order], return_index=True)
    owned = zip(names.tolist(), np.split(order, starts[1:]), strict=True)
    counted = {str(name): mine for name, mine in owned if (samples.y[mine] != IGNORED).any()}
    return {name: accuracy_of(logits[mine], samples.y[mine]) for name, mine in counted.items()}


def lost_share(got: Array, expected: Array, class_axis: int | None) -> float:
    """How much of the outputs [n, ...] a smaller file loses, from 0; without classes (axis None) as r2 counts it.

    The share of answers that name another class, or the mean squared difference over the variance of each output.
    """
    if not np.isfinite(got).all():
        return float("inf")
    if class_axis is not None:
        return float((got.argmax(axis=class_axis) != expected.argmax(axis=class_axis)).mean())
    spread = float(expected.var(axis=0, dtype=np.float64).mean())
    off = float(np.square(got - expected, dtype=np.float64).mean())
    return off / (spread or max(float(np.square(expected, dtype=np.float64).mean()), np.finfo(np.float64).tiny))


def latency_ms(run: Run, x: Array) -> float:
    """The median of single samples, one after the other, in milliseconds of this machine as it is now."""
    took = []
    for i in range(WARM_UP_RUNS + TIMED_RUNS):
        began = time.perf_counter()
        run(x[i % len(x)][np.newaxis])
        took.append(time.perf_counter() - began)
    return 1000 * float(np.median(took[WARM_UP_RUNS:]))
