"""Write a bundle (reader.py lists its files). Every file is compared with torch before the folder gets its name."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import math
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from edge_client.durable_files import sync_files, sync_folder
from edge_client.errors import ConfigError, ProgramRefused, UsageError
from edge_client.protocol import codecs
from edge_client.protocol.messages import canonical_json
from edge_client.protocol.nearest.router_file import write_router
from edge_client.protocol.program import FROZEN, Program
from edge_client.protocol.task import Array, Flat, Tensors
from export.bundle import model_cards, quantize
from export.bundle.adapters import adapter_files
from export.bundle.bundle_contents import MAX_COMPARED_SAMPLES, BundleNames, BundleSource, Signer
from export.bundle.center_files import (
    FILE_FORMATS,
    export_center,
    export_stacked,
    frozen_tensors,
    load_infer_module,
    name_batch_dimension,
    with_metadata,
)
from export.bundle.reader import (
    MANIFEST_FILE,
    MAX_DEVICES,
    SIGNATURE_FILE,
    VERSION,
    BundleManifest,
    check_replaceable,
    checked_shape,
    container_ending,
    encode_manifest,
)
from export.bundle.refilled_tflite import RefillableFile, refillable
from export.bundle.verify_centers import (
    accuracy_by_device,
    file_logits,
    largest_difference,
    parity_limit,
    torch_logits,
)
from export.containers.write_onnx import bake_weights
from export.folder_lock import locked_folder

log = logging.getLogger(__name__)

DEFAULT_FORMATS = ("onnx", "tflite")
RANDOM_INPUTS = 8  # compared on so many where no reference is given
ENGINE_OF = {"onnx": "onnx", "tflite": "litert", "pt2": "pt2"}


def engines_of(formats: Sequence[str]) -> list[str]:
    """The engines whose containers a bundle of these formats is made from."""
    return [engine for fmt, engine in ENGINE_OF.items() if fmt in (*formats, "pt2")]


@dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """What to write for every center: formats, quantized variants of them, and one file of all centers per format."""

    formats: Sequence[str] = DEFAULT_FORMATS
    schemes: Sequence[str] = ()
    stacked: bool = False

    def __post_init__(self) -> None:
        _check_names("format", self.formats, FILE_FORMATS)
        _check_names("quantization", self.schemes, quantize.SCHEMES)
        if self.schemes and not any(quantize.SCHEMES_OF[fmt] for fmt in self.formats):
            told = f"{', '.join(self.schemes)} of {', '.join(self.formats) or 'no format'}: nothing would be smaller"
            raise UsageError(told, hint="bundle with the formats onnx or tflite, which can be quantized")


def write_bundle(out: Path, material: BundleSource, options: BundleOptions | None = None) -> BundleManifest:
    """Write the folder `out`, replacing an older bundle when the new one is complete. -> manifest.json's content.

    Raises UsageError, also where `out` is no bundle, ConfigError, Malformed for names that no reader takes, or
    ProgramRefused for a file that differs from torch.
    """
    check_replaceable(out)
    if len(material.cards) != len(material.centers) or not material.centers:
        told = f"{len(material.centers)} centers and {len(material.cards)} cards"
        raise UsageError(told, hint="give one card per center")
    part = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    part.mkdir(parents=True)
    with locked_folder(part, wait=False):
        _remove_left(out, part)
        try:
            made = _BundleBuild(material, options or BundleOptions(), _Writer(part))
            manifest = checked_shape(made.manifest())  # no reader takes another, and an older bundle is there yet
            made.writer.finish(manifest, material.sign, out)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)  # a full disk does not need a part of it as well
            raise
    return manifest


def _remove_left(out: Path, part: Path) -> None:
    """Remove what killed processes wrote of this bundle; those that write hold their folders, as this one `part`."""
    named = f".{glob.escape(out.name)}.{'[0-9a-f]' * 8}.partial"
    for left in (*out.parent.glob(named), out.with_name(f".{out.name}.partial")):  # that of an earlier version
        if left != part:
            with suppress(BlockingIOError, FileNotFoundError), locked_folder(left, wait=False):
                shutil.rmtree(left, ignore_errors=True)


class _BundleBuild:
    """One bundle while it is being written."""

    def __init__(self, material: BundleSource, options: BundleOptions, writer: _Writer) -> None:
        self._material, self._wish, self.writer = material, options, writer
        self._program, self._files = material.program, material.files
        self._frozen = frozen_tensors(material.program, material.files)
        sizes = {size for engine, size in material.program.batch.items() if engine != "litert" and size != "any"}
        if options.formats and sizes:
            raise ProgramRefused(
                f"model {material.program.model!r} takes batches of {min(sizes)} only, and a center's file any number",
                hint="let forward take any batch size, as by x.shape[0] in place of len(x)",
            )
        self._network = _loader(material, self._frozen) if options.formats else None
        self._refillable: RefillableFile | None = None  # a center's TFLite file
        reference = material.reference
        self._samples = (
            random_inputs(material.program) if reference is None else reference.subsample(MAX_COMPARED_SAMPLES).x
        )
        known = {"classes": list(material.names.classes), "columns": list(material.names.columns)}
        self._named: dict[str, Any] = {key: names for key, names in known.items() if names}  # for cards and ONNX files
        if reference is not None:
            self._named["values"] = [float(reference.x.min()), float(reference.x.max())]

    def manifest(self) -> BundleManifest:
        program, put, reference = self._program, self.writer.put, self._material.reference
        manifest: BundleManifest = {
            "v": VERSION,
            "model": program.model,
            "schema": program.schema.sha256,
            "program": put("program/program.json", canonical_json(program.to_json())),
            "containers": _containers(self.writer, program, self._files),
            "reference": None if reference is None else put("reference.npz", reference.to_npz()),
        }
        pairs = zip(self._material.centers, self._material.cards, strict=True)
        manifest["centers"] = [self._center(k, vector, card) for k, (vector, card) in enumerate(pairs)]
        manifest |= self._for_newcomers()
        names = self._material.names
        if len(names.devices) > MAX_DEVICES:
            told = "the bundle does not name each device's center: of %s devices a manifest takes %s"
            log.warning(told, f"{len(names.devices):,}", f"{MAX_DEVICES:,}")
            names = replace(names, devices={})
        if names != BundleNames():
            manifest["names"] = names.to_json()
        manifest["stacked"] = {fmt: self._stacked(fmt) for fmt in self._wish.formats if self._wish.stacked}
        return manifest

    def _for_newcomers(self) -> dict[str, Any]:
        """The entries for devices that never trained: router, start, tree."""
        known, put = self._material.newcomers, self.writer.put

        def model(path: str, vector: Flat) -> dict[str, Any]:
            return put(path, codecs.encode_vector(vector, self._program.schema, codec="f32", kind="model"))

        splits = [model(f"newcomers/split-{i}.safetensors", vector) for i, vector in enumerate(known.splits)]
        return {
            "guide": None if known.router is None else put("newcomers/guide.json", write_router(known.router)),
            "start": None if known.start is None else model("newcomers/start.safetensors", known.start),
            "tree": None if known.tree is None else {"edges": known.tree.to_json(), "splits": splits},
        }

    def _center(self, k: int, vector: Flat, known: Mapping[str, Any]) -> dict[str, Any]:
        log.info("writing center %d of %d", k + 1, len(self._material.centers))
        folder, put = f"centers/center-{k}", self.writer.put
        blob = codecs.encode_vector(vector, self._program.schema, codec="f32", kind="model")
        model = put(f"{folder}/model.safetensors", blob)
        files: dict[str, Any] = {}
        if self._network is not None:
            network = self._network(vector)
            for fmt in self._wish.formats:
                path = f"{folder}/model.{fmt}"
                made = self._material.made.get(path)
                data, parity = (
                    (made, self._checked(network, made, fmt, k)) if made else self._file(network, vector, fmt, k)
                )
                files[fmt] = {**put(path, data), "parity": parity}
                known = {**known, **self._accuracy(k, data, fmt)}
                for scheme in quantize.supported_schemes(fmt, quantize.SCHEMES):
                    if scheme in self._wish.schemes or f"{folder}/model.{scheme}.{fmt}" in self._material.made:
                        files[f"{fmt}-{scheme}"] = self._variant(network, data, fmt, scheme, folder)
        card = {**known, "center": k, **model_cards.program_facts(self._program), **self._named, "files": files}
        written = {
            "json": put(f"{folder}/card.json", json.dumps(card, indent=1, sort_keys=True, allow_nan=False).encode()),
            "md": put(f"{folder}/card.md", model_cards.markdown(card).encode()),
        }
        entry = {"center": k, "card": dict(known), "model": model, "files": files, "cards": written}
        if (adapter := adapter_files(self._program, vector)) is not None:
            entry["adapter"] = {kind: put(f"{folder}/adapter/{name}", data) for kind, (name, data) in adapter.items()}
        return entry

    def _file(self, network: nn.Module, vector: Flat, fmt: str, center: int) -> tuple[bytes, float]:
        """One self-contained file, and its difference from torch.

        It is the program's own ONNX file, or another center's TFLite file, where one will do.
        """
        program = self._program
        weights = list(program.schema.split(vector).values())
        if fmt == "tflite" and self._refillable is not None:
            file = self._refillable.refilled(weights)
            with suppress(ProgramRefused):  # where a number or a mask in it comes from a weight
                return file, self._checked(network, file, fmt, center)
        if fmt == "onnx" and "onnx" in program.containers:
            file = _baked(program, self._files, self._frozen, vector)
        else:
            file = export_center(network, program.input, fmt)
        if fmt == "tflite":
            self._refillable = refillable(file, weights)
        file = self._with_facts(file, fmt)
        return file, self._checked(network, file, fmt, center)

    def _with_facts(self, file: bytes, fmt: str) -> bytes:
        """The file, with what its card says of classes and input where the format has a place for it."""
        return with_metadata(file, self._named) if fmt == "onnx" and self._named else file

    def _accuracy(self, k: int, file: bytes, fmt: str) -> dict[str, Any]:
        """The card's accuracy, measured with this file; nothing where the samples of its devices are not here."""
        held_out = self._material.held_out
        if held_out is None or not (held_out.center == k).any():
            return {}
        mine = held_out.rows(held_out.center == k)
        found = model_cards.quantiles(list(accuracy_by_device(file_logits(file, fmt, mine.x), mine).values()))
        return {} if found is None else {"accuracy": found}

    def _variant(self, network: nn.Module, data: bytes, fmt: str, scheme: str, folder: str) -> dict[str, Any]:
        """A quantized file and its difference from torch; `verify` measures the loss of accuracy.

        One that an older bundle has already is kept, unless it is wished for again.
        """
        path, wanted = f"{folder}/model.{scheme}.{fmt}", scheme in self._wish.schemes
        kept = None if wanted else self._material.made.get(path)
        small = kept or quantize.quantize_file(data, fmt, scheme, self._material.calibration)
        parity = largest_difference(network, small, fmt, self._samples)
        if not math.isfinite(parity):
            raise ProgramRefused(f"{fmt} in {scheme} gives values that are not finite", hint="leave this scheme out")
        return {**self.writer.put(path, small), "parity": parity}

    def _stacked(self, fmt: str) -> dict[str, Any]:
        log.info("writing all centers into one %s file", fmt)
        centers = np.stack(self._material.centers)
        infer = self._files[_pt2_infer(self._program)]
        made = self._material.made.get(f"stacked/centers.{fmt}")
        schema, frozen = self._program.schema, list(self._frozen.values())
        data = made or self._with_facts(export_stacked(infer, schema, centers, self._program.input, fmt, frozen), fmt)
        networks = [load_infer_module(infer, schema, vector, frozen=frozen) for vector in centers]
        off = [largest_difference(net, data, fmt, self._samples, k) for k, net in enumerate(networks)]
        parity = float(np.max(off))  # max() may pass over what is no number
        scale = max(float(np.abs(torch_logits(net, self._samples)).max()) for net in networks)
        if not parity <= parity_limit(scale):
            raise ProgramRefused(f"the stacked {fmt} file differs from torch by {parity:.1e}", hint="leave it out")
        return {**self.writer.put(f"stacked/centers.{fmt}", data), "parity": parity}

    def _checked(self, network: nn.Module, file: bytes, fmt: str, center: int) -> float:
        """The file's largest absolute difference from torch. Raises ProgramRefused above the limit."""
        parity = largest_difference(network, file, fmt, self._samples)
        scale = float(np.abs(torch_logits(network, self._samples)).max())
        if not parity <= parity_limit(scale):
            raise ProgramRefused(
                f"center {center} as {fmt} differs from torch by {parity:.1e}",
                hint=f"leave {fmt} out and report the model",
            )
        return parity


def _loader(material: BundleSource, frozen: Tensors) -> Callable[[Flat], nn.Module]:
    """Vector -> network in torch, the program's infer graph with these weights."""
    program = material.program
    infer, held = material.files[_pt2_infer(program)], list(frozen.values())
    return lambda vector: load_infer_module(infer, program.schema, vector, frozen=held)


def _pt2_infer(program: Program) -> str:
    """The sha256 of the graph that files are made from and compared with."""
    if "pt2" not in program.containers:
        raise ConfigError("a file per center needs the model or the program's pt2 container", hint="add the engine pt2")
    return program.containers["pt2"]["infer"].sha256


def _baked(program: Program, files: Mapping[str, bytes], frozen: Tensors, vector: Flat) -> bytes:
    """The program's ONNX infer graph with the weights in it."""
    prefix = {"p": "w", "b": "buffers"}
    values = program.schema.split(np.asarray(vector, dtype=program.dtype))
    weights = {f"{prefix[t.role]}/{t.name}": values[t.name] for t in program.schema.tensors}
    weights |= {f"{FROZEN}/{name}": value for name, value in frozen.items()}
    return name_batch_dimension(bake_weights(files[program.containers["onnx"]["infer"].sha256], weights))


def _containers(writer: _Writer, program: Program, files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    kinds = {
        file.sha256: container_ending(engine, name)
        for engine, held in program.containers.items()
        for name, file in held.items()
    }
    missing = sorted(set(kinds) - set(files))
    if missing:
        raise UsageError(f"containers {', '.join(missing)} are missing", hint="pass every file of the compiled program")
    return [writer.put(f"program/{sha}.{ending}", files[sha]) for sha, ending in sorted(kinds.items())]


def random_inputs(program: Program) -> Array:
    """[RANDOM_INPUTS, *input] float32, always the same; tokens where the program's golden run says so."""
    rng, shape = np.random.default_rng(0), (RANDOM_INPUTS, *program.input)
    tokens = max((run.tokens for run in program.golden.values()), default=0)
    return (rng.integers(tokens, size=shape) if tokens else rng.standard_normal(shape)).astype(np.float32)


def _check_names(what: str, names: Sequence[str], valid: Sequence[str]) -> None:
    wrong = [name for name in names if name not in valid]
    if wrong:
        raise UsageError(f"unknown {what} {', '.join(map(repr, wrong))}", hint=f"use some of {', '.join(valid)}")


class _Writer:
    """Writes below a folder that takes its final name only when everything is in it."""

    def __init__(self, part: Path) -> None:
        self._part = part

    def put(self, name: str, data: bytes) -> dict[str, Any]:
        path = self._part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return {"path": name, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}

    def finish(self, manifest: BundleManifest, sign: Signer | None, out: Path) -> None:
        """Move the older folder aside before removing it: readers find a complete bundle, or briefly none."""
        data = encode_manifest(manifest)
        self.put(MANIFEST_FILE, data)
        if sign is not None:
            self.put(SIGNATURE_FILE, sign(data).encode())
        sync_files(self._part)  # a coordinator notes next that it has a bundle
        older = out.with_name(f".{out.name}.{secrets.token_hex(4)}.older")
        if out.exists():
            out.rename(older)
        self._part.rename(out)
        sync_folder(out.parent)
        for left in out.parent.glob(f".{glob.escape(out.name)}.*.older"):  # a killed process may have left one, too
            shutil.rmtree(left, ignore_errors=True)
