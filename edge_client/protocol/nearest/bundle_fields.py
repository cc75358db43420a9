"""Fields of a bundle's manifest.json that both a device and the bundle's reader check (docs/serve-centers.md)."""

from __future__ import annotations

from edge_client.protocol import validators
from edge_client.protocol.nearest.catalog import MAX_CENTERS
from edge_client.protocol.nearest.center_tree import EDGES_FIELD

MAX_MANIFEST_BYTES = 16 << 20  # 1,024 centers with a few variants each
MAX_CLASSES = 65_536
HASH_FIELD = validators.matching("[0-9a-f]{64}")
NAME_FIELD = validators.text(1_024)  # of a class, of a column


def file_field(max_bytes: int) -> validators.Check:
    """{"path", "sha256", "size"} of a file of at most `max_bytes`."""
    return validators.record(
        validators.required(
            path=validators.matching("[A-Za-z0-9._/-]{1,256}"),
            sha256=HASH_FIELD,
            size=validators.integer(0, max_bytes),
        )
    )


def files_field(file: validators.Check) -> validators.Check:
    """Files by variant."""
    return validators.map_of(validators.matching("[a-z0-9-]{1,32}"), file, 64)


def newcomer_fields(file: validators.Check) -> validators.FieldTable:
    """What a device that never trained finds its center by, as far as the run has it."""
    tree = validators.required(edges=EDGES_FIELD, splits=validators.list_of(file, 1, MAX_CENTERS))
    return validators.optional(
        guide=validators.or_null(file),
        start=validators.or_null(file),
        tree=validators.or_null(validators.record(tree)),
    )
