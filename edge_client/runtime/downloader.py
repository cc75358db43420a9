"""Download of blobs, one after another, block by block, into a folder.

`Downloader` has no loop: the caller hands it blocks and errors, and calls `step`, which asks for the next blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from edge_client.config import ClientConfig
from edge_client.errors import Malformed
from edge_client.protocol import blocks
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.topics import routing_label
from edge_client.protocol.transfer import BlobPull
from edge_client.transport.blobs import BlobFolder, PartialBlob

SendGet = Callable[[Manifest, list[list[int]], int], str]  # sends one `get` with the last mark; gives its message id
MAX_POLL_S = 60.0  # the longest time between two looks at a transfer
MIB = 1 << 20
MAX_KNOWN_REQUESTS = 64  # ids of requests that an error answer may still name


class NoBlocks(Malformed):
    """Asked again and again, the coordinator sent no block."""

    def __init__(self, sha256: str) -> None:
        super().__init__("unreachable", f"no block of {sha256:.16} came")


class Downloader:
    """A queue of blobs to fetch. `failed` holds the code of what stopped it, for a `nack`."""

    def __init__(self, folder: BlobFolder, send_get: SendGet) -> None:
        self._folder, self._send_get = folder, send_get
        self._queue: deque[Manifest] = deque()
        self._partial: PartialBlob | None = None
        self._pull: BlobPull | None = None
        self._paused: Manifest | None = None  # the fetch that was interrupted last
        self._gets: deque[str] = deque(maxlen=MAX_KNOWN_REQUESTS)
        self._not_before_s = 0.0
        self._mark = 0  # of the block that came last
        self._bad_hashes = self.arrived = 0  # `arrived`: blocks so far
        self.failed: Malformed | None = None

    def start(self, manifests: Iterable[Manifest]) -> None:
        """Fetch these blobs instead of the earlier ones. Inline blobs are stored at once."""
        self.pause()
        self._queue.clear()
        self._gets.clear()  # an error about what was wanted before stops nothing of these
        self.failed, self._bad_hashes, self._not_before_s = None, 0, 0.0
        for manifest in manifests:
            if manifest.inline is not None:
                self._folder.put(manifest.inline)
            elif not self._folder.has(manifest.sha256):
                self._queue.append(manifest)

    def step(self, now_s: float) -> float | None:
        """Send the request that is due; -> seconds until the next call, None once all is here.

        Raises `failed`, and NoBlocks for a coordinator that sends none.
        """
        while self._queue and self._pull is None and self.failed is None:
            self._begin(self._queue[0])
        if self.failed is not None:
            raise self.failed
        if self._pull is None:
            return None
        if now_s < self._not_before_s:
            return min(MAX_POLL_S, self._not_before_s - now_s)
        if runs := self._pull.next_request(now_s):
            self._gets.append(self._send_get(self._queue[0], runs, self._mark))
        if self._pull.exhausted:
            raise NoBlocks(self._queue[0].sha256)
        due = self._pull.next_due_s()
        return MAX_POLL_S if due is None else max(0.0, due - now_s)

    def on_block(self, blob_label: str, index: int, payload: bytes) -> None:
        """Take one block message; of one of no transfer only the mark. Raises Malformed for a damaged one.

        A block that comes after its fetch was interrupted is kept: where tasks follow sooner than blocks, all are late.
        """
        partial, pull = self._partial, self._pull
        if partial is None or pull is None or blob_label != routing_label(partial.manifest.sha256):
            self._mark, late = blocks.read_mark(payload), self._paused
            if late is not None and blob_label == routing_label(late.sha256):
                with suppress(Malformed, OSError):
                    self._folder.write_late(late, index, blocks.unpack_marked_block(payload, late, index)[0])
            return
        body, self._mark = blocks.unpack_marked_block(payload, partial.manifest, index)
        if partial.write_block(index, body):
            pull.mark_arrived(index)
            self.arrived += 1
            self._not_before_s = 0.0  # the coordinator sends again
        if partial.bitmap.complete:
            self._finish(partial)

    def on_error(self, request_id: str | None, code: str, not_before_s: float) -> None:
        """Handle an error answer to a request of this downloader: ask again after `not_before_s`, or fail."""
        if request_id not in self._gets and (request_id, code) != (None, "rate"):
            return
        if code in ("rate", "busy"):
            self.link_lost()
            self._not_before_s = not_before_s
        else:
            self.failed = Malformed("unreachable", f"the coordinator answered {code}")

    def link_lost(self) -> None:
        """Ask again for what was under way."""
        if self._pull is not None:
            self._pull.forget_asked()

    def pause(self) -> None:
        """Close the open file; what has arrived stays for the next time."""
        if self._partial is not None:
            self._paused = self._partial.manifest
            self._partial.close()
        self._partial = self._pull = None

    def _begin(self, manifest: Manifest) -> None:
        if self._folder.has(manifest.sha256):  # the same blob was wanted twice
            self._next()
            return
        self._partial = self._folder.partial(manifest)
        self._pull = BlobPull(self._partial.bitmap)
        if self._partial.bitmap.complete:  # its last block came just before a power cut
            self._finish(self._partial)

    def _finish(self, partial: PartialBlob) -> None:
        try:
            partial.finish()
        except Malformed as wrong:
            self._bad_hashes += 1
            self._partial = self._pull = None
            if wrong.code != "bad_hash" or self._bad_hashes > 1:
                self.failed = wrong
            return
        self._next()

    def _next(self) -> None:
        self._queue.popleft()
        self._partial = self._pull = None
        self._bad_hashes = 0


def open_cache(config: ClientConfig) -> BlobFolder:
    """Where what the coordinator sends is kept; the least recently used makes room."""
    return BlobFolder(config.state / "cache", config.cache_mib * MIB, evict=True)
