"""Uploads that arrive in blocks: one open upload per device, checked block by block, then by the hash of the blob.

The bitmap drops a duplicate block before its checksum is computed. A block without an open upload is dropped. The
partial blob of a device's last announcement stays on disk until the exchange closes, so that a device that reconnects
sends only the missing blocks. Each device has a blob folder of its own, in which two exchanges may have an upload of
it: a late one, or that of its task during a test. Neither deletes what the other fills, nor what waits for the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field

from coordinator.config import CoordinatorConfig
from coordinator.rounds.exchange_rules import LEAST_PACE, UploadCredit
from coordinator.storage.store import Store
from edge_client.errors import Malformed
from edge_client.protocol.blocks import MAX_BITMAP_BYTES, Bitmap, Manifest, unpack_block
from edge_client.protocol.task import ClientId
from edge_client.protocol.topics import routing_label
from edge_client.transport.blobs import PartialBlob, StagedBlob

NO_CREDIT = "an upload waits until fewer other devices upload"  # the detail of its `busy`
MAX_BAD_BLOCKS = 16  # after this many unreadable blocks a transfer is closed


@dataclass
class BlockUpload:
    """An open upload: the file that it fills, and how many of its blocks were unreadable."""

    partial: PartialBlob
    bad: int = 0


@dataclass
class OpenUploads:
    """The open uploads of one exchange."""

    store: Store
    _open: dict[ClientId, BlockUpload] = field(default_factory=dict)

    def begin(self, cid: ClientId, manifest: Manifest) -> Bitmap:
        """Expect this blob from `cid`, and no other; -> which blocks are on disk. Raises Malformed("no_space")."""
        known = self._open.get(cid)
        if known is None or known.partial.manifest != manifest:
            self.end(cid)
            folder = self.store.updates(cid)
            folder.drop_partials(but=[manifest, *self.store.uploading.get(cid, ())])
            self._open[cid] = known = BlockUpload(folder.partial(manifest))
            self.keep(cid, manifest)
        return known.partial.bitmap

    def keep(self, cid: ClientId, manifest: Manifest) -> None:
        """Its file is needed: no exchange deletes it before `let_go`."""
        self.store.uploading.setdefault(cid, []).append(manifest)

    def let_go(self, cid: ClientId, manifest: Manifest) -> None:
        kept = self.store.uploading[cid]
        kept.remove(manifest)
        if not kept:
            del self.store.uploading[cid]

    def sizes(self) -> dict[ClientId, int]:
        return {cid: upload.partial.manifest.size for cid, upload in self._open.items()}

    def blocks(self, cid: ClientId) -> int:
        """How many blocks of the open upload are here; 0 without one."""
        upload = self._open.get(cid)
        return 0 if upload is None else upload.partial.bitmap.count

    def end(self, cid: ClientId) -> None:
        """Close the upload of `cid`; its blocks stay on disk."""
        if cid in self._open:
            self._take_out(cid).close()

    def end_all(self) -> None:
        """Close every upload; the blocks stay on disk."""
        for cid in list(self._open):
            self.end(cid)

    def abandon(self, cids: Iterable[ClientId]) -> None:
        """Close every upload, and delete the blocks of these devices, but for uploads of another exchange."""
        self.end_all()
        for cid in cids:
            self.store.updates(cid).drop_partials(but=self.store.uploading.get(cid, ()))

    def expects(self, cid: ClientId, said_label: str | None) -> bool:
        """Whether a block with this label from `cid` belongs to an open upload."""
        upload = self._open.get(cid)
        return upload is not None and routing_label(upload.partial.manifest.sha256) == said_label

    def take(self, cid: ClientId, index: int, message: bytes) -> StagedBlob | None:
        """Write one expected block; -> the blob, not durable yet, once it is complete and its hash is right.

        Raises Malformed("bad_hash") when the upload has to begin again: too many unreadable blocks, or another hash.
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

    def finish(self, cid: ClientId) -> StagedBlob:
        """Close a complete upload; -> the blob, not durable yet. Raises Malformed("bad_hash") as `take`."""
        with closing(self._take_out(cid)) as partial:
            return partial.stage()

    def _take_out(self, cid: ClientId) -> PartialBlob:
        """The file of an upload that is open no more."""
        partial = self._open.pop(cid).partial
        self.let_go(cid, partial.manifest)
        return partial

    def _count_bad(self, cid: ClientId, upload: BlockUpload) -> None:
        upload.bad += 1
        if upload.bad >= MAX_BAD_BLOCKS:
            self._take_out(cid).abandon()
            raise Malformed("bad_hash", f"{upload.bad} unreadable blocks")


@dataclass
class UploadCredits:
    """How many uploads may be open at once, and how many bytes they hold, where devices without a credit ask again.

    A silent upload loses its credit to the next device that asks. Where there is no room for that device, so does an
    upload that is too slow to end in `turn_s`, as in the rules of an exchange.
    """

    uploads: OpenUploads
    credits: int
    budget: int
    turn_s: float
    _given: dict[ClientId, UploadCredit] = field(default_factory=dict)

    @classmethod
    def of(cls, uploads: OpenUploads, config: CoordinatorConfig) -> UploadCredits:
        """Within the limits of the configuration."""
        limits = config.transfer
        return cls(uploads, limits.credits, limits.in_flight_bytes, config.round.deadline_s / LEAST_PACE)

    def give(self, cid: ClientId, update: Manifest, now_s: float) -> None:
        """A credit for what is announced; of an open upload it is the old one, which no announcement prolongs."""
        if cid in self.uploads.sizes():
            self._given[cid].size = max(self._given[cid].size, update.size)
        else:
            self._given[cid] = UploadCredit(update.size, now_s)

    def heard(self, cid: ClientId, size: int, now_s: float) -> None:
        """A new block of `size` bytes has come."""
        self._given[cid].heard(size, now_s)

    def is_full(self, cid: ClientId, size: int, now_s: float) -> bool:
        """Whether there is no credit for an upload of this device."""
        self._end(lambda credit: now_s >= credit.silent_at_s)
        if self._has_room(cid, size):
            return False
        self._end(lambda credit: now_s >= credit.slow_at_s(self.turn_s))
        return not self._has_room(cid, size)

    def _has_room(self, cid: ClientId, size: int) -> bool:
        sizes = self.uploads.sizes()
        if not sizes or cid in sizes:
            return True
        return len(sizes) < self.credits and sum(sizes.values()) + size <= self.budget

    def _end(self, is_over: Callable[[UploadCredit], bool]) -> None:
        for cid in [c for c in self.uploads.sizes() if is_over(self._given[c])]:
            self.uploads.end(cid)


def have_field(have: Bitmap) -> str | None:
    """The `have` field of a `go`: None when no block is on disk, or when the bitmap does not fit into a message."""
    if have.count == 0 or (have.total + 7) // 8 > MAX_BITMAP_BYTES:
        return None
    return have.to_base64()
