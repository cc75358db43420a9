"""A bundle: what a fleet learned, as a folder that anyone can use and check without us.

    manifest.json             everything below by hash; the only file that needs a signature (manifest.sig, optional)
    program/program.json      the training program, and its containers beside it, named <sha256>.<ending>
    centers/center-K/         model.safetensors (weights for the program), model.onnx and model.tflite (self-contained)
    reference.npz             the samples (key x) on which the files were compared with torch, if there were any

A center's card says what is known about it; this module only carries it. Knows no method and no network.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from torch import nn

from edge_client.errors import ConfigError, Malformed, ProgramRefused, UsageError
from edge_client.protocol import compress
from edge_client.protocol.messages import canonical, parse_json
from edge_client.protocol.program import LIMIT_BYTES, Program
from edge_client.protocol.task import Array, Flat
from export.functions import private_copy
from export.inference import FORMATS, export_center, with_weights
from export.onnx import bake
from export.program import load_vector
from export.verify import file_logits, largest_difference

VERSION = 1
ENDINGS = {"onnx": "onnx", "litert": "tflite", "pt2": "pt2"}
PARITY_LIMIT = 1e-4  # of the logits' scale; float32 runtimes differ by about 1e-6, a wrong file by about 1
NOISE_SAMPLES = 8  # compared on noise where no reference is given
Signer = Callable[[bytes], str]
BundleManifest = dict[str, Any]


def write_bundle(  # noqa: PLR0913 - the parts of a bundle
    out: Path,
    *,
    program: Program,
    files: Mapping[str, bytes],
    centers: Sequence[Flat],
    cards: Sequence[Mapping[str, Any]],
    formats: Sequence[str] = FORMATS,
    reference: Array | None = None,
    module: nn.Module | None = None,
    signer: Signer | None = None,
) -> BundleManifest:
    """Write a new folder `out` (an older one is replaced when the new one is complete); -> manifest.json's content.

    `files`: sha256 -> container, for every container of the program. `centers`: vectors [schema.size]. `reference`:
    samples [n, *input] float32 to compare on. `module`: the model in torch, left as it was; without it, the program's
    infer graph. `signer` turns manifest.json's bytes into the text of manifest.sig.
    """
    if len(cards) != len(centers) or not centers:
        raise UsageError(f"{len(centers)} centers and {len(cards)} cards", hint="give one card per center")
    part = out.with_name(f".{out.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    writer = _Writer(part)
    samples = _noise(program.input) if reference is None else np.asarray(reference, dtype=np.float32)
    center = _loader(program, files, module) if formats else None
    manifest: BundleManifest = {
        "v": VERSION,
        "model": program.model,
        "schema": program.schema.sha256,
        "program": writer.put("program/program.json", canonical(program.to_json())),
        "containers": _containers(writer, program, files),
        "reference": None if reference is None else writer.put("reference.npz", _npz(samples)),
        "centers": [],
    }
    for k, (vector, card) in enumerate(zip(centers, cards, strict=True)):
        folder = f"centers/center-{k}"
        blob = compress.encode(vector, program.schema, codec="f32", kind="model")
        written = writer.put(f"{folder}/model.safetensors", blob)
        exported = {}
        if center is not None:
            network = center(vector)
            for fmt in formats:
                file = _file(program, files, network, vector, fmt)
                parity = _checked(network, file, fmt, samples, k)
                exported[fmt] = {**writer.put(f"{folder}/model.{fmt}", file), "parity": parity}
        manifest["centers"].append({"center": k, "card": dict(card), "model": written, "files": exported})
    writer.finish(manifest, signer, out)
    return manifest


def _loader(program: Program, files: Mapping[str, bytes], module: nn.Module | None) -> Callable[[Flat], nn.Module]:
    """Vector -> network in torch: the user's model with these weights, or the program's infer graph."""
    if module is not None:
        mine = private_copy(module, program.dtype)

        def loaded(vector: Flat) -> nn.Module:
            load_vector(mine, program.schema, vector)
            return mine.eval()

        return loaded
    if "pt2" not in program.containers:
        raise ConfigError("a file per center needs the model or the program's pt2 container", hint="add the engine pt2")
    infer = files[program.containers["pt2"]["infer"].sha256]
    return lambda vector: with_weights(infer, program.schema, vector)


def _file(program: Program, files: Mapping[str, bytes], network: nn.Module, vector: Flat, fmt: str) -> bytes:
    """One self-contained file; ONNX is the program's own infer graph with the weights in it, where there is one."""
    if fmt != "onnx" or "onnx" not in program.containers:
        return export_center(network, program.input, fmt)
    prefix = {"p": "w", "b": "buffers"}
    values = program.schema.split(np.asarray(vector, dtype=program.dtype))
    weights = {f"{prefix[t.role]}/{t.name}": values[t.name] for t in program.schema.tensors}
    return bake(files[program.containers["onnx"]["infer"].sha256], weights)


def _checked(module: nn.Module, file: bytes, fmt: str, samples: Array, center: int) -> float:
    """The file's largest absolute difference from torch; a file that is wrong is not handed out."""
    parity = largest_difference(module, file, fmt, samples)
    scale = max(1.0, float(np.abs(file_logits(file, fmt, samples[:1])).max()))
    if not parity <= PARITY_LIMIT * scale:
        raise ProgramRefused(
            f"center {center} as {fmt} differs from torch by {parity:.1e}", hint=f"leave {fmt} out and report the model"
        )
    return parity


def _containers(writer: _Writer, program: Program, files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    kinds = {c.sha256: ENDINGS[engine] for engine, functions in program.containers.items() for c in functions.values()}
    missing = sorted(set(kinds) - set(files))
    if missing:
        raise UsageError(f"containers {', '.join(missing)} are missing", hint="pass every file of the compiled program")
    return [writer.put(f"program/{sha}.{ending}", files[sha]) for sha, ending in sorted(kinds.items())]


def _npz(x: Array) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=np.asarray(x, dtype=np.float32))
    return buffer.getvalue()


def _noise(shape: Sequence[int]) -> Array:
    return np.random.default_rng(0).standard_normal((NOISE_SAMPLES, *shape)).astype(np.float32)


class _Writer:
    """Writes below a folder that takes its final name only when everything is in it."""

    def __init__(self, part: Path) -> None:
        self._part = part

    def put(self, name: str, data: bytes) -> dict[str, Any]:
        path = self._part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return {"path": name, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}

    def finish(self, manifest: BundleManifest, signer: Signer | None, out: Path) -> None:
        data = json.dumps(manifest, indent=1, sort_keys=True).encode()
        self.put("manifest.json", data)
        if signer is not None:
            self.put("manifest.sig", signer(data).encode())
        shutil.rmtree(out, ignore_errors=True)
        self._part.rename(out)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle whose every file has the hash that its manifest says."""

    root: Path
    manifest: BundleManifest
    program: Program

    def vector(self, center: int) -> Flat:
        """The center's weights [schema.size] float32."""
        data = (self.root / self.manifest["centers"][center]["model"]["path"]).read_bytes()
        return compress.decode(data, self.program.schema, kind="model")

    def module(self, center: int) -> nn.Module:
        """The center in torch: x [batch, *input] -> logits."""
        return with_weights(self.container("pt2", "infer"), self.program.schema, self.vector(center))

    def container(self, engine: str, function: str) -> bytes:
        """One container of the program."""
        sha = self.program.containers[engine][function].sha256
        return (self.root / f"program/{sha}.{ENDINGS[engine]}").read_bytes()

    def files(self) -> dict[str, bytes]:
        """Every container by hash."""
        return {
            c.sha256: self.container(engine, function)
            for engine, functions in self.program.containers.items()
            for function, c in functions.items()
        }

    def reference(self) -> Array | None:
        """The samples that came with it, [n, *input] float32."""
        if self.manifest["reference"] is None:
            return None
        with np.load(self.root / self.manifest["reference"]["path"], allow_pickle=False) as arrays:
            return np.asarray(arrays["x"], dtype=np.float32)


def read_bundle(path: Path) -> Bundle:
    """Check every hash, then read. Raises ConfigError for a folder that is no bundle, Malformed for a changed one."""
    try:
        raw = (path / "manifest.json").read_bytes()
    except OSError as missing:
        raise ConfigError(
            f"{path} is not a bundle: {missing.strerror}", hint="give the folder with manifest.json"
        ) from None
    manifest = parse_json(raw, LIMIT_BYTES)
    try:
        if manifest["v"] != VERSION:
            raise Malformed("bad_version", f"bundle version {manifest['v']}; this reads {VERSION}")
        for entry in _entries(manifest):
            _check(path, entry)
        program_bytes = (path / manifest["program"]["path"]).read_bytes()
    except (KeyError, TypeError, AttributeError) as wrong:
        raise Malformed("bad_bundle", f"manifest.json: {wrong!r}") from wrong
    return Bundle(root=path, manifest=manifest, program=Program.from_json(parse_json(program_bytes, LIMIT_BYTES)))


def _entries(manifest: BundleManifest) -> list[dict[str, Any]]:
    shared = [manifest["program"], *manifest["containers"], *([manifest["reference"]] if manifest["reference"] else [])]
    return shared + [e for c in manifest["centers"] for e in (c["model"], *c["files"].values())]


def _check(root: Path, entry: Mapping[str, Any]) -> None:
    name = PurePosixPath(entry["path"])
    if name.is_absolute() or ".." in name.parts:
        raise Malformed("bad_bundle", f"{entry['path']!r} lies outside the bundle")
    try:
        data = (root / name).read_bytes()
    except OSError as missing:
        raise Malformed("bad_bundle", f"{name}: {missing.strerror}") from None
    if hashlib.sha256(data).hexdigest() != entry["sha256"] or len(data) != entry["size"]:
        raise Malformed("bad_hash", f"{name} is not the file that manifest.json names")
