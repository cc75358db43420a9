"""The commands of fedcenters-export without their command line: compile a model; make, check and quantize a bundle."""

from __future__ import annotations

import logging
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.task import Array
from export.bundle.bundle_contents import MAX_COMPARED_SAMPLES, BundleSource, LabelledSamples, Signer, find_run_reader
from export.bundle.center_files import FILE_FORMATS
from export.bundle.model_cards import quantiles
from export.bundle.reader import BundleManifest, file_entries, read_bundle
from export.bundle.verify_centers import (
    PARITY_LIMIT,
    accuracy_by_device,
    latency_ms,
    lost_share,
    open_model,
    torch_logits,
)
from export.bundle.writer import BundleOptions, engines_of, random_inputs, write_bundle
from export.compiler.program import CompilerOutput, weights_of
from export.compiler.program_folder import MANIFEST_FILE, WEIGHTS_FILE, container_files, write_folder

MAX_ACCURACY_LOSS = 0.02  # of a quantized file, in mean accuracy of the devices that it serves
KEY_BYTES = 32
RUNTIME_NAMES = {"onnx": "ONNX Runtime", "tflite": "LiteRT", "pt2": "torch"}
log = logging.getLogger(__name__)


def write_program(out: Path, module: nn.Module, made: CompilerOutput) -> dict[str, Any]:
    """Write a new folder. -> {"out", "model", "parameters", "files": one row per file, program.json last}."""
    program = made.program
    sizes = write_folder(out, program, made.files, weights_of(module, program.schema))
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
        for f in container_files(program)
    ]
    rows += [{"file": name, "size": sizes[name]} for name in (WEIGHTS_FILE, MANIFEST_FILE)]
    return {"out": str(out), "model": program.model, "parameters": program.schema.n_params, "files": rows}


def verify_bundle(
    path: Path,
    samples: LabelledSamples | None = None,
    *,
    tolerance: float = PARITY_LIMIT,
    loss: float = MAX_ACCURACY_LOSS,
) -> list[dict[str, Any]]:
    """One row per center and file, measured on `samples`, on the bundle's own, or on random inputs.

    Logs each file and its runtime before it is compared. A row has center, format (the variant's name), samples (how
    many), random_inputs (whether they are random numbers), values (how many logits were compared), difference (the
    largest of one from torch), ok, size and latency_ms; accuracy and torch (quantiles of the devices
    assigned to the center) where labels are known, else null.
    A float32 file is ok when the difference is at most `tolerance` of the logits' scale; a quantized one when its
    devices lose at most `loss` in mean accuracy, or, without labels, when it disagrees in at most that share; where the
    outputs are no classes, when they are off by at most that share of their own variance.
    Raises Malformed when a hash is wrong, UsageError where torch answers infinity or NaN.
    """
    bundle = read_bundle(path)
    held_out = samples or bundle.reference_samples()
    given = held_out or LabelledSamples(x=random_inputs(bundle.program))
    given.require_fit(bundle.program)
    limits = VerifyLimits(tolerance=tolerance, loss=loss)
    rows = []
    for center in bundle.manifest["centers"]:
        if not center["files"]:
            continue
        k, module = center["center"], bundle.module(center["center"])
        mine = given.rows(given.center == k) if (given.center == k).any() else given
        expected = torch_logits(module, mine.x)
        if not np.isfinite(expected).all():
            most = float(np.abs(mine.x).max())
            told = f"center {k}: torch's own outputs for these samples are not finite, and nothing compares with them"
            hint = f"the samples' largest value is {most:g}: give samples of the size that the model was trained on"
            raise UsageError(told, hint=hint)
        for name, entry in sorted(center["files"].items()):
            if (runtime := RUNTIME_NAMES.get(name.partition("-")[0])) is None:
                hint = f"this version knows {', '.join(RUNTIME_NAMES)}; verify it with the one that wrote it"
                raise ConfigError(f"center {k} has a file of an unknown format, {name}", hint=hint)
            inputs = f"{len(mine)} {'random inputs' if held_out is None else 'samples'}"
            log.info("comparing %s in %s with torch on %s", entry["path"], runtime, inputs)
            axis = 1 + bundle.program.class_axis if bundle.program.has_classes else None
            measured = _row(bundle.read(entry), name, mine, expected, limits, axis)
            facts = {"center": k, "format": name, "size": entry["size"], "random_inputs": held_out is None}
            rows.append({**facts, **measured})
    return rows


@dataclass(frozen=True, kw_only=True)
class VerifyLimits:
    """The limits of `verify_bundle`: largest difference over scale, largest loss of mean accuracy."""

    tolerance: float
    loss: float


def _row(
    file: bytes, name: str, samples: LabelledSamples, expected: Array, limits: VerifyLimits, axis: int | None
) -> dict[str, Any]:
    fmt, _, scheme = name.partition("-")
    run = open_model(file, fmt)
    got = run(samples.x)
    difference = float(np.abs(got - expected).max())
    before, after = (accuracy_by_device(logits, samples) for logits in (expected, got))
    if not scheme:
        ok = difference <= limits.tolerance * max(1.0, float(np.abs(expected).max()))
    elif before:
        ok = float(np.mean(list(before.values())) - np.mean(list(after.values()))) <= limits.loss
    else:
        ok = lost_share(got, expected, axis) <= limits.loss
    return {
        "samples": len(samples),
        "values": expected.size,
        "difference": difference,
        "accuracy": quantiles(list(after.values())),
        "torch": quantiles(list(before.values())),
        "latency_ms": latency_ms(run, samples.x),
        "ok": ok,
    }


def bundle_run(  # noqa: PLR0913 - what the command asks
    run: Path,
    out: Path,
    options: BundleOptions,
    *,
    method: str = "",
    data: Path | None = None,
    samples: int = MAX_COMPARED_SAMPLES,
    sign: Signer | None = None,
) -> BundleManifest:
    """A bundle of the centers of `method` in a run's folder; with `samples` of the run in it, where they can be had."""
    material = find_run_reader(run).bundle_source(run, method=method, engines=engines_of(options.formats), data=data)
    return write_run_bundle(material, out, options, samples=samples, sign=sign)


def write_run_bundle(
    material: BundleSource,
    out: Path,
    options: BundleOptions,
    *,
    samples: int,
    sign: Signer | None = None,
) -> BundleManifest:
    """A bundle of a run's centers, its accuracies on all held-out samples, with `samples` of them in it."""
    reference = material.reference.subsample(samples) if material.reference is not None and samples else None
    material = replace(material, reference=reference, held_out=material.reference, sign=sign or material.sign)
    return write_bundle(out, material, options)


def quantize_bundle(
    path: Path, out: Path, schemes: Sequence[str], calibration: LabelledSamples | None, sign: Signer | None
) -> BundleManifest:
    """The same bundle with smaller variants of its files, beside those that it has; `path` is only read."""
    bundle = read_bundle(path)
    if calibration is not None:
        replace(calibration, y=None).require_fit(bundle.program)
    first = bundle.manifest["centers"][0]["files"]
    formats = [fmt for fmt in FILE_FORMATS if fmt in first]
    if not formats:
        raise ConfigError(f"{path} has no files to quantize", hint="bundle the run again with --formats onnx,tflite")
    material = BundleSource(
        program=bundle.program,
        files=bundle.files(),
        centers=[bundle.vector(c["center"]) for c in bundle.manifest["centers"]],
        cards=[c["card"] for c in bundle.manifest["centers"]],
        reference=bundle.reference_samples(),
        calibration=calibration,
        sign=sign,
        newcomers=bundle.newcomers(),
        names=bundle.names,
        made={entry["path"]: bundle.read(entry) for entry in file_entries(bundle.manifest)},
    )
    stacked = bool(bundle.manifest.get("stacked"))
    return write_bundle(out, material, BundleOptions(formats=formats, schemes=schemes, stacked=stacked))


def read_private_key(path: Path) -> bytes:
    """The 32 bytes of a private key file: 64 hex digits, readable by its owner only. Raises ConfigError."""
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, ValueError) as wrong:
        raise ConfigError(f"{path} holds no signing key: {wrong}", hint="give the federation's signing.key") from None
    if mode & 0o077 or len(key) != KEY_BYTES:
        raise ConfigError(f"{path} is no private key of {KEY_BYTES} bytes", hint=f"chmod 600 {path}, 64 hex digits")
    return key
