"""What fedcenters-export does, without its command line: compile a model; check a bundle; make one from a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from edge_client.errors import ConfigError
from edge_client.protocol import compress
from edge_client.protocol.task import Array
from export.bundle import NOISE_SAMPLES, PARITY_LIMIT, BundleManifest, read_bundle, write_bundle
from export.folder import MANIFEST, WEIGHTS, files_of, refuse_used, write_folder
from export.user_model import compile_model
from export.verify import file_logits, largest_difference


def write_program(out: Path, module: nn.Module, shape: tuple[int, ...], **facts: Any) -> dict[str, Any]:  # noqa: ANN401 - compile_program's own
    """Compile into a new folder. -> {"out", "model", "parameters", "files": one row per file, program.json last}."""
    refuse_used(out)
    made = compile_model(module, shape, **facts)
    program = made.program
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    weights = {
        port.name: state[port.name.partition("/")[2]].detach().cpu().numpy()
        for port in program.functions["infer"].inputs
        if port.name != "x"
    }
    sizes = write_folder(out, program, made.files, weights)
    rows: list[dict[str, Any]] = [
        {
            "file": f.name,
            "size": f.size,
            "sha256": f.sha256,
            "engine": f.engine,
            "functions": list(f.functions),
            "batch": program.batch[f.engine],
            "difference": program.parity[f.engine],
        }
        for f in files_of(program)
    ]
    rows += [{"file": name, "size": sizes[name]} for name in (WEIGHTS, MANIFEST)]
    return {"out": str(out), "model": program.model, "parameters": program.schema.n_params, "files": rows}


def verify_bundle(path: Path, samples: Path | None = None) -> list[dict[str, Any]]:
    """One row per center and format: center, format, difference, samples, ok. Raises Malformed when a hash is wrong."""
    bundle = read_bundle(path)
    x = _samples(samples) if samples is not None else bundle.reference()
    if x is None:
        x = np.random.default_rng(0).standard_normal((NOISE_SAMPLES, *bundle.program.input)).astype(np.float32)
    if x.shape[1:] != bundle.program.input:
        raise ConfigError(f"samples are {x.shape[1:]}, the model takes {bundle.program.input}", hint="check the npz")
    rows = []
    for center in bundle.manifest["centers"]:
        module = bundle.module(center["center"]) if center["files"] else None
        for fmt, entry in sorted(center["files"].items()):
            file = (path / entry["path"]).read_bytes()
            difference = largest_difference(module, file, fmt, x) if module is not None else 0.0
            scale = max(1.0, float(np.abs(file_logits(file, fmt, x[:1])).max()))
            ok = difference <= PARITY_LIMIT * scale
            row = {"center": center["center"], "format": fmt, "difference": difference, "samples": len(x), "ok": ok}
            rows.append(row)
    return rows


def bundle_run(run: Path, out: Path, method: str, formats: Sequence[str]) -> BundleManifest:
    """The centers of `method` in a run's folder, with the program of the bundle that the run wrote."""
    known = read_bundle(run / "bundle")
    folder = _centers(run, method)
    vectors = [
        compress.decode(path.read_bytes(), known.program.schema, kind="model")
        for path in sorted(folder.glob("center-*.safetensors"), key=lambda p: int(p.stem.partition("-")[2]))
    ]
    if not vectors:
        raise ConfigError(f"{folder} holds no center", hint="let the run finish first")
    cards = [{"method": folder.name, "run": run.name} for _ in vectors]
    return write_bundle(
        out,
        program=known.program,
        files=known.files(),
        centers=vectors,
        cards=cards,
        formats=formats,
        reference=known.reference(),
    )


def _centers(run: Path, method: str) -> Path:
    methods = sorted(p.name for p in (run / "centers").glob("*") if p.is_dir())
    if not methods or (method and method not in methods):
        have = f"it has {', '.join(methods)}" if methods else "it has no centers yet"
        raise ConfigError(f"run {run} has no centers of {method or 'any method'}", hint=have)
    return run / "centers" / (method or methods[0])


def _samples(path: Path) -> Array:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return np.asarray(arrays["x"], dtype=np.float32)
    except (OSError, KeyError, ValueError) as wrong:
        raise ConfigError(f"{path} cannot be read: {wrong}", hint="give an npz file with an array x") from wrong
