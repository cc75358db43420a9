"""A compiled program as a folder with readable file names, for users and their own scripts.

    program.json                             the manifest: ports in order, hashes, measured differences
    step.onnx  evaluate.onnx  infer.onnx     one function per file, any batch size
    program.tflite                           every function, a signature each, one batch size
    step.pt2   evaluate.pt2   infer.pt2      for torch
    frozen.safetensors                       the frozen parameters of a model that has some, inputs of .onnx and .pt2
    weights.npz                              the model's own weights under the names of the inputs (w/..., buffers/...)

A file with several functions has the stem "program". program.json determines all names.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data.readers import reading_arrays
from edge_client.errors import ConfigError, Malformed, UsageError
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.program import FROZEN, FUNCTIONS, MAX_PROGRAM_BYTES, Program
from edge_client.protocol.task import Array, Schema
from export.foreign_files import read_plain_file

MANIFEST_FILE, WEIGHTS_FILE, FROZEN_FILE = "program.json", "weights.npz", "frozen.safetensors"
PREFIXES = {"p": "w", "b": "buffers"}  # of the ports, by the role of a tensor
FILE_ENDINGS = {"onnx": "onnx", "litert": "tflite", "pt2": "pt2"}


@dataclass(frozen=True, kw_only=True)
class ContainerFile:
    """One container: its name in the folder and what it is for. The frozen parameters' has no engine and functions."""

    name: str
    engine: str
    functions: tuple[str, ...]
    sha256: str
    size: int


def container_files(program: Program) -> list[ContainerFile]:
    """The containers of a program, in the order of FILE_ENDINGS and FUNCTIONS, then the frozen parameters."""
    out, frozen = [], None
    for engine in sorted(program.containers, key=_place(FILE_ENDINGS)):
        containers = program.containers[engine]
        shared: dict[str, list[str]] = {}
        frozen = containers.get(FROZEN, frozen)
        for function in sorted(containers.keys() - {FROZEN}, key=_place(FUNCTIONS)):
            shared.setdefault(containers[function].sha256, []).append(function)
        for sha256, functions in shared.items():
            stem = functions[0] if len(functions) == 1 else "program"
            size = containers[functions[0]].size
            name = f"{stem}.{FILE_ENDINGS.get(engine, engine)}"
            out.append(ContainerFile(name=name, engine=engine, functions=tuple(functions), sha256=sha256, size=size))
    if frozen is not None:
        out.append(ContainerFile(name=FROZEN_FILE, engine="", functions=(), sha256=frozen.sha256, size=frozen.size))
    return out


def _place(usual: Iterable[str]) -> Callable[[str], tuple[int, str]]:
    """A sort key: names in the order of `usual`, unknown names last."""
    places = {name: i for i, name in enumerate(usual)}
    return lambda name: (places.get(name, len(places)), name)


def check_unused(out: Path) -> None:
    """Raises UsageError unless `out` is a folder that does not exist yet, or an empty one."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", hint="give a folder that does not exist yet")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"folder {out} is not empty", hint="give a new folder, or remove this one first")


def write_folder(
    out: Path, program: Program, containers: Mapping[str, bytes], weights: Mapping[str, Array]
) -> dict[str, int]:
    """`containers`: sha256 -> bytes; `weights` under the schema's names. -> name -> size in bytes.

    program.json is written last.
    """
    check_unused(out)
    out.mkdir(parents=True, exist_ok=True)
    blobs = {f.name: containers[f.sha256] for f in container_files(program)}
    blobs[WEIGHTS_FILE] = _npz(
        {f"{PREFIXES[t.role]}/{t.name}": np.asarray(weights[t.name], program.dtype) for t in program.schema.tensors}
    )
    blobs[MANIFEST_FILE] = canonical_json(program.to_json())
    for name, data in blobs.items():
        (out / name).write_bytes(data)
    return {name: len(data) for name, data in blobs.items()}


@dataclass(frozen=True, kw_only=True)
class ProgramFolder:
    """A folder whose every container has the hash that program.json says."""

    program: Program
    blobs: Mapping[str, bytes] = field(repr=False)  # by ContainerFile.name


def read_folder(path: Path) -> ProgramFolder:
    """Read a folder and check its hashes.

    Raises ConfigError for a folder that holds no program, Malformed for an altered one.
    """
    try:
        raw = read_plain_file(path / MANIFEST_FILE, MAX_PROGRAM_BYTES)
    except OSError as missing:
        raise ConfigError(
            f"{path} holds no program: {MANIFEST_FILE}: {missing.strerror}", hint="give the folder that --out wrote"
        ) from None
    program = Program.from_json(parse_json(raw, MAX_PROGRAM_BYTES))
    return ProgramFolder(program=program, blobs={f.name: _container(path, f) for f in container_files(program)})


def read_weights(path: Path, schema: Schema, dtype: str = "float32") -> dict[str, Array]:
    """The model's own weights in a folder, under the names of the schema, as numbers of the program's dtype.

    Raises ConfigError where there are none, Malformed for those of another model.
    """
    try:
        with (
            (path / WEIGHTS_FILE).open("rb") as file,
            reading_arrays(),
            np.load(file, allow_pickle=False) as held,
        ):
            found = {n.partition("/")[2]: held[n].astype(dtype, casting="same_kind") for n in held.files}
    except (OSError, ValueError, TypeError) as wrong:  # TypeError: a .npy file, or no real numbers
        raise ConfigError(f"{path / WEIGHTS_FILE} cannot be read: {wrong}", hint="compile the program again") from None
    if {name: value.shape for name, value in found.items()} != {t.name: t.shape for t in schema.tensors}:
        raise Malformed("bad_schema", f"{WEIGHTS_FILE} holds the weights of another model than {MANIFEST_FILE} names")
    return found


def _container(path: Path, file: ContainerFile) -> bytes:
    if Path(file.name).name != file.name or "\0" in file.name:
        raise Malformed("bad_program", f"{file.name!r} lies outside the folder")
    try:
        data = read_plain_file(path / file.name, file.size)
    except OSError as missing:
        raise Malformed("bad_program", f"{file.name}: {missing.strerror}") from None
    if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
        raise Malformed("bad_hash", f"{file.name} is not the file that {MANIFEST_FILE} names")
    return data


def _npz(arrays: Mapping[str, Array]) -> bytes:
    buffer = io.BytesIO()
    named: dict[str, Any] = dict(arrays)  # numpy's own keyword arguments have other types
    np.savez(buffer, **named)
    return buffer.getvalue()
