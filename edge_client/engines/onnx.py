"""Training programs on ONNX Runtime: any batch size; CPU, CUDA or TensorRT.

A local update binds its tensors once, on the session's device, in two sets: a step reads one and writes the other, and
the next step the other way round, so weights cross no border between steps. Imports onnxruntime only when a program is
opened. Its recent Linux wheels (seen in 1.31.1) send usage reports to their maker unless told not to. A device of ours
talks to its coordinator only, so `runtime` tells the library before the import.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.engines.base import FlatPorts, Rule, ports_by_role, unfit
from edge_client.engines.frozen import open_frozen
from edge_client.engines.onnx_files import refuse_named_files
from edge_client.errors import ProgramRefused, RuntimeMissing, install_hint, raise_for_memory
from edge_client.protocol.program import FROZEN, Function, Port, Program
from edge_client.protocol.task import Array, Tensors

# Full float32, as everywhere else: TF32 keeps 10 bits of the factors of a product.
PROVIDERS: dict[str, tuple[str, dict[str, str]]] = {
    "cuda": ("CUDAExecutionProvider", {"use_tf32": "0"}),
    "tensorrt": ("TensorrtExecutionProvider", {}),
}


def open_program(program: Program, files: Mapping[str, Path], *, threads: int, device: str) -> OnnxEngine:
    """One session per file; see engines/base.py for what it raises."""
    sessions = {name: _session(path, threads, device) for name, path in files.items() if name != FROZEN}
    return OnnxEngine(program, sessions, open_frozen(program, files))


class OnnxEngine:
    """See `Engine`."""

    name = "onnx"

    def __init__(self, program: Program, sessions: Mapping[str, Any], frozen: Tensors) -> None:
        self.fixed_batch = None if program.batch["onnx"] == "any" else int(program.batch["onnx"])
        self._sessions, self._functions = sessions, program.functions
        first = next((session.get_providers()[0] for session in sessions.values()), "")
        self.place = next((place for place, (provider, _) in PROVIDERS.items() if provider == first), "cpu")
        for name, session in sessions.items():
            _agree(session, program.functions[name], frozen)
        self._lent = frozen  # onnxruntime reads these arrays in place
        place = "cpu" if self.place == "cpu" else "cuda"
        self._frozen = _lend(frozen, place)

    def update(self, feeds: Tensors, rule: Rule | None = None) -> OnnxUpdate:
        return OnnxUpdate(self._sessions["step"], self._functions["step"], self._frozen, feeds, rule)

    def evaluate(self, feeds: Tensors) -> dict[str, Array]:
        session, function = self._sessions["evaluate"], self._functions["evaluate"]
        given = {port.name: np.asarray(feeds[port.name], order="C") for port in function.inputs}
        binding = session.io_binding()
        for name, value in self._frozen.items():
            binding.bind_ortvalue_input(name, value)
        for name, array in given.items():
            binding.bind_cpu_input(name, array)
        for output in session.get_outputs():
            binding.bind_output(output.name)
        session.run_with_iobinding(binding)
        results = binding.copy_outputs_to_cpu()
        return {port.name: np.asarray(value) for port, value in zip(function.outputs, results, strict=True)}


class OnnxUpdate:
    """See `LocalUpdate`.

    With a rule a step reads the host's weights in place; what it makes of them itself is not fetched.
    """

    def __init__(
        self,
        session: Any,  # noqa: ANN401 - no types there
        function: Function,
        frozen: Mapping[str, Any],
        feeds: Tensors,
        rule: Rule | None = None,
    ) -> None:
        self._session, self._place, self._rule = session, _place(session), rule
        moved, kept, self._fresh = ports_by_role(function)
        turned = [port for port in moved if rule is None or port.name.startswith("buffers/")]
        now, then = ({port.name: _room(port, self._place) for port in turned} for _ in range(2))
        for name, value in now.items():
            value.update_inplace(np.asarray(feeds[name], order="C"))
        still = [port.name for port in (*moved, *kept) if port not in turned and not port.name.startswith("w/")]
        # onnxruntime reads these arrays in place, and before 1.30 it does not keep them alive: the update does.
        self._lent = {name: np.asarray(feeds[name], order="C") for name in still}
        read, written, self._weights = _lend(self._lent, self._place) | dict(frozen), {}, dict[str, Any]()
        if rule is not None:
            self._w, self._g = FlatPorts(function, "w"), FlatPorts(function, "velocity")
            self._w.fill(feeds)
            self._weights, written = _lend(self._w.views, self._place), _lend(self._g.views, "cpu")
            read |= self._weights
        self._loss = _room(next(port for port in function.outputs if port.name == "loss"), "cpu")
        # Each with what it writes; they take turns.
        self._next = (self._bound(function, read | now, written | then), then)
        self._after = (self._bound(function, read | then, written | now), now)
        self._now = now

    def step(self, feeds: Tensors) -> float:
        binding, turned = self._next
        for port in self._fresh:  # read in place as well, until the step is over
            self._lent[port.name] = np.asarray(feeds[port.name], order="C")
            binding.bind_cpu_input(port.name, self._lent[port.name])
        self._session.run_with_iobinding(binding)
        self._next, self._after, self._now = self._after, self._next, turned
        if self._rule is not None:
            self._rule(self._w.flat, self._g.flat)
            for name, value in self._weights.items() if self._place != "cpu" else ():  # there is a copy
                value.update_inplace(self._w.views[name])
        return float(self._loss.numpy())

    def read(self) -> dict[str, Array]:
        found = {name: np.array(value.numpy()) for name, value in self._now.items()}
        return found if self._rule is None else found | self._w.copies()

    def _bound(self, function: Function, read: Mapping[str, Any], write: Mapping[str, Any]) -> Any:  # noqa: ANN401
        binding = self._session.io_binding()
        for name, value in read.items():
            binding.bind_ortvalue_input(name, value)
        # By position: ONNX allows no output with an input's name.
        for port, output in zip(function.outputs, self._session.get_outputs(), strict=True):
            if port.name == "loss" or port.name in write:
                binding.bind_ortvalue_output(output.name, self._loss if port.name == "loss" else write[port.name])
        return binding


def runtime() -> Any:  # noqa: ANN401 - onnxruntime has no types
    """The onnxruntime module, its telemetry off unless the user set ORT_DISABLE_TELEMETRY otherwise."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read once, when the library is loaded
    try:
        import onnxruntime as ort
    except ImportError as missing:
        raise RuntimeMissing(f"onnxruntime cannot be imported: {missing}", hint=install_hint("onnx")) from missing
    return ort


@cache
def _share_arena() -> None:
    """One arena for all sessions of the process: what evaluates uses the memory that a step has left."""
    ort = runtime()
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg(0, -1, -1, -1))  # no limit, and its own defaults


def session(model: str | bytes, *, threads: int, device: str = "cpu") -> Any:  # noqa: ANN401 - no types there
    """A session over a file's path or bytes, on one of `engines.base.DEVICES`.

    Raises ProgramRefused for a file that names other files, RuntimeMissing for a device that was named and cannot be
    had, else what onnxruntime raises.
    """
    _check(model)
    for name in ("cuda",) if device == "auto" else (device,):
        opened = _accelerated(model, threads, name)
        if opened is not None:
            return opened
    if device in PROVIDERS:
        listed = ", ".join(runtime().get_available_providers())
        raise RuntimeMissing(
            f"onnxruntime {runtime().__version__} cannot use {device} here; it lists {listed}",
            hint="pip install onnxruntime-gpu instead of onnxruntime, with its CUDA libraries, or use device = 'cpu'",
        )
    return _opened(model, threads, ["CPUExecutionProvider"])


def _check(model: str | bytes) -> None:
    if isinstance(model, bytes):
        refuse_named_files(memoryview(model))
        return
    with Path(model).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    refuse_named_files(memoryview(mapped))  # an error keeps views of it, so it is not closed here


def _accelerated(model: str | bytes, threads: int, name: str) -> Any | None:  # noqa: ANN401 - no types there
    """A session whose first provider is the named one, or None where none can be had."""
    if name not in PROVIDERS or PROVIDERS[name][0] not in runtime().get_available_providers():
        return None
    runtime().set_default_logger_severity(4)  # a provider that fails is passed over or refused, not talked about
    # TensorRT leaves to CUDA what it lacks, and both leave to the CPU what they lack.
    wanted = [PROVIDERS[name], *([PROVIDERS["cuda"]] if name == "tensorrt" else []), ("CPUExecutionProvider", {})]
    try:
        opened = _opened(model, threads, wanted)
    except Exception:  # noqa: BLE001 - a driver that is listed and broken; onnxruntime's classes have no public base
        return None
    return opened if opened.get_providers()[0] == PROVIDERS[name][0] else None  # it may drop a provider in silence


def _opened(model: str | bytes, threads: int, providers: list[Any]) -> Any:  # noqa: ANN401 - no types there
    ort = runtime()
    _share_arena()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors only; they are raised anyway
    options.enable_mem_pattern = False  # it takes a step's memory a second time, and the step is no faster for it
    options.enable_mem_reuse = False  # a place that a later tensor of the same size takes is not free before
    options.add_session_config_entry("session.use_env_allocators", "1")
    return ort.InferenceSession(model, options, providers=providers, enable_fallback=0)  # no talk on stdout


def _session(path: Path, threads: int, device: str) -> Any:  # noqa: ANN401 - onnxruntime has no types
    version = runtime().__version__
    try:
        return session(str(path), threads=threads, device=device)
    except (ProgramRefused, RuntimeMissing):
        raise
    except Exception as wrong:  # onnxruntime's own classes have no public base
        text = raise_for_memory(wrong)
        raise ProgramRefused(
            f"onnxruntime {version} cannot load {path.name}: {text}",
            hint="use onnxruntime 1.19 or newer, or another engine",
        ) from wrong


def _agree(session: Any, function: Function, frozen: Iterable[str]) -> None:  # noqa: ANN401 - onnxruntime has no types
    given = [i.name for i in session.get_inputs()]
    wanted = [*(port.name for port in function.inputs), *frozen]
    if given != wanted or len(session.get_outputs()) != len(function.outputs):
        raise unfit("the ONNX file takes other inputs than its manifest says")


def _place(session: Any) -> str:  # noqa: ANN401 - onnxruntime has no types
    """Where the session's tensors live; TensorRT's are CUDA's."""
    return "cpu" if session.get_providers()[0] == "CPUExecutionProvider" else "cuda"


def _room(port: Port, place: str) -> Any:  # noqa: ANN401 - onnxruntime has no types
    return runtime().OrtValue.ortvalue_from_shape_and_type(port.shape, np.dtype(port.dtype), place, 0)


def _lend(arrays: Mapping[str, Array], place: str) -> dict[str, Any]:
    """The runtime's values of these arrays, which it reads and writes in place on the CPU."""
    return {name: runtime().OrtValue.ortvalue_from_numpy(array, place, 0) for name, array in arrays.items()}
