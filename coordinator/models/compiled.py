"""The training program of a model; one of ours that was compiled here before comes from the user's cache as a whole.

A container from the cache (export/compiler/container_cache.py) is traced and compared with torch again, since a user's
model may change while its name stays. Ours change with our source, which is part of the key here, beside the values of
the model's tensors, the versions of torch, converters and runtimes, and the kind of machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
from collections.abc import Sequence
from zipfile import ZipFile

import torch

from coordinator.models.registry import Model
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.program import MAX_PROGRAM_BYTES, Program
from export.compiler.container_cache import cached_file, constants_hash, source_hash, tool_versions
from export.compiler.containers import Progress, log_progress
from export.compiler.program import CompilerOutput, compile_program
from export.compiler.program_functions import tensors_of

FOLDERS = ("coordinator/models", "edge_client", "export")  # what a program depends on
MANIFEST = "program.json"  # in a zip, beside the containers by their sha256


def compiled_model(
    model: Model, *, batch: int, engines: Sequence[str], progress: Progress = log_progress
) -> CompilerOutput:
    """As `compile_program` of the model. `progress` is not called where the cache has it."""

    def compiled() -> CompilerOutput:
        facts = model.program_facts
        return compile_program(model.module, **facts, batch=batch, engines=engines, progress=progress)

    if not model.built_in or model.own_loss is not None:
        return compiled()
    return unpacked(cached_file(program_key(model, batch, engines), lambda: packed(compiled())))


def program_key(
    model: Model, batch: int, engines: Sequence[str], *, dtype: str = "float32", folders: Sequence[str] = FOLDERS
) -> str:
    """Under which the program is cached. `folders` have all of our source that it depends on."""
    tensors = tensors_of(model.module)
    parts = [part.to_json() for part in model.parts]
    told = {
        "program": model.program_facts | {"parts": parts, "batch": batch, "dtype": dtype},
        "tensors": [list(tensors), constants_hash([*tensors.values()])],
        "versions": {engine: tool_versions(engine) for engine in engines},
        "machine": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "source": source_hash(*folders),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def packed(made: CompilerOutput) -> bytes:
    """A program and its files as one."""
    archive = io.BytesIO()
    with ZipFile(archive, "w") as members:
        members.writestr(MANIFEST, canonical_json(made.program.to_json()))
        for sha256, data in made.files.items():
            members.writestr(sha256, data)
    return archive.getvalue()


def unpacked(data: bytes) -> CompilerOutput:
    """What `packed` packed; the file is of this user's own."""
    with ZipFile(io.BytesIO(data)) as members:
        files = {name: members.read(name) for name in members.namelist()}
    program = Program.from_json(parse_json(files.pop(MANIFEST), MAX_PROGRAM_BYTES))
    return CompilerOutput(program=program, files=files)
