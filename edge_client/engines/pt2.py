"""Training programs on torch, for devices that have it: any batch size, CPU or CUDA.

A local update keeps its tensors on the device from step to step. torch is imported only when a program is opened.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import math
import re
import threading
import typing
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from edge_client.engines.base import FlatPorts, Rule, ports_by_role
from edge_client.engines.direct_calls import direct_forward
from edge_client.engines.frozen import open_frozen
from edge_client.errors import ProgramRefused, RuntimeMissing, raise_for_memory
from edge_client.malloc import keep_freed_memory
from edge_client.protocol.program import FROZEN, Function, Port, Program
from edge_client.protocol.task import Array, Tensors
from edge_client.rare_collection import rare_collection

MAX_CONFIG_BYTES = 1 << 20
# What a program's archive holds; torch also reads others, which it unpickles, or loads as a library.
_MEMBERS = re.compile(
    r"models/model\.json|archive_format|archive_version|byteorder|\.data/\w+"
    r"|data/(weights|constants)/(model_\w+_config\.json|(weight|tensor)_\d+)"
)
# What the texts of a graph may be: torch makes Python of most of them. A size is arithmetic over symbols, as sympy
# writes it; a call may be any name below `torch` for torch, as `torch.os.system`. Some operators read files, print, or
# compile a text for a GPU.
_NAME = re.compile(r"[\w.+\-/: ]*")  # no call can be written so
_PLACE = re.compile(r'[^"\\\x00-\x1f]*')  # of a tensor or layer in its module, which torch writes between quotes
_SIZE = re.compile(
    r"(?:'(?:[a-z]+\d+|[\d.+-]+(?:e[+-]?\d{1,3})?)'|[a-z]+=(?:True|False|\d{1,3})\b|(?:Add|Mul|Pow(?:ByNatural)?|FloatPow"
    r"|Max|Min|Abs|(?:Python)?Mod|(?:Floor|Clean|Ceil|IntTrue|FloatTrue)Div|ModularIndexing|Where|Identity|And|Or|Not"
    r"|(?:Ceil|Floor|Trunc|Round)ToInt|(?:TruncTo|To)?Float|Rational|Integer|Symbol|(?:Une|E)quality|(?:Strict)?LessThan"
    r"|(?:Strict)?GreaterThan|Piecewise|ExprCondPair|[A-Z][A-Za-z]+Fn_\w+)\b|[a-z]+\d+\b|[\d\s()+*/%,<>=-])*"
)
_MAX_SIZE_CHARS, _MAX_DIGITS, _MAX_BITS = 20_000, 40, 65_536  # of a size; sympy computes its numbers when it reads them
_CALLED = re.compile(
    r"torch\.ops\.(?:aten|prims|higher_order|torchvision)\.(?!from_file\b|inline_asm|print\b)\w+(?:\.\w+)?"
    r"|torch\._?sym_\w+|math\.\w+"
    r"|torch\._functorch\.predispatch\.\w+|_operator\.(?!call\b|\w*getter\b|methodcaller\b)\w+"
)
_TREE = re.compile(r'(?!.*default_factory)(?:[\w\s.,:"\[\]{}]|\\+")*')  # of arguments, itself JSON
_TEXTS = {"target": _CALLED, "as_operator": _CALLED, "in_spec": _TREE, "out_spec": _TREE}
_TEXTS |= dict.fromkeys(("fqn", "parameter_name", "buffer_name", "tensor_constant_name"), _PLACE)
_QUOTED = ("metadata", "as_string", "as_strings")  # which are no code
_local = threading.local()
_LOADING = threading.RLock()  # torch.export.load keeps global state while it reads; several devices may share a process


def open_program(program: Program, files: Mapping[str, Path], *, threads: int, device: str) -> Pt2Engine:
    """One graph per file; see engines/base.py for what it raises. `threads` and malloc's settings are the process's."""
    try:
        with rare_collection():
            import torch
    except ImportError as missing:
        raise RuntimeMissing(
            f"torch cannot be imported: {missing}", hint="pip install torch, or use engine = 'onnx'"
        ) from missing
    torch.set_num_threads(threads)
    keep_freed_memory()
    place = _place(device)
    with _LOADING, rare_collection():  # the first file makes torch import its compiler
        graphs = {name: load_graph(path, place) for name, path in files.items() if name != FROZEN}
        return Pt2Engine(program, graphs, open_frozen(program, files), place)


class Pt2Engine:
    """See `Engine`."""

    name = "pt2"

    def __init__(self, program: Program, graphs: Mapping[str, Any], frozen: Tensors, place: str) -> None:
        import torch

        self.fixed_batch = None if program.batch["pt2"] == "any" else int(program.batch["pt2"])
        self.place = place
        held = [torch.from_numpy(array).to(place) for array in frozen.values()]
        self._calls = {name: _Call(graph, program.functions[name], held, place) for name, graph in graphs.items()}

    def update(self, feeds: Tensors, rule: Rule | None = None) -> Pt2Update:
        return (
            Pt2Update(self._calls["step"], feeds) if rule is None else Pt2RuledUpdate(self._calls["step"], feeds, rule)
        )

    def evaluate(self, feeds: Tensors) -> dict[str, Array]:
        call = self._calls["evaluate"]
        results = call(call.tensors(call.function.inputs, feeds))
        return {name: value.numpy(force=True) for name, value in results.items()}


class Pt2Update:
    """See `LocalUpdate`."""

    def __init__(self, call: _Call, feeds: Tensors) -> None:
        moved, kept, self._fresh = ports_by_role(call.function)
        self._call, self._moved = call, [port.name for port in moved]
        self._held = call.tensors((*moved, *kept), feeds)

    def step(self, feeds: Tensors) -> float:
        results = self._call(self._held | self._call.tensors(self._fresh, feeds))
        self._held |= {name: results[name] for name in self._moved}
        return float(results["loss"])

    def read(self) -> dict[str, Array]:
        return {name: np.array(self._held[name].numpy(force=True)) for name in self._moved}


class Pt2RuledUpdate(Pt2Update):
    """The weights are one tensor on the device, which the rule moves; the graph reads views of it."""

    def __init__(self, call: _Call, feeds: Tensors, rule: Rule) -> None:
        import torch

        super().__init__(call, feeds)
        self._rule, given, gradient = rule, FlatPorts(call.function, "w"), FlatPorts(call.function, "velocity")
        given.fill(feeds)
        self._w, self._g = (torch.tensor(ports.flat, device=call.place) for ports in (given, gradient))
        sizes = [view.size for view in given.views.values()]
        self._gradients = dict(zip(gradient.views, torch.split(self._g, sizes), strict=True))
        weights = zip(given.views.items(), torch.split(self._w, sizes), strict=True)
        self._held |= {name: part.view(view.shape) for (name, view), part in weights}
        self._moved = [name for name in self._moved if name.startswith("buffers/")]

    def step(self, feeds: Tensors) -> float:
        results = self._call(self._held | self._call.tensors(self._fresh, feeds))
        for name, into in self._gradients.items():
            into.copy_(results[name].reshape(-1))
        self._held |= {name: results[name] for name in self._moved}
        on_host = self._call.place == "cpu"  # numpy's views of the same memory: parts of them stay in the cache
        self._rule(*((t.numpy() for t in (self._w, self._g)) if on_host else (self._w, self._g)))
        return float(results["loss"])

    def read(self) -> dict[str, Array]:
        weights = {name: value for name, value in self._held.items() if name.startswith("w/")}
        return super().read() | {name: np.array(value.numpy(force=True)) for name, value in weights.items()}


class _Call:
    """A graph, the manifest's function that it implements, and the frozen tensors."""

    def __init__(self, graph: Any, function: Function, frozen: Sequence[Any], place: str) -> None:  # noqa: ANN401 - a generated module
        self.function, self._frozen, self.place = function, frozen, place
        self._forward = direct_forward(graph)

    def tensors(self, ports: Iterable[Port], feeds: Tensors) -> dict[str, Any]:
        """On the device. torch.tensor copies: a graph may give an input back unchanged, and feeds are the caller's."""
        import torch

        return {port.name: torch.tensor(np.asarray(feeds[port.name]), device=self.place) for port in ports}

    def __call__(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        with torch.inference_mode():
            # Not the module itself: it would check shapes and symbols in each step, which the manifest has settled.
            results = self._forward(*(feeds[port.name] for port in self.function.inputs), *self._frozen)
        return {port.name: value for port, value in zip(self.function.outputs, results, strict=True)}


def _place(device: str) -> str:
    """The torch device for one of `engines.base.DEVICES`."""
    import torch

    works = torch.cuda.is_available()
    if device == "tensorrt" or (device == "cuda" and not works):
        raise RuntimeMissing(
            f"torch {torch.__version__} cannot use {device} here",
            hint="use engine = 'onnx', or device = 'cuda' or 'cpu'"
            if device == "tensorrt"
            else "install a torch build for CUDA, or use device = 'cpu'",
        )
    if device == "cpu" or not works:
        return "cpu"
    torch.backends.cudnn.allow_tf32 = False  # full float32, as everywhere else
    return "cuda"


def load_graph(path: Path, place: str) -> Any:  # noqa: ANN401 - a generated module
    """The graph of a container on a torch device, its constants too. Raises ProgramRefused."""
    import torch
    from torch.export.passes import move_to_device_pass

    try:
        refuse_code(file := path.read_bytes(), path.name)
        exported = read_exported(file)
        return (exported if place == "cpu" else move_to_device_pass(exported, place)).module()
    except ProgramRefused:
        raise
    except Exception as wrong:  # torch raises many kinds for a file that it cannot read
        text = raise_for_memory(wrong)
        raise ProgramRefused(
            f"torch {torch.__version__} cannot load {path.name}: {text}",
            hint="use the torch version that program.json names, or another engine",
        ) from wrong


def read_exported(file: bytes) -> Any:  # noqa: ANN401 - torch's ExportedProgram
    """The exported program of a .pt2 file. Raises what torch raises for a file that it cannot read."""
    import torch

    kept: dict[bytes, Any] | None = getattr(_local, "kept", None)
    name = hashlib.sha256(file).digest()
    if kept is not None and name in kept:
        return kept[name]
    with _LOADING, _remembered_types():
        exported = torch.export.load(io.BytesIO(file))
    if kept is not None:
        kept[name] = exported
    return exported


@contextmanager
def files_read_once() -> Iterator[None]:
    """In this thread a file is read once: the compiler runs each file, and opens the engine with some of them."""
    _local.kept = {}
    try:
        yield
    finally:
        del _local.kept


@contextmanager
def _remembered_types() -> Iterator[None]:
    """The types of each class of a file's schema are looked up once.

    Torch does so for each of its thousands of records, two fifths of the time of opening a file (torch 2.13). A torch
    that reads files in another way is left alone.
    """
    try:
        from torch._export.serde import serialize

        reader: Any = serialize
        used = reader.typing  # the module `typing`
    except (ImportError, AttributeError):
        yield
        return

    def hints(cls: Any, globalns: dict[str, Any] | None = None) -> dict[str, Any]:  # noqa: ANN401 - any class
        if cls not in known:
            known[cls] = typing.get_type_hints(cls, globalns=globalns)
        return known[cls]

    known: dict[Any, dict[str, Any]] = {}
    reader.typing = SimpleNamespace(**{**vars(used), "get_type_hints": hints})
    try:
        yield
    finally:
        reader.typing = used


def refuse_code(file: bytes, name: str) -> None:
    """Raise ProgramRefused for an archive of which torch would run more than operators on tensors.

    Programs carry no weights and no objects, so nothing may be unpickled when torch loads it. Its graph calls torch's
    operators, of which none reads a file, its sizes are arithmetic, and its names are plain.

    Members are those that torch's own reader sees. Of a file that it cannot load, torch takes those that `zipfile`
    sees: they must be the same.
    """
    import torch

    hint = "compile the program with fedcenters"
    reader = torch._C.PyTorchFileReader(io.BytesIO(file))  # noqa: SLF001 - torch has no other name for it
    members = sorted(reader.get_all_records())  # without the folder
    for member in members:
        no_samples = member == "data/sample_inputs/model.pt" and not reader.get_record(member)
        if not no_samples and not _MEMBERS.fullmatch(member):
            raise ProgramRefused(f"{name} holds {member}, which no program has", hint=hint)
        if member == "models/model.json":
            _refuse_texts(json.loads(reader.get_record(member)), name)
        if not member.endswith("_config.json"):
            continue
        config = reader.get_record(member)
        if len(config) > MAX_CONFIG_BYTES:
            raise ProgramRefused(f"{name}: {member} is too big", hint="compile the program again")
        if any(entry.get("use_pickle") for entry in json.loads(config).get("config", {}).values()):
            raise ProgramRefused(f"{name} holds pickled objects", hint=hint)
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        if sorted(path.partition("/")[2] for path in archive.namelist()) != members:
            raise ProgramRefused(f"{name} has other members for zipfile than for torch", hint=hint)


def _refuse_texts(graph: object, file: str) -> None:
    """Raise ProgramRefused for a graph with a text, of which torch may make Python, that programs do not have."""
    left = [("", graph)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += [("", name) for name in value] + [item for item in value.items() if not _is_quoted(*item)]
        elif isinstance(value, list):
            left += [(key, item) for item in value]
        elif isinstance(value, str) and not (
            _is_size(value) if key == "expr_str" else _TEXTS.get(key, _NAME).fullmatch(value)
        ):
            told = f"{file} has the {key or 'name'} {value!r:.80}, which no program has"
            raise ProgramRefused(told, hint="compile the program with fedcenters")


def _is_size(text: str) -> bool:
    """Whether it is arithmetic whose numbers stay small, however powers are nested: 9**9**9 has no end."""
    if len(text) > _MAX_SIZE_CHARS or not _SIZE.fullmatch(text):
        return False
    try:
        return _bits(ast.parse(text.strip(), mode="eval").body) <= _MAX_BITS
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _bits(node: ast.AST) -> float:
    """At most how many bits sympy's numbers have for it; infinity where nothing bounds them."""
    if isinstance(node, ast.Constant):
        digits = len(str(node.value))
        return math.inf if digits > _MAX_DIGITS else 4 * digits
    parts = list(ast.iter_child_nodes(node))
    shifts = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.LShift, ast.RShift))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return (1 + _bits(node.left)) * _exponent(node.right)
    if isinstance(node, ast.Call) and (name := getattr(node.func, "id", "")):
        if "Pow" in name and node.args:
            return (1 + sum(map(_bits, parts))) * math.prod(map(_exponent, node.args[1:]))
        shifts = name == "Float" and len(node.args) > 1  # the digits that it computes
    return math.inf if shifts else 1 + sum(map(_bits, parts))


def _exponent(power: ast.AST) -> float:
    """Its amount, and at least 1, where it is a number; else infinity."""
    if isinstance(power, ast.UnaryOp):
        return _exponent(power.operand)
    if isinstance(power, ast.Call) and getattr(power.func, "id", "") in ("Integer", "Float", "Rational") and power.args:
        return _exponent(power.args[0])
    try:
        return max(1.0, abs(float(getattr(power, "value", ""))))
    except (TypeError, ValueError):
        return math.inf


def _is_quoted(key: str, value: Any) -> bool:  # noqa: ANN401 - any JSON
    """Whether torch makes no code of it. Tensors and sizes may have such a key as their name, but are no texts."""
    texts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return key in _QUOTED and all(isinstance(text, str) for text in texts)
