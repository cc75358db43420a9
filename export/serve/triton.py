"""A bundle as a model repository of NVIDIA's Triton Inference Server: one model per center, over its ONNX file.

    center-K/config.pbtxt      name, inputs and outputs (Triton's model_config.proto, in protobuf's text format)
    center-K/VERSION/model.onnx

The next bundle that is written into the same repository becomes the next version of each model; the same one again
changes nothing. All models have the same version: what a writer left out that was killed is written by the next one.
Triton serves the newest version, and loads it by itself in poll mode (--model-control-mode=poll).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
        newest = {k: _newest_version(folder) for k, folder in folders.items()}
        version = max(newest.values(), default=0)
        lacking = [c for c in centers if not _holds(folders[c["center"]], version, c["files"][MODEL_FORMAT])]
        if any(newest[c["center"]] == version for c in lacking):  # it is of another bundle
            version, lacking = version + 1, centers
        if lacking:
            _write_version(read, lacking, folders, version)
        else:
            log.warning("%s has this bundle as its newest version; nothing is written", out)
    written = [f"{folder.name}/{version}" for folder in folders.values()]
    known = {name.partition("/")[0] for name in written}
    if left := sorted(p.parent.name for p in out.glob("center-*/config.pbtxt") if p.parent.name not in known):
        told = "%s has %s of an older bundle, and Triton goes on serving that: this bundle has %d centers. Remove it"
        log.warning(told, out, ", ".join(left), len(centers))
    return written


def _write_version(
    read: Bundle, centers: Sequence[Mapping[str, Any]], folders: Mapping[int, Path], version: int
) -> None:
    """The centers' files as a version of their models: all of them are written before the first has its name."""
    with ExitStack() as parts:
        ready = dict[Path, Path]()
        for center in centers:
            folder = folders[center["center"]]
            ready[folder] = parts.enter_context(partial_folder(folder, "version"))
            (ready[folder] / "model.onnx").write_bytes(read.read(center["files"][MODEL_FORMAT]))
        for folder, part in ready.items():
            replace_file(folder / "config.pbtxt", model_config(folder.name, read.program).encode())
            part.rename(folder / str(version))  # atomic: a version is never incomplete


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
