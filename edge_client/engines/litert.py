"""Training programs on LiteRT, or on the older tflite-runtime: fixed batch, CPU.

One file holds every function. Inputs and outputs are positional in it; their order is the manifest's. The runtime's
XNNPACK delegate is left on: without it a step of a convolutional net takes several times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.engines import litert_compiled
from edge_client.engines.base import Engine, FlatPorts, Rule, ports_by_role, unfit
from edge_client.engines.silence import silence_stderr
from edge_client.errors import ProgramRefused, RuntimeMissing, install_hint
from edge_client.malloc import trim_heap
from edge_client.protocol.program import Function, Port, Program
from edge_client.protocol.task import Array, Tensors

RUNTIMES = {"ai-edge-litert": "ai_edge_litert.interpreter", "tflite-runtime": "tflite_runtime.interpreter"}


def open_program(program: Program, files: Mapping[str, Path], *, threads: int, device: str) -> Engine:
    """Every function is opened once, so that a file which does not fit is refused here; see engines/base.py.

    Where no runtime has an Interpreter, LiteRT's CompiledModel takes its place.
    """
    if device not in ("auto", "cpu"):
        raise RuntimeMissing(
            f"LiteRT cannot use {device} here: its interpreter runs on the CPU",
            hint="use engine = 'onnx' or 'pt2', or device = 'cpu'",
        )
    engine = LitertEngine(program, files, threads)
    try:
        for name in files:
            engine.open(name)
    except RuntimeMissing as missing:
        try:
            return litert_compiled.open_program(program, files, threads=threads)
        except RuntimeMissing:
            raise missing from None
    return engine


class LitertEngine:
    """See `Engine`. Not for two threads at once, and one update at a time: an interpreter keeps its tensors.

    One interpreter is held, for the function that was used last: a board has no memory for both.
    """

    name = "litert"
    place = "cpu"

    def __init__(self, program: Program, files: Mapping[str, Path], threads: int) -> None:
        self.fixed_batch = None if program.batch["litert"] == "any" else int(program.batch["litert"])
        self._functions, self._files, self._threads = program.functions, files, threads
        self._held: tuple[str, Any] = ("", None)

    def update(self, feeds: Tensors, rule: Rule | None = None) -> LitertUpdate:
        return LitertUpdate(self.open("step"), self._functions["step"], feeds, rule)

    def evaluate(self, feeds: Tensors) -> dict[str, Array]:
        run, function = self.open("evaluate").get_signature_runner("evaluate"), self._functions["evaluate"]
        results = run(**{f"args_{i}": feeds[port.name] for i, port in enumerate(function.inputs)})
        return {port.name: np.asarray(results[f"output_{i}"]) for i, port in enumerate(function.outputs)}

    def open(self, name: str) -> Any:  # noqa: ANN401 - the runtimes have no types
        """The interpreter for one function. KeyError for a function that has no file here."""
        if self._held[0] != name:
            path, self._held = self._files[name], ("", None)  # the other's memory is free before this one takes any
            trim_heap()  # glibc would keep blocks of an interpreter's size for later
            self._held = (name, _opened(path, name, self._functions[name], self._threads))
        return self._held[1]


class LitertUpdate:
    """See `LocalUpdate`. `step` is the file's main function, whose tensors the interpreter shows without copying them.

    It never overwrites its inputs, so what stays is written once; and none of its outputs may serve as an input, so
    what moved is copied back, from buffer to buffer.
    """

    def __init__(self, interpreter: Any, function: Function, feeds: Tensors, rule: Rule | None) -> None:  # noqa: ANN401 - no types there
        self._interpreter, self._rule = interpreter, rule
        self._inputs, outputs = _places(interpreter, "step", function)
        moved, kept, self._fresh = ports_by_role(function)
        turned = [port.name for port in moved if rule is None or port.name.startswith("buffers/")]
        self._moved = {name: (self._inputs[name], outputs[name]) for name in turned}
        self._loss = outputs["loss"]
        self._write((*moved, *kept), feeds)
        if rule is not None:
            self._w, self._g = FlatPorts(function, "w"), FlatPorts(function, "velocity")
            self._w.fill(feeds)
            self._gradients = {name: outputs[name] for name in self._g.views}

    def step(self, feeds: Tensors) -> float:
        self._write(self._fresh, feeds)
        self._interpreter.invoke()
        for into, out in self._moved.values():
            self._interpreter.set_tensor(into, self._interpreter.tensor(out)())
        if self._rule is not None:
            self._g.fill({name: self._interpreter.tensor(out)() for name, out in self._gradients.items()})
            self._rule(self._w.flat, self._g.flat)
            for name, view in self._w.views.items():
                self._interpreter.set_tensor(self._inputs[name], view)
        return float(self._interpreter.get_tensor(self._loss))

    def read(self) -> dict[str, Array]:
        found = {name: self._interpreter.get_tensor(into) for name, (into, _) in self._moved.items()}
        return found if self._rule is None else found | self._w.copies()

    def _write(self, ports: Iterable[Port], feeds: Tensors) -> None:
        for port in ports:
            self._interpreter.set_tensor(self._inputs[port.name], feeds[port.name])


def _places(interpreter: Any, name: str, function: Function) -> tuple[dict[str, int], dict[str, int]]:  # noqa: ANN401
    """Where the interpreter keeps a function's inputs and outputs, by name.

    The signature runner is dropped again: while it lives, the interpreter takes it for a view of a tensor.
    """
    runner = interpreter.get_signature_runner(name)
    inputs, outputs = runner.get_input_details(), runner.get_output_details()
    return (
        {port.name: inputs[f"args_{i}"]["index"] for i, port in enumerate(function.inputs)},
        {port.name: outputs[f"output_{i}"]["index"] for i, port in enumerate(function.outputs)},
    )


def _agree(interpreter: Any, name: str, function: Function) -> None:  # noqa: ANN401 - the runtimes have no types
    """Refuse a file that does not hold the manifest's function, or holds `step` elsewhere than first."""
    try:
        runner = interpreter.get_signature_runner(name)
    except (KeyError, ValueError, RuntimeError) as wrong:
        raise unfit(f"the TFLite file has no function {name!r}: {wrong}") from wrong
    places, results = runner.get_input_details(), runner.get_output_details()
    main = {detail["index"] for detail in interpreter.get_input_details()}
    if (
        set(places) != {f"args_{i}" for i in range(len(function.inputs))}
        or set(results) != {f"output_{i}" for i in range(len(function.outputs))}
        or (name == "step" and {place["index"] for place in places.values()} != main)
    ):
        raise unfit("the TFLite file takes other inputs than its manifest says")


def _opened(path: Path, name: str, function: Function, threads: int) -> Any:  # noqa: ANN401 - no types there
    try:
        made = _make_interpreter(path.read_bytes(), threads)
        _agree(made, name, function)
        if name == "step":
            _allocate(made)
    except (ValueError, RuntimeError) as wrong:
        raise ProgramRefused(f"LiteRT cannot load {path.name}: {wrong}", hint="use another engine") from wrong
    return made


def interpreter(model: bytes, *, threads: int) -> Any:  # noqa: ANN401 - the runtimes have no types
    """An interpreter over a file's bytes, tensors allocated. Raises RuntimeMissing, or what the runtime raises."""
    made = _make_interpreter(model, threads)
    _allocate(made)
    return made


def _make_interpreter(model: bytes, threads: int) -> Any:  # noqa: ANN401 - the runtimes have no types
    """By the first runtime that can make one: an installed runtime may be broken, and shows it only here."""
    litert_compiled.refuse_named_files(model)
    reasons = []
    for package, module in RUNTIMES.items():
        try:
            with silence_stderr():
                made = import_module(module).Interpreter
                return made(model_content=model, num_threads=threads, **_in_order(made))
        # SystemError: tflite-runtime 2.14 with numpy 2
        except (ImportError, OSError, AttributeError, SystemError) as broken:  # noqa: PERF203 - two of them
            reasons.append(f"{package}: {broken}")
    raise RuntimeMissing(f"no TFLite runtime works here ({'; '.join(reasons)})", hint=install_hint("litert"))


def _in_order(made: Any) -> dict[str, bool]:  # noqa: ANN401 - the runtimes have no types
    """The option that leaves operators in the file's order, for a runtime that has it (tflite-runtime 2.14 has not).

    Otherwise XNNPACK computes what it can as early as it can, and holds it until it is used.
    """
    option = "experimental_disable_delegate_clustering"
    return {option: True} if option in signature(made.__init__).parameters else {}


def _allocate(made: Any) -> None:  # noqa: ANN401 - the runtimes have no types
    with silence_stderr():
        made.allocate_tensors()
