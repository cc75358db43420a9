"""Which center suits a device that sends its losses, and when none does. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import compress
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.catalog import Catalog
from edge_client.protocol.program import Program
from edge_client.protocol.task import Schema

ALTERNATIVES = 8


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
