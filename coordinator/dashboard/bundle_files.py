"""The files of a run's bundle that a page may download: those that its manifest names, and no other.

A request chooses among the listed paths; no path is put together from its text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_client.errors import FedcentersError
from edge_client.protocol.messages import parse_json
from edge_client.protocol.nearest.bundle_fields import MAX_MANIFEST_BYTES
from export.bundle.reader import MANIFEST_FILE, file_entries
from export.foreign_files import read_plain_file

MAX_LISTED_FILES = 2_000


class BundleFiles:
    """The files that the manifest in `folder` names; none without a manifest that can be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries = {entry["path"]: entry for entry in _entries(folder)}

    def entries(self) -> list[dict[str, Any]]:
        return [{key: entry.get(key) for key in ("path", "size", "sha256")} for entry in self._entries.values()]

    def path(self, name: str) -> Path | None:
        """The file that the manifest calls `name`."""
        if name not in self._entries:
            return None
        path = (self._folder / name).resolve()
        inside = path.is_relative_to(self._folder.resolve()) and path.is_file()
        return path if inside else None


def _entries(folder: Path) -> list[dict[str, Any]]:
    path = folder / MANIFEST_FILE
    try:
        manifest = parse_json(read_plain_file(path, MAX_MANIFEST_BYTES), MAX_MANIFEST_BYTES)
        named = [dict(entry) for entry in file_entries(manifest)]
        size = path.stat().st_size
    except (OSError, FedcentersError, KeyError, TypeError, AttributeError):
        return []
    return [{"path": MANIFEST_FILE, "size": size, "sha256": ""}, *named[:MAX_LISTED_FILES]]
