"""Training programs on torch, for devices that have it: any batch size, CPU. Imported only when a program is opened."""

from __future__ import annotations

import io
import json
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.errors import ProgramRefused, RuntimeMissing
from edge_client.protocol.program import Function, Program
from edge_client.protocol.task import Array, Tensors

MAX_CONFIG_BYTES = 1 << 20
_LOADING = threading.Lock()  # torch.export.load keeps global state while it reads; several devices may share a process


def open_program(program: Program, files: Mapping[str, Path], *, threads: int) -> Pt2Engine:
    """One graph per file; see engines/base.py for what it raises. torch applies `threads` to the whole process."""
    try:
        import torch
    except ImportError as missing:
        raise RuntimeMissing(
            f"torch cannot be imported: {missing}", hint="pip install torch, or use engine = 'onnx'"
        ) from missing
    torch.set_num_threads(threads)
    with _LOADING:
        return Pt2Engine(program, {name: _graph(path) for name, path in files.items()})


class Pt2Engine:
    """See `Engine`."""

    name = "pt2"

    def __init__(self, program: Program, graphs: Mapping[str, Any]) -> None:
        self.fixed_batch = None if program.batch["pt2"] == "any" else int(program.batch["pt2"])
        self._calls = {name: _Call(graph, program.functions[name]) for name, graph in graphs.items()}

    def step(self, feeds: Tensors) -> dict[str, Array]:
        """One step."""
        return self._calls["step"](feeds)

    def evaluate(self, feeds: Tensors) -> dict[str, Array]:
        """Loss and logits per sample."""
        return self._calls["evaluate"](feeds)


class _Call:
    """A graph and the manifest's function that it implements."""

    def __init__(self, graph: Any, function: Function) -> None:  # noqa: ANN401 - a generated module
        self._graph = graph
        self._inputs = [port.name for port in function.inputs]
        self._outputs = [port.name for port in function.outputs]

    def __call__(self, feeds: Tensors) -> dict[str, Array]:
        import torch

        # torch.tensor copies: a graph may give an input back unchanged, and the feeds belong to the caller.
        with torch.no_grad():
            results = self._graph(*(torch.tensor(np.asarray(feeds[name])) for name in self._inputs))
        return {name: value.numpy() for name, value in zip(self._outputs, results, strict=True)}


def _graph(path: Path) -> Any:  # noqa: ANN401 - a generated module
    import torch

    try:
        _refuse_pickles(path)
        return torch.export.load(io.BytesIO(path.read_bytes())).module()
    except ProgramRefused:
        raise
    except Exception as wrong:  # torch raises many kinds for a file that it cannot read
        text = (str(wrong).strip().splitlines() or [repr(wrong)])[0][:300]
        raise ProgramRefused(
            f"torch {torch.__version__} cannot load {path.name}: {text}",
            hint="use the torch version that program.json names, or another engine",
        ) from wrong


def _refuse_pickles(path: Path) -> None:
    """Programs carry no weights and no objects, so nothing in the archive may be unpickled when torch loads it."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.filename.endswith("_config.json"):
                continue
            if member.file_size > MAX_CONFIG_BYTES:
                raise ProgramRefused(f"{path.name}: {member.filename} is too big", hint="compile the program again")
            entries = json.loads(archive.read(member)).get("config", {})
            if any(entry.get("use_pickle") for entry in entries.values()):
                raise ProgramRefused(f"{path.name} holds pickled objects", hint="compile the program with fedcenters")
