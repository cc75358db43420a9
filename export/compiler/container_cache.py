"""Compiled containers in the user's cache folder, so that the same graph is not exported twice.

    ~/.cache/fedcenters/containers/<key>     the sha256 of the file (32 bytes), then the file

A file is a container, or all of a program of ours (coordinator/models/compiled.py).

A key is the hash of what an exporter reads: the traced graph with its constants, the ports, the batch size, the engine,
the versions of the converters and our own source. Trained weights are inputs of a container and not part of its key.
The compiler compares a file from the cache with torch as it does a new one. FEDCENTERS_CACHE names another folder for
everything that is cached, and `off` turns the cache off. A folder that cannot be written to is no error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.engines.runtime_versions import runtime_version
from edge_client.errors import ConfigError
from edge_client.user_cache import user_cache

if TYPE_CHECKING:
    from torch import Tensor, fx

log = logging.getLogger(__name__)

VARIABLE, OFF = "FEDCENTERS_CACHE", "off"
BUDGET_BYTES = 1 << 30  # the least recently used containers make room
DIGEST_BYTES = 32
CONVERTERS: Mapping[str, Sequence[str]] = {
    "onnx": ("torch", "onnx", "onnx-ir", "onnxscript"),
    "litert": ("torch", "litert-torch", "litert-converter", "jax"),
    "pt2": ("torch",),
}


def cache_folder() -> Path | None:
    """Where containers are cached; None when the cache is off, and for a user without a home."""
    try:
        return chosen_folder()
    except ConfigError as wrong:
        _tell_once("", wrong.message)
        return None


def chosen_folder() -> Path | None:
    """Where containers are cached; None when the cache is off. Raises ConfigError for a user without a home."""
    named = os.environ.get(VARIABLE, "")
    return None if named == OFF else (Path(named) if named else user_cache()) / "containers"


def cached_file(key: str | None, make: Callable[[], bytes]) -> bytes:
    """The file under `key`, or a new one of `make`, which is cached at once. `key` None: nothing is cached.

    A damaged entry counts as none.
    """
    folder = cache_folder()
    if folder is None or key is None:
        return make()
    entry = folder / key
    found = _read(entry)
    if found is None:
        found = make()
        _write(entry, found)
    return found


def cache_entries(folder: Path) -> list[Path]:
    """The cached containers and what a killed compiler left beside them, the least recently used first."""
    return sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns) if folder.is_dir() else []


def container_key(engine: str, graphs: Mapping[str, fx.GraphModule], **facts: Any) -> str | None:  # noqa: ANN401 - JSON
    """The hash of what the container of `graphs` depends on, `facts` being the ports and the batch size.

    None for a graph with a part that has no bytes to hash.
    """
    hashes = {function: _graph_hash(graph) for function, graph in graphs.items()}
    if None in hashes.values():
        return None
    told = {"engine": engine, "graphs": hashes, "versions": converter_versions(engine), **facts}
    told["source"] = source_hash("export/compiler", "export/containers")
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _graph_hash(graph: fx.GraphModule) -> str | None:
    """The graph's code has every operator and number of it; tensors are attributes, hashed by their bytes."""
    from torch import Tensor

    hashed = hashlib.sha256(graph.code.encode())
    for node in graph.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        value = graph
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, Tensor):
            return None
        _add_tensor(hashed, str(node.target), value)
    return hashed.hexdigest()


def converter_versions(engine: str) -> dict[str, str]:
    """Of the packages that write the engine's files."""
    return {package: _version(package) for package in CONVERTERS[engine]}


def tool_versions(engine: str) -> dict[str, str | None]:
    """Of the packages that write the engine's files, and of the runtime here that checks them."""
    return {**converter_versions(engine), "runtime": runtime_version(engine)}


def constants_hash(tensors: Sequence[Tensor]) -> str:
    """The hash of tensors that a graph takes as inputs and a container holds."""
    hashed = hashlib.sha256()
    for i, value in enumerate(tensors):
        _add_tensor(hashed, str(i), value)
    return hashed.hexdigest()


def _add_tensor(hashed: Any, name: str, value: Tensor) -> None:  # noqa: ANN401 - hashlib's own type has no name
    import torch

    hashed.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    hashed.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16


@cache
def source_hash(*folders: str) -> str:
    """The hash of our own source below these folders ("export/compiler"): another one may write another file."""
    root = Path(__file__).parents[2]
    hashed = hashlib.sha256()
    for file in sorted(file for folder in folders for file in (root / folder).rglob("*.py")):
        hashed.update(file.read_bytes())
    return hashed.hexdigest()


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _read(entry: Path) -> bytes | None:
    try:
        data = entry.read_bytes()
    except OSError:
        return None
    with suppress(OSError):  # a folder that only others may write to
        os.utime(entry)
    digest, file = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if hashlib.sha256(file).digest() == digest:
        return file
    log.warning("%s is damaged, and its container is compiled again", entry)
    return None


def _write(entry: Path, file: bytes) -> None:
    beside = entry.with_name(f"{entry.name}.{os.getpid()}")  # a half-written file never has an entry's name
    try:
        entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside.write_bytes(hashlib.sha256(file).digest() + file)
        beside.replace(entry)
        _make_room(entry)
    except OSError as wrong:
        with suppress(OSError):  # half of a file would keep a full disk full
            beside.unlink(missing_ok=True)
        _tell_once(f" in {entry.parent}", wrong.strerror or str(wrong))


def _make_room(newest: Path) -> None:
    sizes = {entry: entry.stat().st_size for entry in cache_entries(newest.parent)}
    over = sum(sizes.values()) - BUDGET_BYTES
    for entry, size in sizes.items():
        if over <= 0 or entry == newest:
            break
        entry.unlink(missing_ok=True)
        over -= size


@cache
def _tell_once(where: str, why: str) -> None:
    log.info("what is compiled is not kept%s (%s): %s may name another folder", where, why, VARIABLE)
