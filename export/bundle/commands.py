"""What fedcenters-export does, without its command line: compile a model; check a bundle; make one from a run."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from edge_client.errors import ConfigError
from edge_client.protocol.task import Array
from export.bundle.center_files import FORMATS
from export.bundle.model_cards import quantiles
from export.bundle.reader import BundleManifest, entries, read_bundle
from export.bundle.run_source import Material, Samples, Signer, kind_of
from export.bundle.verify_centers import PARITY_LIMIT, latency_ms, opened, per_device, torch_logits
from export.bundle.writer import COMPARED, ENGINE_OF, Wish, noise, write_bundle
from export.compiler.program_folder import MANIFEST, WEIGHTS, files_of, refuse_used, write_folder
from export.compiler.user_model import compile_model

LOSS_LIMIT = 0.02  # of a quantized file, in mean accuracy of the devices that it serves
KEY_BYTES = 32


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


def verify_bundle(
    path: Path, samples: Samples | None = None, *, tolerance: float = PARITY_LIMIT, loss: float = LOSS_LIMIT
) -> list[dict[str, Any]]:
    """One row per center and file, measured on `samples`, on the bundle's own, or on noise.

    A row has center, format (the variant's name), samples, difference (largest of a logit from torch), ok, size and
    latency_ms; accuracy and torch (quantiles of the devices assigned to the center) where labels are known, else null.
    A float32 file is ok when the difference is at most `tolerance` of the logits' scale; a quantized one when its
    devices lose at most `loss` in mean accuracy, or, without labels, when it disagrees in at most that share.
    Raises Malformed when a hash is wrong.
    """
    bundle = read_bundle(path)
    given = samples or bundle.reference() or Samples(x=noise(bundle.program.input))
    if given.x.shape[1:] != bundle.program.input:
        raise ConfigError(f"samples are {given.x.shape[1:]}, the model takes {bundle.program.input}", hint="check them")
    limits = Limits(tolerance=tolerance, loss=loss)
    rows = []
    for center in bundle.manifest["centers"]:
        if not center["files"]:
            continue
        k, module = center["center"], bundle.module(center["center"])
        mine = given.rows(given.center == k) if (given.center == k).any() else given
        expected = torch_logits(module, mine.x)
        for name, entry in sorted(center["files"].items()):
            measured = _row(bundle.read(entry), name, mine, expected, limits)
            rows.append({"center": k, "format": name, "size": entry["size"], **measured})
    return rows


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is still right; see `verify_bundle`."""

    tolerance: float
    loss: float


def _row(file: bytes, name: str, samples: Samples, expected: Array, limits: Limits) -> dict[str, Any]:
    fmt, _, scheme = name.partition("-")
    run = opened(file, fmt)
    got = run(samples.x)
    difference = float(np.abs(got - expected).max())
    before, after = (per_device(logits, samples) for logits in (expected, got))
    if not scheme:
        ok = difference <= limits.tolerance * max(1.0, float(np.abs(expected).max()))
    elif before:
        ok = float(np.mean(list(before.values())) - np.mean(list(after.values()))) <= limits.loss
    else:
        ok = float((got.argmax(axis=-1) != expected.argmax(axis=-1)).mean()) <= limits.loss
    return {
        "samples": len(samples),
        "difference": difference,
        "accuracy": quantiles(list(after.values())),
        "torch": quantiles(list(before.values())),
        "latency_ms": latency_ms(run, samples.x),
        "ok": ok,
    }


def bundle_run(  # noqa: PLR0913 - what the command asks
    run: Path,
    out: Path,
    wish: Wish,
    *,
    method: str = "",
    data: Path | None = None,
    samples: int = COMPARED,
    sign: Signer | None = None,
) -> BundleManifest:
    """A bundle of the centers of `method` in a run's folder; with `samples` of the run in it, where they can be had."""
    engines = [engine for fmt, engine in ENGINE_OF.items() if fmt in (*wish.formats, "pt2")]
    material = kind_of(run).material(run, method=method, engines=engines, data=data)
    reference = material.reference.few(samples) if material.reference is not None and samples else None
    return write_bundle(out, replace(material, reference=reference, sign=sign or material.sign), wish)


def quantize_bundle(
    path: Path, out: Path, schemes: Sequence[str], calibration: Samples | None, sign: Signer | None
) -> BundleManifest:
    """The same bundle with smaller variants of its files; `path` is only read."""
    bundle = read_bundle(path)
    first = bundle.manifest["centers"][0]["files"]
    formats = [fmt for fmt in FORMATS if fmt in first]
    if not formats:
        raise ConfigError(f"{path} has no files to quantize", hint="bundle the run again with --formats onnx,tflite")
    material = Material(
        program=bundle.program,
        files=bundle.files(),
        centers=[bundle.vector(c["center"]) for c in bundle.manifest["centers"]],
        cards=[c["card"] for c in bundle.manifest["centers"]],
        reference=bundle.reference(),
        calibration=calibration,
        sign=sign,
        made={entry["path"]: bundle.read(entry) for entry in entries(bundle.manifest)},
    )
    stacked = bool(bundle.manifest.get("stacked"))
    return write_bundle(out, material, Wish(formats=formats, schemes=schemes, stacked=stacked))


def key_of(path: Path) -> bytes:
    """The 32 bytes of a private key file: 64 hex digits, readable by its owner only. Raises ConfigError."""
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, ValueError) as wrong:
        raise ConfigError(f"{path} holds no signing key: {wrong}", hint="give the federation's signing.key") from None
    if mode & 0o077 or len(key) != KEY_BYTES:
        raise ConfigError(f"{path} is no private key of {KEY_BYTES} bytes", hint=f"chmod 600 {path}, 64 hex digits")
    return key
