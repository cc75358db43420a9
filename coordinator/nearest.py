"""Which center suits a device that sends its losses, and when none does. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_client.errors import Malformed
from edge_client.protocol import choice, compress
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.catalog import Catalog
from edge_client.protocol.task import Schema


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
    return choice.by_distance(losses, catalog.abstain).to_json()
