"""The catalog of centers: one JSON blob that names what a device needs to choose a center and to run it.

Its form is in PROTOCOL.md 12. The coordinator writes it, devices that never trained read it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_client.errors import Malformed
from edge_client.protocol import fields
from edge_client.protocol.blocks import LIMITS, Manifest
from edge_client.protocol.messages import canonical, parse_json

VERSION = 1
MAX_CENTERS = 1024
ENGINE_OR_FORMAT = fields.matching("[a-z0-9]{1,16}")
FILES = fields.map_of(ENGINE_OR_FORMAT, fields.manifest("container"), 16)
CENTER = fields.required(
    id=fields.integer(0, MAX_CENTERS - 1),
    model=fields.manifest("model"),
    devices=fields.integer(0, fields.SAFE),
    files=FILES,
)
CATALOG = fields.record(
    fields.required(
        v=fields.integer(0, fields.SAFE),
        ver=fields.integer(0, fields.SAFE),
        program=fields.manifest("program"),
        container=FILES,
        centers=fields.list_of(fields.record(CENTER), 0, MAX_CENTERS),
        abstain=fields.number(),
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
    """What is on offer; a center's id is its place. A device whose least mean loss is above `abstain` fits none."""

    version: int
    program: Manifest
    containers: Mapping[str, Manifest]  # engine -> the file that evaluates
    centers: tuple[CatalogCenter, ...]
    abstain: float

    def to_bytes(self) -> bytes:
        """The blob of kind "catalog"; equal catalogs give equal bytes."""
        centers = [
            {"id": k, "model": center.model.to_json(), "devices": center.devices, "files": _json(center.files)}
            for k, center in enumerate(self.centers)
        ]
        return canonical(
            {
                "v": VERSION,
                "ver": self.version,
                "program": self.program.to_json(),
                "container": _json(self.containers),
                "centers": centers,
                "router": None,
                "sketches": None,
                "abstain": self.abstain,
            }
        )

    @staticmethod
    def from_bytes(data: bytes) -> Catalog:
        """What `to_bytes` wrote, everything checked. Raises Malformed."""
        raw = CATALOG(parse_json(data, LIMITS["catalog"]), "catalog")
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
        )

    def blobs(self) -> list[Manifest]:
        """Everything that the catalog names."""
        centers = [blob for center in self.centers for blob in (center.model, *center.files.values())]
        return [self.program, *self.containers.values(), *centers]


def _json(manifests: Mapping[str, Manifest]) -> dict[str, object]:
    return {name: manifest.to_json() for name, manifest in sorted(manifests.items())}


def _manifests(raw: Mapping[str, Mapping[str, object]]) -> dict[str, Manifest]:
    return {name: Manifest.from_json(manifest) for name, manifest in raw.items()}
