"""The catalog of centers: what a device that never trained needs to choose one, and the answer to its question.

The catalog is one JSON blob that names other blobs: the program, the centers, their ready-to-run files. `nearest`
answers a device that sends its losses. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import compress
from edge_client.protocol.blocks import LIMITS, Manifest
from edge_client.protocol.messages import canonical, parse_json
from edge_client.protocol.program import Program
from edge_client.protocol.task import Schema

VERSION = 1
ALTERNATIVES = 8
FUNCTION = "evaluate"  # what a device runs to choose by loss


@dataclass(frozen=True, kw_only=True)
class CatalogCenter:
    """One center: its model as tensors, how many devices trained it, and its self-contained file per format."""

    model: Manifest
    devices: int
    files: Mapping[str, Manifest]


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """What is on offer. A device whose least mean loss is above `abstain` is told that none fits."""

    version: int
    program: Manifest
    containers: Mapping[str, Manifest]  # engine -> the file that evaluates
    centers: Sequence[CatalogCenter]
    abstain: float

    def to_bytes(self) -> bytes:
        """The blob of kind "catalog"."""
        centers = [
            {
                "id": k,
                "model": center.model.to_json(),
                "devices": center.devices,
                "files": {form: manifest.to_json() for form, manifest in sorted(center.files.items())},
            }
            for k, center in enumerate(self.centers)
        ]
        return canonical(
            {
                "v": VERSION,
                "ver": self.version,
                "program": self.program.to_json(),
                "container": {engine: manifest.to_json() for engine, manifest in sorted(self.containers.items())},
                "centers": centers,
                "router": None,
                "sketches": None,
                "abstain": self.abstain,
            }
        )

    @staticmethod
    def from_bytes(data: bytes) -> Catalog:
        """What `to_bytes` wrote."""
        raw = parse_json(data, LIMITS["catalog"])
        centers = [
            CatalogCenter(
                model=Manifest.from_json(center["model"]),
                devices=center["devices"],
                files={form: Manifest.from_json(m) for form, m in center["files"].items()},
            )
            for center in raw["centers"]
        ]
        return Catalog(
            version=raw["ver"],
            program=Manifest.from_json(raw["program"]),
            containers={engine: Manifest.from_json(m) for engine, m in raw["container"].items()},
            centers=centers,
            abstain=raw["abstain"],
        )

    def blobs(self) -> list[Manifest]:
        """Everything that the catalog names."""
        centers = [blob for center in self.centers for blob in (center.model, *center.files.values())]
        return [self.program, *self.containers.values(), *centers]


def guessing_loss(program: Program) -> float:
    """The mean loss of a model that only guesses: a center above it knows nothing about a device's data."""
    return math.log(program.classes) if program.loss == "cross-entropy" else math.sqrt(np.finfo(np.float32).max)


def nearest(catalog: Catalog, question: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """The fields of the answer to a `near`: the center of least loss or null, its loss, and the next best ones.

    Raises Malformed when the question cannot be answered.
    """
    if question["how"] != "loss":
        raise Malformed("bad_field", f"this coordinator answers near by loss, not by {question['how']}")
    manifest = Manifest.from_json(question["stats"])
    if manifest.inline is None:
        raise Malformed("bad_field", "losses travel inline")
    losses = compress.decode_stats(manifest.inline, schema, question.get("n", 1), models=len(catalog.centers)).losses
    if losses is None:
        raise Malformed("bad_schema", "the statistics hold no losses")
    order = [int(k) for k in np.argsort(losses, kind="stable")]
    best = order[0]
    fits = 0 <= losses[best] <= catalog.abstain
    others = [{"center": k, "distance": float(losses[k])} for k in (order[1:] if fits else order)]
    return {
        "center": best if fits else None,
        "distance": max(0.0, float(losses[best])),
        "alternatives": [other for other in others if other["distance"] >= 0][:ALTERNATIVES],
    }
