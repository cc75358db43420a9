"""Read a bundle: the centers of a run as a self-contained, signed folder.

    manifest.json             everything below by hash; manifest.sig signs it where there is a key (bundle_contents.py)
    program/program.json      the training program, and its containers beside it, named <sha256>.<ending>; those of
                              torch (.pt2) always: the centers' files are made from that graph and compared with it
    centers/center-K/         model.safetensors (weights for the program), card.json, card.md, and a file
                              per variant, self-contained: model.onnx, model.tflite, model.pt2, model.int8.onnx;
                              of a peft model also adapter/, a folder that peft loads
    stacked/centers.FORMAT    all centers in one file, with the inputs center and x, if asked for
    newcomers/                guide.json (protocol/nearest/router_file.py), start.safetensors, split-N.safetensors, as
                              the run has them: how a device that never trained finds its center
    reference.npz             samples (x, and what is known of them) to compare files on, if there were any

The manifest's schema is in docs/serve-centers.md. writer.py writes bundles.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from edge_client.errors import ConfigError, Malformed, UsageError
from edge_client.printable import counted
from edge_client.protocol import codecs, signing, validators
from edge_client.protocol.blocks import MAX_INTEGER
from edge_client.protocol.messages import parse_json
from edge_client.protocol.nearest import bundle_fields
from edge_client.protocol.nearest.bundle_fields import MAX_CLASSES, MAX_MANIFEST_BYTES, NAME_FIELD
from edge_client.protocol.nearest.catalog import MAX_CENTERS
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.nearest.router import Router
from edge_client.protocol.nearest.router_file import read_router
from edge_client.protocol.program import FROZEN, MAX_PROGRAM_BYTES, Program
from edge_client.protocol.task import Flat
from export.bundle.bundle_contents import BundleNames, LabelledSamples, NewcomerData
from export.compiler.program_folder import FILE_ENDINGS
from export.foreign_files import read_plain_file

if TYPE_CHECKING:
    from torch import nn

VERSION = 1
MANIFEST_FILE, SIGNATURE_FILE = "manifest.json", "manifest.sig"
BundleManifest = dict[str, Any]
FileEntry = Mapping[str, Any]  # {"path", "sha256", "size"}

FILE_SCHEMA = bundle_fields.file_field(MAX_INTEGER)
FILES_SCHEMA = bundle_fields.files_field(FILE_SCHEMA)
CENTER_SCHEMA = validators.required(
    center=validators.integer(0, MAX_CENTERS - 1), card=validators.record({}), model=FILE_SCHEMA, files=FILES_SCHEMA
) | validators.optional(cards=FILES_SCHEMA, adapter=FILES_SCHEMA)
MAX_COLUMNS, MAX_DEVICES = 65_536, 100_000


def _class_field(value: Any, name: str) -> str | bool:  # noqa: ANN401 - see `validators.Check`
    return value if isinstance(value, bool) else str(NAME_FIELD(value, name))


NAMES_SCHEMA = validators.record(
    validators.required(
        classes=validators.list_of(_class_field, 0, MAX_CLASSES),
        columns=validators.list_of(NAME_FIELD, 0, MAX_COLUMNS),
        devices=validators.map_of(
            validators.matching("[A-Za-z0-9_-]{1,64}"), validators.integer(0, MAX_CENTERS - 1), MAX_DEVICES
        ),
    )
)
BUNDLE_SCHEMA = validators.record(
    validators.required(
        v=validators.integer(0),
        model=validators.text(512),
        schema=bundle_fields.HASH_FIELD,
        program=FILE_SCHEMA,
        containers=validators.list_of(FILE_SCHEMA, 0, 64),
        reference=validators.or_null(FILE_SCHEMA),
        centers=validators.list_of(validators.record(CENTER_SCHEMA), 1, MAX_CENTERS),
    )
    | validators.optional(names=NAMES_SCHEMA, stacked=FILES_SCHEMA)
    | bundle_fields.newcomer_fields(FILE_SCHEMA)
)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle whose files all have the hashes of its manifest; `read_bundle` makes it.

    `names` has the user's classes and columns and the center of each device, as far as the bundle has them.

    >>> import fedcenters as fc, tempfile
    >>> result = fc.simulate(fc.FedAvg(local_steps=2), fleet=fc.fleets.digits(devices=3), rounds=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     bundle = result.export(f"{folder}/centers", formats=("onnx",))
    ...     print(bundle.module(0))
    Center(center 0 of digits-mlp: [1, 8, 8] -> [10])
    >>> bundle, bundle.names.devices["device-00"]
    (Bundle(digits-mlp, 1 center: onnx), 0)
    """

    root: Path
    raw: bytes = field(repr=False)  # manifest.json
    manifest: BundleManifest = field(repr=False)
    program: Program = field(repr=False)

    @property
    def names(self) -> BundleNames:
        told = self.manifest.get("names", {})
        classes, columns = (tuple(told.get(name, ())) for name in ("classes", "columns"))
        return BundleNames(classes=classes, columns=columns, devices=told.get("devices", {}))

    def __repr__(self) -> str:
        """The model, the number of centers, and the files of each."""
        centers = self.manifest["centers"]
        files = ", ".join(sorted(centers[0]["files"])) or "weights only"
        return f"Bundle({self.program.model}, {counted(len(centers), 'center')}: {files})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{center['center']}</td><td>{html.escape(str(center['card'].get('devices', '')))}</td>"
            f"<td>{html.escape(', '.join(f['path'] for f in center['files'].values()))}</td></tr>"
            for center in self.manifest["centers"]
        )
        head = "<tr><th>center</th><th>devices</th><th>files</th></tr>"
        return f"<p>{html.escape(repr(self))}</p><table>{head}{rows}</table>"

    def vector(self, center: int) -> Flat:
        """The center's weights [schema.size] float32."""
        return self._vector(self.manifest["centers"][center]["model"])

    def module(self, center: int) -> nn.Module:
        """The center in torch: `x [batch, *input]` -> logits. No other method needs torch. Raises UsageError."""
        from export.bundle.center_files import frozen_tensors, load_infer_module

        count = len(self.manifest["centers"])
        if not 0 <= center < count:
            raise UsageError(f"there is no center {center}", hint=f"there are {count}, from 0 on")
        shapes = f"{list(self.program.input)} -> {list(self.program.target)}"
        told = f"center {center} of {self.program.model}: {shapes}"
        infer, frozen = self.container("pt2", "infer"), list(frozen_tensors(self.program, self.files()).values())
        return load_infer_module(infer, self.program.schema, self.vector(center), told, frozen=frozen)

    @cached_property
    def router(self) -> Router | None:
        """The router that assigns a center to a device that never trained."""
        entry = self.manifest.get("guide")
        return None if entry is None else read_router(self.read(entry))

    def newcomers(self) -> NewcomerData:
        """What it has for devices that never trained: router, start, tree."""
        start, tree = self.manifest.get("start"), self.manifest.get("tree")
        splits = [] if tree is None else [self._vector(entry) for entry in tree["splits"]]
        return NewcomerData(
            router=self.router,
            start=None if start is None else self._vector(start),
            tree=None if tree is None else CenterTree.from_json(tree["edges"], len(self.manifest["centers"])),
            splits=splits,
        )

    def _vector(self, entry: FileEntry) -> Flat:
        return codecs.decode_vector(self.read(entry), self.program.schema, kind="model")

    def read(self, entry: FileEntry) -> bytes:
        """A file of the manifest. Raises Malformed where it is another one by now, as of a later export."""
        return _checked(self.root, entry)

    def container(self, engine: str, function: str) -> bytes:
        """A function's file, or that of the frozen parameters. Raises Malformed as `read`."""
        held = self.program.containers.get(engine, {}).get(function)
        if held is None:
            raise Malformed("bad_bundle", f"the bundle's program has no {function} for {engine}")
        path = f"program/{held.sha256}.{container_ending(engine, function)}"
        return self.read({"path": path, "sha256": held.sha256, "size": held.size})

    def files(self) -> dict[str, bytes]:
        """Every container by hash."""
        return {
            c.sha256: self.container(engine, function)
            for engine, functions in self.program.containers.items()
            for function, c in functions.items()
        }

    def reference_samples(self) -> LabelledSamples | None:
        """The bundle's own samples, if it has any."""
        entry = self.manifest["reference"]
        if entry is None:
            return None
        self.read(entry)  # for its hash
        return LabelledSamples.read(self.root / entry["path"])


def read_bundle(path: str | Path, trusted: Sequence[bytes] = ()) -> Bundle:
    """Check every hash, then read; with public keys also the signature.

    `module(k)` of the result is center k in torch, `vector(k)` its weights, `manifest` what is known of it. Raises
    ConfigError for a folder that is no bundle, Malformed for a changed one.

    >>> import fedcenters as fc, tempfile
    >>> result = fc.simulate(fc.FedAvg(local_steps=2), fleet=fc.fleets.digits(devices=3), rounds=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result.export(f"{folder}/centers", formats=("onnx",))
    ...     fc.read_bundle(f"{folder}/centers").names.devices["device-00"]
    Bundle(digits-mlp, 1 center: onnx)
    0
    """
    path = Path(path)
    raw = _manifest_bytes(path)
    if trusted:
        check_signature(path, raw, trusted)
    manifest = checked_shape(parse_json(raw, MAX_MANIFEST_BYTES))
    for entry in file_entries(manifest):
        _checked(path, entry)
    program = Program.from_json(parse_json(_checked(path, manifest["program"]), MAX_PROGRAM_BYTES))
    bundle = Bundle(root=path, raw=raw, manifest=manifest, program=program)
    if bundle.router is not None and bundle.router.centers != len(manifest["centers"]):
        raise Malformed(
            "bad_field", f"a guide to {bundle.router.centers} centers, there are {len(manifest['centers'])}"
        )
    return bundle


def container_ending(engine: str, function: str) -> str:
    """Of the file that program.json lists under this engine and function."""
    return "safetensors" if function == FROZEN else FILE_ENDINGS[engine]


def check_replaceable(out: Path) -> str:
    """-> what a bundle that takes the place of `out` replaces, in words; "" for nothing and for an empty folder.

    Raises UsageError where something else than an older bundle is there.
    """
    if out.name in {"", ".."}:
        raise UsageError(f"{out} has no name that a bundle could take", hint="name the folder, as ../centers")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return ""
    try:
        manifest = json.loads((out / MANIFEST_FILE).read_bytes())
        card, kinds = manifest["centers"][0]["card"], sorted(manifest["centers"][0]["files"])
        centers, model = counted(len(manifest["centers"]), "center"), manifest["model"]
        made = f" by {card['method']}" if "method" in card else ""
    except (OSError, ValueError, LookupError, TypeError):
        hint = "give --out a new folder, or that of an older bundle"
        raise UsageError(f"{out} exists and is not a bundle", hint=hint) from None
    files = f" with {', '.join(kinds)} files" if kinds else ""
    return f"{out} has an export of {centers} of {model}{made}{files}; it is replaced"


def check_signature(path: Path, manifest: bytes, trusted: Sequence[bytes]) -> str:
    """The federation that signed the bundle at `path`; raises Malformed when none of the `trusted` keys did."""
    try:
        text = read_plain_file(path / SIGNATURE_FILE, signing.MAX_SIGNATURE_BYTES)
    except OSError:
        raise Malformed("bad_signature", f"{path} is not signed") from None
    return signing.verify_bundle(manifest, text, trusted)


def file_entries(manifest: BundleManifest) -> Iterator[FileEntry]:
    """Every file that a manifest names."""
    yield manifest["program"]
    yield from manifest["containers"]
    if manifest["reference"]:
        yield manifest["reference"]
    yield from manifest.get("stacked", {}).values()
    for name in ("guide", "start"):
        if manifest.get(name):
            yield manifest[name]
    yield from (manifest.get("tree") or {"splits": []})["splits"]
    for center in manifest["centers"]:
        yield center["model"]
        yield from center["files"].values()
        yield from center.get("cards", {}).values()
        yield from center.get("adapter", {}).values()


def encode_manifest(manifest: BundleManifest) -> bytes:
    """manifest.json."""
    return json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False).encode()


def checked_shape(manifest: Any) -> BundleManifest:  # noqa: ANN401 - JSON from anywhere
    """The manifest itself, after a check of every field that is read. Raises Malformed."""
    found = BUNDLE_SCHEMA(manifest, MANIFEST_FILE)
    if found["v"] != VERSION:
        raise Malformed("bad_version", f"bundle version {found['v']}; this reads {VERSION}")
    if [center["center"] for center in found["centers"]] != list(range(len(found["centers"]))):
        raise Malformed("bad_field", "the centers of a bundle must count from 0")
    if (tree := found.get("tree")) is not None:
        made = CenterTree.from_json(tree["edges"], len(found["centers"]))
        if made.splits != len(tree["splits"]):
            raise Malformed("bad_field", f"a tree of {made.splits} splits has {len(tree['splits'])} models")
    return dict(manifest)


def _manifest_bytes(path: Path) -> bytes:
    try:
        return read_plain_file(path / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    except OSError as missing:
        raise ConfigError(
            f"{path} is not a bundle: {missing.strerror}", hint="give the folder with manifest.json"
        ) from None


def _checked(root: Path, entry: FileEntry) -> bytes:
    """A file's bytes, which are those that the manifest names."""
    name = PurePosixPath(entry["path"])
    if name.is_absolute() or ".." in name.parts or "\0" in entry["path"]:
        raise Malformed("bad_bundle", f"{entry['path']!r} lies outside the bundle")
    try:
        data = read_plain_file(root / name, entry["size"])
    except OSError as missing:
        raise Malformed("bad_bundle", f"{name}: {missing.strerror}") from None
    if len(data) != entry["size"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise Malformed("bad_hash", f"{name} is not the file that manifest.json names")
    return data
