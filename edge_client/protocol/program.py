"""program.json: what a training program is, which containers hold it, and in which order they take their inputs.

Written by export/, read by devices. The manifest is signed, so the hashes in it vouch for the containers. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from edge_client.errors import Malformed
from edge_client.protocol import validators
from edge_client.protocol.blocks import KIND_LIMITS, Manifest, is_count
from edge_client.protocol.golden_run import Golden
from edge_client.protocol.samples.input_parts import Parts, read_parts
from edge_client.protocol.task import MAX_DIMS, Schema, TensorSpec
from edge_client.protocol.tensors import MAX_HEADER_BYTES

FORMAT_VERSION = 1
FUNCTIONS = ("step", "evaluate", "infer")
ENGINES = ("onnx", "litert", "pt2")  # the runtimes of devices: each a module of edge_client/engines/
FROZEN = "frozen"  # the file beside those of the functions that holds what no training changes
MAX_PROGRAM_BYTES = 1 << 20  # program.json
MAX_CONTAINER_BYTES = 256 << 20
MAX_FROZEN_VALUE_BYTES = 6  # of a file; a float32 has 4, and a single float16 with its scale 6
MAX_TEXT_CHARS = 512
MAX_PORTS = 32_768
BatchSize = int | Literal["any"]
Dimension = int | Literal["batch"]

_TEXT = validators.text(MAX_TEXT_CHARS, low=1)
_COUNT = validators.integer(1)
_SEED = validators.integer(0)
_SHA256 = validators.matching("[0-9a-f]{64}")
_SHAPE = validators.list_of(_COUNT, 0, MAX_DIMS)
_BATCH = validators.word_or("any", _COUNT)
_PORT_SHAPE = validators.list_of(validators.word_or("batch", _COUNT), 0, MAX_PORTS)
_NAMES = validators.list_of(_TEXT, 0, MAX_PORTS)
_NUMBER = validators.number(-math.inf)
_DTYPE = validators.one_of("float32", "float64")
_PORT_DTYPE = validators.one_of("float32", "float64", "int32", "int64")
_FUNCTION = validators.one_of(*FUNCTIONS)
_FILE = validators.one_of(*FUNCTIONS, FROZEN)
Loss = Literal["cross-entropy", "token-cross-entropy", "pixel-cross-entropy", "squared-error"]
LOSSES = get_args(Loss)
OWN = "own"  # the loss in program.json of a program with a loss of its user's; `targets` then says what y is
IGNORED = -100  # the label of a position that no loss and no count takes in; torch's ignore_index
_LOSS = validators.one_of(*LOSSES)
_LOSS_WORD = validators.one_of(*LOSSES, OWN)
_OPTIMIZER = validators.one_of("sgd")


@dataclass(frozen=True, kw_only=True)
class Port:
    """One input or output of a function, in the container's positional order; "batch" marks the batch dimension."""

    name: str
    dtype: str  # numpy's name: "float32", "float64"
    shape: tuple[Dimension, ...]


@dataclass(frozen=True, kw_only=True)
class Function:
    """One function of the program with its ordered inputs and outputs."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, kw_only=True)
class Container:
    """One file: its hash and size. A .tflite holds all functions, so one container may serve several."""

    sha256: str
    size: int

    def manifest(self, name: str, block: int) -> Manifest:
        """Of the file that program.json lists under `name`, to fetch it in blocks of `block` bytes."""
        return Manifest(sha256=self.sha256, size=self.size, block=block, kind=FROZEN if name == FROZEN else "container")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a compiler's user had the model from, so that the program can be checked against it. No device reads it."""

    model: str  # import path, "package.module:Class"
    args: Mapping[str, Any] | Sequence[Any]  # JSON: by name, or in order
    seed: int  # of the weights

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, "args": self.args, "seed": self.seed}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Origin:
        """Read what `to_json` wrote. Raises Malformed, KeyError or TypeError."""
        args = raw["args"]
        if not isinstance(args, dict | list):
            raise TypeError(f"args {args!r:.80} are neither an object nor a list")
        return Origin(model=_TEXT(raw["model"], "origin.model"), args=args, seed=_SEED(raw["seed"], "origin.seed"))


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """That the trained parameters are an adapter of peft, and how peft stores it. Bundles use it, and no device."""

    config: Mapping[str, Any]  # adapter_config.json
    tensors: Mapping[str, str]  # name in adapter_model.safetensors -> parameter of the schema

    def to_json(self) -> dict[str, Any]:
        return {"config": dict(self.config), "tensors": dict(self.tensors)}

    @staticmethod
    def from_json(raw: Mapping[str, Any], schema: Schema) -> Adapter:
        """Read what `to_json` wrote. Raises Malformed, KeyError, TypeError or ValueError."""
        tensors = {_TEXT(k, "a name of peft"): _TEXT(v, "a tensor's name") for k, v in raw["tensors"].items()}
        if not set(tensors.values()) <= {t.name for t in schema.tensors if t.role == "p"}:
            raise ValueError("an adapter of other tensors than the schema's parameters")
        return Adapter(config=dict(raw["config"]), tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The manifest of a training program.

    `containers[engine][function]` names the file for an engine ("onnx", "litert", "pt2"); `batch[engine]` is a fixed
    batch size or "any"; `parity[engine]` the largest difference of a step from torch at export time (relative).
    `golden[engine]` is a short run by which a device checks its runtime; programs of older compilers have none.
    `frozen`: tensors that no training changes. Where `containers[engine]` lists the one file that holds them, under
    FROZEN, each of this engine's files takes them after the inputs of its function, as inputs `frozen/<name>`.
    """

    model: str
    loss: Loss  # what y is; and how the loss is computed, unless `own_loss`
    optimizer: Literal["sgd"]
    schema: Schema
    input: tuple[int, ...]  # shape of one sample
    target: tuple[int, ...]  # shape of one sample's output: logits, or predicted numbers for squared error
    dtype: str
    functions: Mapping[str, Function]
    containers: Mapping[str, Mapping[str, Container]]
    batch: Mapping[str, BatchSize]
    opset: int
    versions: Mapping[str, str]
    parity: Mapping[str, float] = field(default_factory=dict)
    origin: Origin | None = None
    golden: Mapping[str, Golden] = field(default_factory=dict)
    own_loss: bool = False  # the loss is a function of the user's, which only the containers hold
    frozen: Schema | None = None
    adapter: Adapter | None = None
    parts: Parts = ()  # where a sample is several arrays in one row: what x holds

    def files(self, engine: str, functions: Iterable[str]) -> dict[str, Container]:
        """What an engine opens for these functions: the file of each, and that of the frozen tensors if it has one."""
        held = self.containers[engine]
        return {name: held[name] for name in (*functions, *([FROZEN] if FROZEN in held else []))}

    @property
    def class_axis(self) -> int:
        """The axis of one sample's output along which the classes lie."""
        return class_axis(self.loss, self.target)

    @property
    def classes(self) -> int:
        """Width of the logits."""
        return self.target[self.class_axis]

    @property
    def has_classes(self) -> bool:
        """Whether y holds class labels, so that a confusion matrix can be counted."""
        return self.loss != "squared-error"

    @property
    def truth(self) -> tuple[int, ...]:
        """Shape of one sample's class labels, () where it has one; else of its targets."""
        if self.has_classes:
            return self.target[: self.class_axis] + self.target[self.class_axis + 1 :]
        step = self.functions["step"].inputs if "step" in self.functions else ()
        return next((tuple(int(d) for d in p.shape[1:]) for p in step if p.name == "y"), self.target)

    @property
    def positions(self) -> int:
        """How many class labels a sample has; 1 where it has no classes."""
        return math.prod(self.truth) if self.has_classes else 1

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json(to_json(p)) == p`."""
        return {
            "v": FORMAT_VERSION,
            "model": self.model,
            **({"loss": OWN, "targets": self.loss} if self.own_loss else {"loss": self.loss}),
            "optimizer": self.optimizer,
            "schema": [[t.name, t.role, list(t.shape)] for t in self.schema.tensors],
            "classifier": list(self.schema.classifier),
            **({} if self.frozen is None else {FROZEN: [[t.name, list(t.shape)] for t in self.frozen.tensors]}),
            "input": list(self.input),
            **({"parts": [part.to_json() for part in self.parts]} if self.parts else {}),
            "target": list(self.target),
            "dtype": self.dtype,
            "functions": {
                name: {
                    "inputs": [[p.name, p.dtype, list(p.shape)] for p in f.inputs],
                    "outputs": [[p.name, p.dtype, list(p.shape)] for p in f.outputs],
                }
                for name, f in self.functions.items()
            },
            "containers": {
                engine: {name: {"sha256": c.sha256, "size": c.size} for name, c in files.items()}
                for engine, files in self.containers.items()
            },
            "batch": dict(self.batch),
            "opset": self.opset,
            "versions": dict(self.versions),
            "parity": dict(self.parity),
            "origin": None if self.origin is None else self.origin.to_json(),
            **({} if self.adapter is None else {"adapter": self.adapter.to_json()}),
            **({"golden": {engine: run.to_json() for engine, run in self.golden.items()}} if self.golden else {}),
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Program:
        """Read what `to_json` wrote, parsed by the strict reader. Raises Malformed("bad_program")."""
        if not isinstance(raw, Mapping):
            raise Malformed("bad_program", "program.json is not a JSON object")
        if not is_count(raw.get("v"), FORMAT_VERSION, FORMAT_VERSION):
            raise Malformed(
                "bad_version", f"program.json version {raw.get('v')!r:.40}; this side reads {FORMAT_VERSION}"
            )
        try:
            own = _LOSS_WORD(raw["loss"], "loss") == OWN
            loss = _LOSS(raw["targets"] if own else raw["loss"], "targets")
            program = Program(
                model=_TEXT(raw["model"], "model"),
                loss=loss,
                own_loss=own,
                optimizer=_OPTIMIZER(raw["optimizer"], "optimizer"),
                schema=Schema(
                    tuple(
                        TensorSpec(name=_TEXT(n, "a tensor's name"), role=r, shape=tuple(_SHAPE(s, "a tensor's shape")))
                        for n, r, s in raw["schema"]
                    ),
                    tuple(_NAMES(raw["classifier"], "classifier")),
                ),
                input=(shape := tuple(_SHAPE(raw["input"], "input"))),
                parts=read_parts(raw.get("parts"), shape),
                target=_target(raw["target"], loss),
                dtype=_DTYPE(raw["dtype"], "dtype"),
                functions={
                    _FUNCTION(name, "a function"): Function(inputs=_ports(f["inputs"]), outputs=_ports(f["outputs"]))
                    for name, f in raw["functions"].items()
                },
                containers={
                    _TEXT(engine, "an engine"): {
                        _FILE(name, "a container"): Container(
                            sha256=_SHA256(c["sha256"], "sha256"), size=_COUNT(c["size"], "size")
                        )
                        for name, c in files.items()
                    }
                    for engine, files in raw["containers"].items()
                },
                batch={_TEXT(k, "an engine"): _BATCH(v, "batch") for k, v in raw["batch"].items()},
                opset=_COUNT(raw["opset"], "opset"),
                versions={_TEXT(k, "a package"): _TEXT(v, "a version") for k, v in raw["versions"].items()},
                parity={_TEXT(k, "an engine"): float(_NUMBER(v, "parity")) for k, v in raw["parity"].items()},
                origin=None if raw["origin"] is None else Origin.from_json(raw["origin"]),
                frozen=_frozen(raw.get(FROZEN)),
            )
            _check_frozen(program)
            told = raw.get("adapter")
            adapter = None if told is None else Adapter.from_json(told, program.schema)
            program = replace(program, golden=_golden(program, raw.get("golden")), adapter=adapter)
        except Malformed as wrong:
            raise Malformed("bad_program", f"program.json: {wrong.message}") from wrong
        except (KeyError, TypeError, ValueError, AttributeError) as wrong:
            raise Malformed("bad_program", f"program.json: {wrong!r}") from wrong
        for engine, files in program.containers.items():
            if any(c.size > MAX_CONTAINER_BYTES for name, c in files.items() if name != FROZEN):
                raise Malformed("too_big", f"a container for {engine} is above {MAX_CONTAINER_BYTES} bytes")
        return program


def class_axis(loss: Loss, target: Sequence[int]) -> int:
    """The axis of one sample's output along which the classes lie: first for pixels, else last."""
    return 0 if loss == "pixel-cross-entropy" else len(target) - 1


def _frozen(rows: Any) -> Schema | None:  # noqa: ANN401 - JSON
    if rows is None:
        return None
    return Schema(
        tuple(
            TensorSpec(name=_TEXT(n, "a frozen tensor"), role="p", shape=tuple(_SHAPE(s, "a tensor's shape")))
            for n, s in rows
        )
    )


def _check_frozen(program: Program) -> None:
    """One file for every engine that takes it, no larger than some codec makes it."""
    held = {files[FROZEN] for files in program.containers.values() if FROZEN in files}
    if not held:
        return
    if len(held) > 1 or program.frozen is None:
        raise ValueError("frozen tensors need one file and a list of what it holds")
    (file,) = held
    limit = min(KIND_LIMITS[FROZEN], MAX_FROZEN_VALUE_BYTES * program.frozen.size + MAX_HEADER_BYTES + 8)
    if file.size > limit:
        raise Malformed("too_big", f"frozen tensors in {file.size} bytes, at most {limit}")


def _golden(program: Program, raw: Any) -> dict[str, Golden]:  # noqa: ANN401 - JSON
    """Runs of engines that the program has a step for, with the batch that they take. Absent, or null: none."""
    if raw is None:
        return {}
    buffers = any(t.role == "b" for t in program.schema.tensors)
    found = {_TEXT(engine, "an engine"): Golden.from_json(run, buffers=buffers) for engine, run in raw.items()}
    for engine, run in found.items():
        if "step" not in program.containers.get(engine, {}) or "step" not in program.functions:
            raise ValueError(f"a golden run for {engine!r:.40}, which has no step")
        if program.batch.get(engine) not in ("any", run.batch):
            raise ValueError(f"a golden run of batches of {run.batch} for {engine!r:.40}, which takes others")
    return found


def _target(values: object, loss: object) -> tuple[int, ...]:
    target = tuple(_SHAPE(values, "target"))
    single, positions = loss == "cross-entropy", loss in {"token-cross-entropy", "pixel-cross-entropy"}
    if not target or (single and len(target) != 1) or (positions and len(target) == 1):
        raise ValueError(f"a target of shape {target} does not fit the loss {loss!r:.40}")
    return target


def _ports(rows: object) -> tuple[Port, ...]:
    if not isinstance(rows, list) or len(rows) > MAX_PORTS:
        raise ValueError("expected a list of ports")
    return tuple(
        Port(
            name=_TEXT(name, "a port's name"),
            dtype=_PORT_DTYPE(dtype, "a port's dtype"),
            shape=tuple(_PORT_SHAPE(shape, "a port's shape")),
        )
        for name, dtype, shape in rows
    )
