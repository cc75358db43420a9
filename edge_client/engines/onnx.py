"""Training programs on ONNX Runtime: any batch size, CPU. Imports onnxruntime only when a program is opened.

Its recent Linux wheels (seen in 1.31.1) send usage reports to their maker unless told not to. A device of ours talks to
its coordinator only, so `runtime` tells the library before the import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.errors import ProgramRefused, RuntimeMissing
from edge_client.protocol.program import Function, Program
from edge_client.protocol.task import Array, Tensors


def open_program(program: Program, files: Mapping[str, Path], *, threads: int) -> OnnxEngine:
    """One session per file; see engines/base.py for what it raises."""
    return OnnxEngine(program, {name: _session(path, threads) for name, path in files.items()})


class OnnxEngine:
    """See `Engine`."""

    name = "onnx"

    def __init__(self, program: Program, sessions: Mapping[str, Any]) -> None:
        self.fixed_batch = None if program.batch["onnx"] == "any" else int(program.batch["onnx"])
        self._calls = {name: _Call(session, program.functions[name]) for name, session in sessions.items()}

    def step(self, feeds: Tensors) -> dict[str, Array]:
        """One step."""
        return self._calls["step"](feeds)

    def evaluate(self, feeds: Tensors) -> dict[str, Array]:
        """Loss and logits per sample."""
        return self._calls["evaluate"](feeds)


class _Call:
    """A session and the manifest's function that it implements."""

    def __init__(self, session: Any, function: Function) -> None:  # noqa: ANN401 - onnxruntime has no types
        self._session = session
        self._inputs = [port.name for port in function.inputs]
        self._outputs = [port.name for port in function.outputs]
        given = [i.name for i in session.get_inputs()]
        # Outputs go by position: ONNX allows no output with an input's name.
        if given != self._inputs or len(session.get_outputs()) != len(self._outputs):
            raise ProgramRefused(
                "the ONNX file takes other inputs than its manifest says", hint="compile the program again"
            )

    def __call__(self, feeds: Tensors) -> dict[str, Array]:
        results = self._session.run(None, {name: feeds[name] for name in self._inputs})
        return {name: np.asarray(value) for name, value in zip(self._outputs, results, strict=True)}


def runtime() -> Any:  # noqa: ANN401 - onnxruntime has no types
    """The onnxruntime module, its telemetry off unless the user set ORT_DISABLE_TELEMETRY otherwise."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read once, when the library is loaded
    try:
        import onnxruntime as ort
    except ImportError as missing:
        raise RuntimeMissing(
            f"onnxruntime cannot be imported: {missing}", hint="pip install 'fedcenters[onnx]'"
        ) from missing
    return ort


def session(model: str | bytes, *, threads: int) -> Any:  # noqa: ANN401 - onnxruntime has no types
    """A session over a file's path or bytes, on the CPU."""
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors only; they are raised anyway
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _session(path: Path, threads: int) -> Any:  # noqa: ANN401 - onnxruntime has no types
    version = runtime().__version__
    try:
        return session(str(path), threads=threads)
    except Exception as wrong:  # onnxruntime's own classes have no public base
        text = str(wrong).strip().splitlines()[0][:300]
        raise ProgramRefused(
            f"onnxruntime {version} cannot load {path.name}: {text}",
            hint="use onnxruntime 1.19 or newer, or another engine",
        ) from wrong
