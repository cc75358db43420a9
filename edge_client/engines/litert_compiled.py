"""Training programs on LiteRT's CompiledModel: what the engine `litert` uses where the runtime has no Interpreter.

LiteRT calls its Interpreter deprecated. Both run the same kernels and give the same bits. CompiledModel takes buffers:
a local update has two of each tensor that moves, and a step reads one set and writes the other, so weights cross no
border between steps. In Python a buffer is written and read by copy.

A tensor that a step does not change, as a buffer that is a constant, is an input and an output of the file at once.
CompiledModel binds it to one buffer, the output's, and then reads what that holds (seen with 2.3.0). So both get the
same buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.engines.base import FlatPorts, Rule, ports_by_role, unfit
from edge_client.engines.onnx_files import named_file
from edge_client.engines.silence import silence_stderr
from edge_client.errors import ProgramRefused, RuntimeMissing, install_hint
from edge_client.protocol.program import Function, Port, Program
from edge_client.protocol.task import Array, Tensors

DTYPES = ("float32", "int32")  # that a buffer takes, of those that ports have
OTHER_FILES = (8, 9)  # fields of a TFLite model: names of files, and what lies in them


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One opened function: its model, its place in the file, and the file's order of ports by the manifest's names."""

    model: Any
    index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    unchanged: frozenset[str]  # outputs that are the input of the same name


def open_program(program: Program, files: Mapping[str, Path], *, threads: int) -> CompiledEngine:
    """Every function is opened once, so that a file which does not fit is refused here; see engines/base.py."""
    engine = CompiledEngine(program, files, threads)
    for name in files:
        engine.open(name)
    return engine


class CompiledEngine:
    """See `Engine`. One model is held, for the function that was used last: a board has no memory for both."""

    name = "litert"
    place = "cpu"

    def __init__(self, program: Program, files: Mapping[str, Path], threads: int) -> None:
        self.fixed_batch = None if program.batch["litert"] == "any" else int(program.batch["litert"])
        self._functions, self._files, self._threads = program.functions, files, threads
        self._held: tuple[str, Signature | None] = ("", None)

    def update(self, feeds: Tensors, rule: Rule | None = None) -> CompiledUpdate:
        return CompiledUpdate(self.open("step"), self._functions["step"], feeds, rule)

    def evaluate(self, feeds: Tensors) -> dict[str, Array]:
        opened, function = self.open("evaluate"), self._functions["evaluate"]
        given, made = _buffers(opened)
        for port in function.inputs:
            _write(given[port.name], feeds[port.name])
        opened.model.run_by_index(opened.index, list(given.values()), list(made.values()))
        batch = self.fixed_batch or 1
        return {port.name: _read(made[port.name], port, batch) for port in function.outputs}

    def open(self, name: str) -> Signature:
        """The signature of one function. KeyError for a function that has no file here."""
        if self._held[0] != name or self._held[1] is None:
            path = self._files[name]
            with silence_stderr():
                self._held = ("", None)  # the other's memory is free before this one takes any
            self._held = (name, _opened(path, name, self._functions[name], self._threads))
        held = self._held[1]
        if held is None:
            raise KeyError(name)
        return held


class CompiledUpdate:
    """See `LocalUpdate`."""

    def __init__(self, opened: Signature, function: Function, feeds: Tensors, rule: Rule | None) -> None:
        self._opened, self._rule = opened, rule
        moved, kept, self._fresh = ports_by_role(function)
        self._moved = {port.name: port for port in moved}
        self._given, made = _buffers(opened)
        self._loss = made["loss"]
        for port in (*moved, *kept, *self._fresh):
            if port.name in feeds:
                _write(self._given[port.name], feeds[port.name])
        # Each with the buffers that the next step reads and writes; they take turns.
        self._now, self._then = ({name: of[name] for name in self._moved} for of in (self._given, made))
        if rule is not None:
            self._w, self._g = FlatPorts(function, "w"), FlatPorts(function, "velocity")
            self._w.fill(feeds)

    def step(self, feeds: Tensors) -> float:
        for port in self._fresh:
            _write(self._given[port.name], feeds[port.name])
        read, write = self._given | self._now, self._then | {"loss": self._loss}
        self._opened.model.run_by_index(
            self._opened.index, [read[n] for n in self._opened.inputs], [write[n] for n in self._opened.outputs]
        )
        self._now, self._then = self._then, self._now
        if self._rule is not None:
            self._g.fill(self._read("velocity/"))
            self._rule(self._w.flat, self._g.flat)
            for name, view in self._w.views.items():
                _write(self._now[name], view)
        return float(self._loss.read(1, np.float32)[0])

    def read(self) -> dict[str, Array]:
        return self._read() if self._rule is None else self._read() | self._w.copies()

    def _read(self, role: str = "") -> dict[str, Array]:
        return {name: _read(self._now[name], port) for name, port in self._moved.items() if name.startswith(role)}


def refuse_named_files(data: bytes) -> None:
    """Raise ProgramRefused for a TFLite file with tensors in other files: CompiledModel reads any file into them.

    It is a flatbuffer: the place of its root, and behind that the place of the root's fields.
    """

    def number(at: int, size: int = 2) -> int:
        return int.from_bytes(data[at : at + size], "little", signed=size > 2)  # noqa: PLR2004 - places are signed

    fields = number(0, 4) - number(number(0, 4), 4)
    if any(4 + 2 * field < number(fields) and number(fields + 4 + 2 * field) for field in OTHER_FILES):
        raise named_file("TFLite")


def _opened(path: Path, name: str, function: Function, threads: int) -> Signature:
    refuse_named_files(path.read_bytes())
    try:
        from ai_edge_litert.compiled_model import CompiledModel, CpuOptions, HardwareAccelerator, Options
    except (ImportError, OSError) as missing:
        raise RuntimeMissing(f"LiteRT has no CompiledModel here: {missing}", hint=install_hint("litert")) from missing
    if not hasattr(CompiledModel, "get_input_tensor_details"):
        raise RuntimeMissing("LiteRT's CompiledModel is too old here", hint=install_hint("litert"))
    options = Options(hardware_accelerators=HardwareAccelerator.CPU, cpu_options=CpuOptions(num_threads=threads))
    try:
        with silence_stderr():
            model = CompiledModel.from_file(str(path), options=options)
        index, listed = model.get_signature_index(name), model.get_signature_list().get(name)
    except (ValueError, RuntimeError) as wrong:
        raise ProgramRefused(f"LiteRT cannot load {path.name}: {wrong}", hint="use another engine") from wrong
    if listed is None:
        raise unfit(f"the TFLite file has no function {name!r}")
    inputs = _named(listed["inputs"], "args_", function.inputs)
    outputs = _named(listed["outputs"], "output_", function.outputs)
    unchanged = _unchanged(model, name, function)
    return Signature(model=model, index=index, inputs=inputs, outputs=outputs, unchanged=unchanged)


def _named(listed: Iterable[str], prefix: str, ports: tuple[Port, ...]) -> tuple[str, ...]:
    """The file's ports in its own order, by the manifest's names."""
    names = {f"{prefix}{i}": port for i, port in enumerate(ports)}
    order = tuple(listed)
    if set(order) != set(names):
        raise unfit("the TFLite file takes other inputs than its manifest says")
    other = sorted({port.dtype for port in ports} - set(DTYPES))
    if other:
        raise ProgramRefused(f"a buffer of LiteRT takes no {other[0]}", hint="use another engine")
    return tuple(names[name].name for name in order)


def _unchanged(model: Any, name: str, function: Function) -> frozenset[str]:  # noqa: ANN401 - the runtime has no types
    """The outputs whose tensor is an input's. ProgramRefused where a tensor has two names, which no buffer can have."""
    given = {each["index"]: key for key, each in model.get_input_tensor_details(name).items()}
    made = {each["index"]: key for key, each in model.get_output_tensor_details(name).items()}
    inputs = {f"args_{i}": port.name for i, port in enumerate(function.inputs)}
    outputs = {f"output_{i}": port.name for i, port in enumerate(function.outputs)}
    shared = {outputs[made[index]]: inputs[given[index]] for index in given.keys() & made.keys()}
    if len(made) < len(outputs) or any(out != into for out, into in shared.items()):
        raise ProgramRefused("the TFLite file gives one tensor under two names", hint="use another engine")
    return frozenset(shared)


def _buffers(opened: Signature) -> tuple[dict[str, Any], dict[str, Any]]:
    """New buffers for a function's inputs and outputs, in the file's order; one for both where nothing changes."""
    model, index = opened.model, opened.index
    given = dict(zip(opened.inputs, model.create_input_buffers(index), strict=True))
    made = dict(zip(opened.outputs, model.create_output_buffers(index), strict=True))
    return given, made | {name: given[name] for name in opened.unchanged}


def _write(buffer: Any, value: Array) -> None:  # noqa: ANN401 - the runtime has no types
    buffer.write(np.atleast_1d(value))


def _read(buffer: Any, port: Port, batch: int = 1) -> Array:  # noqa: ANN401 - the runtime has no types
    shape = tuple(batch if d == "batch" else int(d) for d in port.shape)
    return np.asarray(buffer.read(math.prod(shape), np.dtype(port.dtype)).reshape(shape))
