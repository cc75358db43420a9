"""The block server: which device may fetch which blob, and the blocks that it asks for.

A request for a blob that was not granted is answered `not_yours`, with the same text and in the same time whether the
blob exists or not, so that a device cannot probe for another device's update. Updates are never granted.

Blocks that were sent and may still be on their way hold at most `budget` bytes, because the broker has to keep them
(arrival_marks.py). When the budget is spent a device is told `busy` and served in turn; one that does not show that its
blocks arrived is told `busy` and not served.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.runtime.arrival_marks import ArrivalMarks
from coordinator.runtime.envelope import Envelope
from coordinator.runtime.sender import UPLOAD_WINDOW, CoordinatorSender
from edge_client.errors import Malformed
from edge_client.protocol.blocks import Manifest, body_range
from edge_client.protocol.task import ClientId
from edge_client.transport.blobs import BlobFolder

log = logging.getLogger(__name__)
MAX_UNACKNOWLEDGED = 256  # messages; a slow link to the broker holds no more of them
QUEUE_TIMEOUT_S = 60.0  # a waiting device asks again after this time
POLL_S = 0.05  # how often to check whether there is room again
UNMARKED = "its client is too old to tell which blocks arrived; install the coordinator's version on the device"


@dataclass(frozen=True)
class _BlockRequest:
    """Blocks that a device asked for: their indices and where they lie in the blob."""

    manifest: Manifest
    ranges: tuple[tuple[int, int, int], ...]
    marked: bool  # whether the device reads marks

    @property
    def size(self) -> int:
        return sum(stop - start for _, start, stop in self.ranges)


@dataclass
class BlockServer:
    """Grants per device and for all devices; both map a sha256 to its manifest."""

    blobs: BlobFolder
    sender: CoordinatorSender
    budget: float = float("inf")
    _shared: dict[str, Manifest] = field(default_factory=dict)
    _granted: dict[ClientId, dict[str, Manifest]] = field(default_factory=dict)
    _waiting: dict[ClientId, _BlockRequest] = field(default_factory=dict)  # first come first served
    _marks: ArrivalMarks = field(default_factory=ArrivalMarks)
    _slow: set[ClientId] = field(default_factory=set)  # devices whose clients know no marks, as was said

    @property
    def wakes_at_s(self) -> float:
        """When `send_due` has something to do, if no request comes before."""
        return self.sender.clock.now_s() + POLL_S if self._waiting else float("inf")

    @property
    def has_waiting(self) -> bool:
        """Whether a device waits for its turn."""
        return bool(self._waiting)

    @property
    def arrived(self) -> int:
        """How many answers with blocks have arrived, as devices have shown."""
        return self._marks.proven

    def share(self, manifests: Iterable[Manifest]) -> None:
        """Let every device fetch these: programs, containers, the catalog and what it names."""
        self._shared |= {m.sha256: m for m in manifests}

    def grant(self, cid: ClientId, manifests: Iterable[Manifest]) -> None:
        """Let one device fetch these instead of what it was granted before."""
        self._granted[cid] = {m.sha256: m for m in manifests}

    def answer(self, message: Envelope) -> None:
        """Serve one `get`, at most a window of blocks, now or in turn. Raises Malformed: the code of the answer."""
        cid, request = message.cid, message.fields
        sha256 = request["sha256"]
        manifest = self._granted.get(cid, {}).get(sha256) or self._shared.get(sha256)
        if manifest is None:
            raise Malformed("not_yours", "no such blob for you")
        if request["block"] != manifest.block:
            raise Malformed("bad_range", f"blocks of this blob have {manifest.block} bytes")
        indices = [first + i for first, count in request["at"] for i in range(count)][:UPLOAD_WINDOW]
        ranges = tuple((index, *body_range(manifest, index)) for index in indices)
        if not self.blobs.has(sha256):
            raise Malformed("unknown_blob", "this blob is not held any more")
        self._marks.prove(cid, request.get("mark"))
        if not self._marks.may_send(cid, self.sender.clock.now_s()):
            if "mark" in request:
                raise Malformed("busy", "the blocks that were sent to you have not arrived")
            if cid not in self._slow:
                self._slow.add(cid)
                log.warning("%s is sent models ever more slowly: %s", cid, UNMARKED)
            raise Malformed("busy", UNMARKED)
        self._waiting[cid] = _BlockRequest(manifest, ranges, "mark" in request)
        self.send_due()
        if cid in self._waiting:
            words = "you are served in turn"
            self.sender.send(
                cid, "err", re=message.ident, code="busy", detail=words, retry_ms=int(QUEUE_TIMEOUT_S * 1000)
            )

    def send_due(self) -> None:
        """Send what the budget allows to the waiting devices; a single request may always go."""
        now_s = self.sender.clock.now_s()
        self._marks.expire(now_s)
        while self._waiting:
            cid, request = next(iter(self._waiting.items()))
            under_way = self._marks.under_way
            if (under_way and under_way + request.size > self.budget) or self.sender.is_congested(MAX_UNACKNOWLEDGED):
                return
            del self._waiting[cid]
            self._send(cid, request, now_s)

    def _send(self, cid: ClientId, request: _BlockRequest, now_s: float) -> None:
        mark = self._marks.sent(cid, request.size, now_s)
        try:
            with self.blobs.path(request.manifest.sha256).open("rb") as file:
                for index, start, stop in request.ranges:
                    file.seek(start)
                    body = file.read(stop - start)
                    self.sender.send_block(cid, request.manifest, index, body, mark if request.marked else 0)
        except FileNotFoundError:  # dropped while the request waited; the device asks again and gets an error
            return
