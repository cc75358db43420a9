"""A bundle as a model repository of NVIDIA's Triton Inference Server: one model per center, over its ONNX file.

    center-K/config.pbtxt      name, inputs and outputs (Triton's model_config.proto, in protobuf's text format)
    center-K/VERSION/model.onnx

The next bundle that is written into the same repository becomes the next version of each model; the same one again
changes nothing. Triton serves the newest version, and loads it by itself in poll mode (--model-control-mode=poll).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError
from edge_client.protocol.program import Program
from export.bundle.reader import Bundle, read_bundle
from export.serve.site import only_writer, partial_folder, replace_file

log = logging.getLogger(__name__)
MODEL_FORMAT = "onnx"
MAX_BATCH = 64  # samples in a dynamic batch


def write_repository(bundle: Path, out: Path, trusted: Sequence[bytes] = ()) -> list[str]:
    """Write or extend the repository `out`; -> "center-K/version" of every model. Raises as `read_bundle` does."""
    read = read_bundle(bundle, trusted)
    centers = read.manifest["centers"]
    if any(MODEL_FORMAT not in center["files"] for center in centers):
        raise ConfigError(
            f"{bundle} has no {MODEL_FORMAT} files, which Triton needs", hint=f"bundle with --formats {MODEL_FORMAT}"
        )
    folders = {center["center"]: out / f"center-{center['center']}" for center in centers}
    with only_writer(out):
        before = {k: _newest_version(folder) for k, folder in folders.items()}
        if all(_holds(folders[c["center"]], before[c["center"]], c["files"][MODEL_FORMAT]) for c in centers):
            log.warning("%s has this bundle as its newest version; nothing is written", out)
            written = [f"{folder.name}/{before[k]}" for k, folder in folders.items()]
        else:
            written = [
                _write_version(read, center, folders[center["center"]], before[center["center"]] + 1)
                for center in centers
            ]
    known = {name.partition("/")[0] for name in written}
    if left := sorted(p.parent.name for p in out.glob("center-*/config.pbtxt") if p.parent.name not in known):
        told = "%s has %s of an older bundle, and Triton goes on serving that: this bundle has %d centers. Remove it"
        log.warning(told, out, ", ".join(left), len(centers))
    return written


def _write_version(read: Bundle, center: Mapping[str, Any], folder: Path, version: int) -> str:
    """One center's file as a version of its model; -> "center-K/version"."""
    with partial_folder(folder, "version") as part:
        (part / "model.onnx").write_bytes(read.read(center["files"][MODEL_FORMAT]))
        replace_file(folder / "config.pbtxt", model_config(folder.name, read.program).encode())
        part.rename(folder / str(version))  # atomic: a version is never incomplete
    return f"{folder.name}/{version}"


def _newest_version(folder: Path) -> int:
    """0 where there is none."""
    return max((int(p.name) for p in folder.glob("*") if p.name.isdecimal()), default=0)


def _holds(folder: Path, version: int, file: Mapping[str, Any]) -> bool:
    """Whether the model is described, and its file of this version is the one that a bundle's manifest lists."""
    model = folder / str(version) / "model.onnx"
    described = (folder / "config.pbtxt").is_file()
    return described and model.is_file() and hashlib.sha256(model.read_bytes()).hexdigest() == file["sha256"]


def model_config(name: str, program: Program) -> str:
    """config.pbtxt of a center: x [batch, *input] to logits [batch, *target], float32."""
    return (
        f'name: "{name}"\n'
        'backend: "onnxruntime"\n'
        f"max_batch_size: {MAX_BATCH}\n"
        f'input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {_dims(program.input)} ] }} ]\n'
        f'output [ {{ name: "logits" data_type: TYPE_FP32 dims: [ {_dims(program.target)} ] }} ]\n'
        "dynamic_batching { }\n"
    )


def _dims(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))
