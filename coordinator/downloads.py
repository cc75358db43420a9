"""The block server: which device may fetch which blob, and the blocks that it asks for.

Whatever was not granted is `not_yours`, in the same words and the same time whether the blob exists or not: nobody can
probe for another device's update. Updates are never granted at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.link import WINDOW, Link
from edge_client.errors import Malformed
from edge_client.protocol.blocks import Manifest, body_range
from edge_client.protocol.task import ClientId
from edge_client.transport.blobs import BlobFolder


@dataclass
class Downloads:
    """Grants per device and for everybody; both map a sha256 to its manifest."""

    blobs: BlobFolder
    link: Link
    _shared: dict[str, Manifest] = field(default_factory=dict)
    _granted: dict[ClientId, dict[str, Manifest]] = field(default_factory=dict)

    def share(self, manifests: Iterable[Manifest]) -> None:
        """Let every member fetch these: programs, containers, the catalog and what it names."""
        self._shared |= {m.sha256: m for m in manifests}

    def grant(self, cid: ClientId, manifests: Iterable[Manifest]) -> None:
        """Let one device fetch these, and no longer what it was granted before."""
        self._granted[cid] = {m.sha256: m for m in manifests}

    def answer(self, cid: ClientId, request: Mapping[str, Any]) -> None:
        """Serve one `get`: at most a window of blocks. Raises Malformed with the code of the error answer."""
        sha256 = request["sha256"]
        manifest = self._granted.get(cid, {}).get(sha256) or self._shared.get(sha256)
        if manifest is None:
            raise Malformed("not_yours", "no such blob for you")
        if request["block"] != manifest.block:
            raise Malformed("bad_range", f"blocks of this blob have {manifest.block} bytes")
        indices = [first + i for first, count in request["at"] for i in range(count)][:WINDOW]
        ranges = [(index, *body_range(manifest, index)) for index in indices]
        if not self.blobs.has(sha256):
            raise Malformed("unknown_blob", "this blob is not held any more")
        with self.blobs.path(sha256).open("rb") as file:
            for index, start, stop in ranges:
                file.seek(start)
                self.link.send_block(cid, manifest, index, file.read(stop - start))
