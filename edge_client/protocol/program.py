"""program.json: what a training program is, which containers hold it, and in which order they take their inputs.

Written by export/, read by devices. The manifest is signed, so the hashes in it vouch for the containers. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edge_client.errors import Malformed
from edge_client.protocol.golden_run import Golden
from edge_client.protocol.task import MAX_DIMS, Schema, TensorSpec

FORMAT_VERSION = 1
FUNCTIONS = ("step", "evaluate", "infer")
MAX_PROGRAM_BYTES = 1 << 20  # program.json
MAX_CONTAINER_BYTES = 256 << 20
MAX_TEXT_CHARS = 512
MAX_PORTS = 32_768
HEX_DIGITS = 64
BatchSize = int | Literal["any"]
Dimension = int | Literal["batch"]


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


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a compiler's user had the model from, so that the program can be checked against it. No device reads it."""

    model: str  # import path, "package.module:Class"
    args: Mapping[str, Any] | Sequence[Any]  # JSON: by name, or in order
    seed: int  # of the weights

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {"model": self.model, "args": self.args, "seed": self.seed}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Origin:
        """Read what `to_json` wrote. Raises ValueError, KeyError or TypeError."""
        args, seed = raw["args"], raw["seed"]
        if not isinstance(args, dict | list):
            raise TypeError(f"args {args!r:.80} are neither an object nor a list")
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise ValueError(f"seed {seed!r:.80}")
        return Origin(model=_text(raw["model"]), args=args, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The manifest of a training program.

    `containers[engine][function]` names the file for an engine ("onnx", "litert", "pt2"); `batch[engine]` is a fixed
    batch size or "any"; `parity[engine]` the largest difference of a step from torch at export time (relative).
    `golden[engine]` is a short run by which a device checks its runtime; programs of older compilers have none.
    """

    model: str
    loss: Literal["cross-entropy", "squared-error"]
    optimizer: Literal["sgd"]
    schema: Schema
    input: tuple[int, ...]  # shape of one sample
    target: tuple[int, ...]  # shape of one sample's logits (one width), or of its targets for squared error
    dtype: str
    functions: Mapping[str, Function]
    containers: Mapping[str, Mapping[str, Container]]
    batch: Mapping[str, BatchSize]
    opset: int
    versions: Mapping[str, str]
    parity: Mapping[str, float] = field(default_factory=dict)
    origin: Origin | None = None
    golden: Mapping[str, Golden] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        """Width of the logits."""
        return self.target[-1]

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json(to_json(p)) == p`."""
        return {
            "v": FORMAT_VERSION,
            "model": self.model,
            "loss": self.loss,
            "optimizer": self.optimizer,
            "schema": [[t.name, t.role, list(t.shape)] for t in self.schema.tensors],
            "classifier": list(self.schema.classifier),
            "input": list(self.input),
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
            **({"golden": {engine: run.to_json() for engine, run in self.golden.items()}} if self.golden else {}),
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Program:
        """Read what `to_json` wrote, parsed by the strict reader. Raises Malformed("bad_program")."""
        if not isinstance(raw, Mapping):
            raise Malformed("bad_program", "program.json is not a JSON object")
        if raw.get("v") != FORMAT_VERSION:
            raise Malformed(
                "bad_version", f"program.json version {raw.get('v')!r:.40}; this side reads {FORMAT_VERSION}"
            )
        try:
            program = Program(
                model=_text(raw["model"]),
                loss=_one_of(raw["loss"], "cross-entropy", "squared-error"),
                optimizer=_one_of(raw["optimizer"], "sgd"),
                schema=Schema(
                    tuple(TensorSpec(name=_text(n), role=r, shape=_dims(s)) for n, r, s in raw["schema"]),
                    tuple(_text(n) for n in raw["classifier"]),
                ),
                input=_dims(raw["input"]),
                target=_target(raw["target"], raw["loss"]),
                dtype=_one_of(raw["dtype"], "float32", "float64"),
                functions={
                    _one_of(name, *FUNCTIONS): Function(inputs=_ports(f["inputs"]), outputs=_ports(f["outputs"]))
                    for name, f in raw["functions"].items()
                },
                containers={
                    _text(engine): {
                        _one_of(name, *FUNCTIONS): Container(sha256=_hash(c["sha256"]), size=_count(c["size"]))
                        for name, c in files.items()
                    }
                    for engine, files in raw["containers"].items()
                },
                batch={_text(k): "any" if v == "any" else _count(v) for k, v in raw["batch"].items()},
                opset=_count(raw["opset"]),
                versions={_text(k): _text(v) for k, v in raw["versions"].items()},
                parity={_text(k): float(v) for k, v in raw["parity"].items()},
                origin=None if raw["origin"] is None else Origin.from_json(raw["origin"]),
            )
            program = replace(program, golden=_golden(program, raw.get("golden")))
        except (KeyError, TypeError, ValueError, AttributeError) as wrong:
            raise Malformed("bad_program", f"program.json: {wrong!r}") from wrong
        for engine, files in program.containers.items():
            if any(c.size > MAX_CONTAINER_BYTES for c in files.values()):
                raise Malformed("too_big", f"a container for {engine} is above {MAX_CONTAINER_BYTES} bytes")
        return program


def _golden(program: Program, raw: Any) -> dict[str, Golden]:  # noqa: ANN401 - JSON
    """Runs of engines that the program has a step for, with the batch that they take. Absent, or null: none."""
    if raw is None:
        return {}
    buffers = any(t.role == "b" for t in program.schema.tensors)
    found = {_text(engine): Golden.from_json(run, buffers=buffers) for engine, run in raw.items()}
    for engine, run in found.items():
        if "step" not in program.containers.get(engine, {}) or "step" not in program.functions:
            raise ValueError(f"a golden run for {engine!r:.40}, which has no step")
        if program.batch.get(engine) not in ("any", run.batch):
            raise ValueError(f"a golden run of batches of {run.batch} for {engine!r:.40}, which takes others")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT_CHARS:
        raise ValueError(f"expected a short text, got {value!r:.80}")
    return value


def _one_of(value: object, *allowed: str) -> Any:  # noqa: ANN401 - the caller's Literal
    if value not in allowed:
        raise ValueError(f"{value!r:.80} is none of {allowed}")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**53:
        raise ValueError(f"expected a positive integer, got {value!r:.80}")
    return value


def _dims(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > MAX_DIMS:
        raise ValueError(f"expected a shape, got {values!r:.80}")
    return tuple(_count(v) for v in values)


def _target(values: object, loss: object) -> tuple[int, ...]:
    target = _dims(values)
    if not target or (loss == "cross-entropy" and len(target) != 1):
        raise ValueError(f"a target of shape {target} does not fit the loss {loss!r:.40}")
    return target


def _hash(value: object) -> str:
    if not isinstance(value, str) or len(value) != HEX_DIGITS or set(value) - set("0123456789abcdef"):
        raise ValueError(f"expected a sha256, got {value!r:.80}")
    return value


def _ports(rows: object) -> tuple[Port, ...]:
    if not isinstance(rows, list) or len(rows) > MAX_PORTS:
        raise ValueError("expected a list of ports")
    return tuple(
        Port(
            name=_text(name),
            dtype=_one_of(dtype, "float32", "float64", "int32", "int64"),
            shape=tuple("batch" if d == "batch" else _count(d) for d in shape),
        )
        for name, dtype, shape in rows
    )
