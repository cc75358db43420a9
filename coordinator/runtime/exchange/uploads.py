"""Uploads that arrive in blocks: one open upload per device, checked block by block, then by the hash of the whole.

Duplicates fall out by the bitmap before checksum and disk; what has no open upload is counted and dropped. Partials
stay on disk, so a device that comes back sends only what is missing. Blobs of one device never answer for another's.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.storage.store import Store
from edge_client.errors import Malformed
from edge_client.protocol.blocks import MAX_BITMAP_BYTES, Bitmap, Manifest, unpack_block
from edge_client.protocol.task import ClientId
from edge_client.protocol.topics import routing_label
from edge_client.transport.blobs import PartialBlob

MAX_BAD_BLOCKS = 16  # after this many unreadable blocks a transfer is closed


@dataclass
class BlockUpload:
    """An upload under way: the file that it fills, and how many blocks of it could not be read."""

    partial: PartialBlob
    bad: int = 0


@dataclass
class OpenUploads:
    """The open uploads of one exchange."""

    store: Store
    dropped: int = 0
    _open: dict[ClientId, BlockUpload] = field(default_factory=dict)

    def begin(self, cid: ClientId, manifest: Manifest) -> Bitmap:
        """Expect this blob from `cid`, instead of any other; -> which of its blocks are here. Malformed("no_space")."""
        known = self._open.get(cid)
        if known is None or known.partial.manifest != manifest:
            self.end(cid)
            self._open[cid] = known = BlockUpload(self.store.updates(cid).partial(manifest))
        return known.partial.bitmap

    def sizes(self) -> dict[ClientId, int]:
        """The size of each open upload, in bytes."""
        return {cid: upload.partial.manifest.size for cid, upload in self._open.items()}

    def end(self, cid: ClientId) -> None:
        """Expect nothing from `cid` any more; what has arrived stays."""
        upload = self._open.pop(cid, None)
        if upload is not None:
            upload.partial.close()

    def end_all(self) -> None:
        """Expect nothing any more; what has arrived stays."""
        for cid in list(self._open):
            self.end(cid)

    def abandon_all(self) -> None:
        """Nobody needs what is still under way."""
        for upload in self._open.values():
            upload.partial.abandon()
        self._open.clear()

    def expects(self, cid: ClientId, said_label: str | None) -> bool:
        """Whether a block of this label from `cid` belongs to an open upload; counted if not."""
        upload = self._open.get(cid)
        if upload is not None and routing_label(upload.partial.manifest.sha256) == said_label:
            return True
        self.dropped += 1
        return False

    def take(self, cid: ClientId, index: int, message: bytes) -> Path | None:
        """Keep one expected block; -> the blob's file once it is complete and its hash is right.

        Raises Malformed("bad_hash") when the upload has to begin again: too many bad blocks, or the whole hash differs.
        """
        upload = self._open[cid]
        partial = upload.partial
        try:
            if partial.bitmap.has(index):
                return None
            body = unpack_block(message, partial.manifest, index)
        except Malformed:
            self._count_bad(cid, upload)
            return None
        partial.write_block(index, body)
        return self.finish(cid) if partial.bitmap.complete else None

    def finish(self, cid: ClientId) -> Path:
        """The file of a blob whose blocks are all here; its upload is over. Malformed("bad_hash") as `take`."""
        with closing(self._open.pop(cid).partial) as partial:
            return partial.finish()

    def _count_bad(self, cid: ClientId, upload: BlockUpload) -> None:
        upload.bad += 1
        if upload.bad >= MAX_BAD_BLOCKS:
            del self._open[cid]
            upload.partial.abandon()
            raise Malformed("bad_hash", f"{upload.bad} unreadable blocks")


def have_field(have: Bitmap) -> str | None:
    """The `have` of a `go`: absent when nothing is here, and when it would not fit into a message."""
    if have.count == 0 or (have.total + 7) // 8 > MAX_BITMAP_BYTES:
        return None
    return have.to_base64()
