"""The catalog of centers: one JSON blob that names what a device needs to choose a center and to run it.

Its form is in PROTOCOL.md 12. The coordinator writes it, devices that never trained read it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_client.errors import Malformed
from edge_client.protocol import validators
from edge_client.protocol.blocks import KIND_LIMITS, Manifest
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.nearest.center_tree import EDGES_FIELD, CenterTree

VERSION = 1
MAX_CENTERS = 1024
MAX_CLASS_NAMES, MAX_CLASS_NAME_CHARACTERS = 1024, 64
ENGINE_OR_FORMAT_FIELD = validators.matching("[a-z0-9]{1,16}")
FILES_SCHEMA = validators.map_of(ENGINE_OR_FORMAT_FIELD, validators.manifest("container"), 16)
CENTER_SCHEMA = validators.required(
    id=validators.integer(0, MAX_CENTERS - 1),
    model=validators.manifest("model"),
    devices=validators.integer(0),
    files=FILES_SCHEMA,
)
CATALOG_SCHEMA = validators.record(
    validators.required(
        v=validators.integer(0),
        ver=validators.integer(0),
        program=validators.manifest("program"),
        container=FILES_SCHEMA,
        centers=validators.list_of(validators.record(CENTER_SCHEMA), 0, MAX_CENTERS),
        abstain=validators.number(),
    )
    | validators.optional(
        classes=validators.list_of(validators.text(MAX_CLASS_NAME_CHARACTERS), 0, MAX_CLASS_NAMES),
        router=validators.or_null(validators.manifest("router")),
        start=validators.or_null(validators.manifest("model")),
        tree=validators.or_null(
            validators.record(
                validators.required(
                    edges=EDGES_FIELD, splits=validators.list_of(validators.manifest("model"), 1, MAX_CENTERS)
                )
            )
        ),
    )
)


@dataclass(frozen=True, kw_only=True)
class CatalogCenter:
    """One center: its model as tensors, how many devices trained it, and its self-contained file per format."""

    model: Manifest
    devices: int
    files: Mapping[str, Manifest]


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """What is on offer; a center's id is its place. A device whose least mean loss is above `abstain` fits none.

    `router` names a `Router`, if the run has one; `start` the model that a local round begins at; `tree`
    the way to the centers of a method that splits them, with a model for each of its `splits`. `class_names` are what
    the fleet calls the classes 0, 1, ...; it may be empty.
    """

    version: int
    program: Manifest
    containers: Mapping[str, Manifest]  # engine -> the file that evaluates
    centers: tuple[CatalogCenter, ...]
    abstain: float
    router: Manifest | None = None
    start: Manifest | None = None
    tree: CenterTree | None = None
    splits: tuple[Manifest, ...] = ()
    class_names: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """The blob of kind "catalog"; equal catalogs give equal bytes."""
        centers = [
            {"id": k, "model": center.model.to_json(), "devices": center.devices, "files": _json(center.files)}
            for k, center in enumerate(self.centers)
        ]
        catalog = {
            "v": VERSION,
            "ver": self.version,
            "program": self.program.to_json(),
            "container": _json(self.containers),
            "centers": centers,
            "router": None if self.router is None else self.router.to_json(),
            "sketches": None,
            "abstain": self.abstain,
        }
        if self.class_names:
            catalog["classes"] = list(self.class_names)
        if self.start is not None:
            catalog["start"] = self.start.to_json()
        if self.tree is not None:
            catalog["tree"] = {"edges": self.tree.to_json(), "splits": [split.to_json() for split in self.splits]}
        return canonical_json(catalog)

    @staticmethod
    def from_bytes(data: bytes) -> Catalog:
        """What `to_bytes` wrote, everything checked. Raises Malformed."""
        raw = CATALOG_SCHEMA(parse_json(data, KIND_LIMITS["catalog"]), "catalog")
        if raw["v"] != VERSION:
            raise Malformed("bad_version", f"catalog version {raw['v']}; this side reads {VERSION}")
        if [center["id"] for center in raw["centers"]] != list(range(len(raw["centers"]))):
            raise Malformed("bad_field", "the ids of a catalog's centers must count from 0")
        return Catalog(
            version=raw["ver"],
            program=Manifest.from_json(raw["program"]),
            containers=_manifests(raw["container"]),
            centers=tuple(
                CatalogCenter(model=Manifest.from_json(c["model"]), devices=c["devices"], files=_manifests(c["files"]))
                for c in raw["centers"]
            ),
            abstain=float(raw["abstain"]),
            router=_maybe(raw.get("router")),
            start=_maybe(raw.get("start")),
            class_names=tuple(raw.get("classes", ())),
            **_tree(raw.get("tree"), len(raw["centers"])),
        )

    def blobs(self) -> list[Manifest]:
        """Everything that the catalog names."""
        centers = [blob for center in self.centers for blob in (center.model, *center.files.values())]
        more = [blob for blob in (self.router, self.start) if blob is not None]
        return [self.program, *self.containers.values(), *centers, *more, *self.splits]


def fitting_class_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names, or none where a catalog has no place for all of them."""
    fits = len(names) <= MAX_CLASS_NAMES and all(len(name) <= MAX_CLASS_NAME_CHARACTERS for name in names)
    return tuple(names) if fits else ()


def _maybe(raw: Mapping[str, object] | None) -> Manifest | None:
    return None if raw is None else Manifest.from_json(raw)


def _tree(raw: Mapping[str, Any] | None, centers: int) -> dict[str, Any]:
    if raw is None:
        return {}
    tree, splits = CenterTree.from_json(raw["edges"], centers), tuple(map(Manifest.from_json, raw["splits"]))
    if len(splits) != tree.splits:
        raise Malformed("bad_field", f"a tree of {tree.splits} splits has {len(splits)} models")
    return {"tree": tree, "splits": splits}


def _json(manifests: Mapping[str, Manifest]) -> dict[str, object]:
    return {name: manifest.to_json() for name, manifest in sorted(manifests.items())}


def _manifests(raw: Mapping[str, Mapping[str, object]]) -> dict[str, Manifest]:
    return {name: Manifest.from_json(manifest) for name, manifest in raw.items()}
