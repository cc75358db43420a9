"""Training programs on LiteRT, or on the older tflite-runtime: fixed batch, CPU. One file holds every function.

Inputs and outputs are positional in these files; their order is the manifest's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.errors import ProgramRefused, RuntimeMissing
from edge_client.protocol.program import Function, Program
from edge_client.protocol.task import Array, Tensors

_GREETING = threading.Lock()  # one descriptor for all threads


def open_program(program: Program, files: Mapping[str, Path], *, threads: int) -> LitertEngine:
    """One interpreter per distinct file; see engines/base.py for what it raises."""
    opened = {path: _interpreter(path, threads) for path in set(files.values())}
    return LitertEngine(program, {name: opened[path] for name, path in files.items()})


class LitertEngine:
    """See `Engine`. Not for two threads at once: an interpreter keeps its tensors."""

    name = "litert"

    def __init__(self, program: Program, interpreters: Mapping[str, Any]) -> None:
        self.fixed_batch = None if program.batch["litert"] == "any" else int(program.batch["litert"])
        self._calls = {
            name: _Call(interpreter, name, program.functions[name]) for name, interpreter in interpreters.items()
        }

    def step(self, feeds: Tensors) -> dict[str, Array]:
        """One step."""
        return self._calls["step"](feeds)

    def evaluate(self, feeds: Tensors) -> dict[str, Array]:
        """Loss and logits per sample."""
        return self._calls["evaluate"](feeds)


class _Call:
    """One signature of the file and the manifest's function that it implements."""

    def __init__(self, interpreter: Any, name: str, function: Function) -> None:  # noqa: ANN401 - no types there
        try:
            self._runner = interpreter.get_signature_runner(name)
            given = set(self._runner.get_input_details()), set(self._runner.get_output_details())
        except (KeyError, ValueError, RuntimeError) as wrong:
            raise ProgramRefused(
                f"the TFLite file has no function {name!r}: {wrong}", hint="compile the program again"
            ) from wrong
        self._inputs = {f"args_{i}": port.name for i, port in enumerate(function.inputs)}
        self._outputs = {f"output_{i}": port.name for i, port in enumerate(function.outputs)}
        if given != (set(self._inputs), set(self._outputs)):
            raise ProgramRefused(
                "the TFLite file takes other inputs than its manifest says", hint="compile the program again"
            )

    def __call__(self, feeds: Tensors) -> dict[str, Array]:
        results = self._runner(**{place: feeds[name] for place, name in self._inputs.items()})
        return {name: np.asarray(results[place]) for place, name in self._outputs.items()}


def _interpreter(path: Path, threads: int) -> Any:  # noqa: ANN401 - the runtimes have no types
    try:
        return interpreter(path.read_bytes(), threads=threads)
    except SystemError as broken:  # tflite-runtime 2.14 with numpy 2
        raise RuntimeMissing(
            f"the TFLite runtime is installed but broken: {broken}", hint="pip install 'fedcenters[litert]'"
        ) from broken
    except (ValueError, RuntimeError) as wrong:
        raise ProgramRefused(f"LiteRT cannot load {path.name}: {wrong}", hint="use another engine") from wrong


def interpreter(model: bytes, *, threads: int) -> Any:  # noqa: ANN401 - the runtimes have no types
    """An interpreter over a file's bytes, tensors allocated. Raises RuntimeMissing, or what the runtime raises."""
    make = _runtime()
    with _unheard():
        made = make(model_content=model, num_threads=threads)
        made.allocate_tensors()
    return made


@contextmanager
def _unheard() -> Iterator[None]:
    """The runtime greets on file descriptor 2 for each interpreter, and has no switch for it."""
    with _GREETING:
        kept = os.dup(2)
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(null)


def _runtime() -> Any:  # noqa: ANN401 - a class without types
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError as missing:
        try:
            from tflite_runtime.interpreter import Interpreter
        except ImportError:
            raise RuntimeMissing(
                f"ai-edge-litert cannot be imported: {missing}", hint="pip install 'fedcenters[litert]'"
            ) from missing
    return Interpreter
