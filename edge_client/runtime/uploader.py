"""Upload of a stored result: announce it, send blocks against a credit, until the coordinator acknowledges it.

The result is on disk before it is announced, so the upload can be repeated after a restart, a lost connection or a
silent coordinator. The caller's loop hands the answers in and calls `step`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol.blocks import Manifest, body_range
from edge_client.protocol.transfer import missing_blocks
from edge_client.runtime.sender import DeviceSender
from edge_client.runtime.state import DeviceState, TaskKey
from edge_client.transport.base import Transport
from edge_client.transport.clock import Clock

log = logging.getLogger(__name__)

ANNOUNCE_INTERVAL_S = 60.0  # between two announcements that get no answer
ANNOUNCE_JITTER_S = 15.0
DRAIN_TIMEOUT_S = 0.2  # the longest wait for the broker between two looks at the events
RETRY_CODES = ("busy", "rate", "internal")


@dataclass
class GrantedUpload:
    """A credit: the shard, how many blocks may be unacknowledged, and which blocks are still to send."""

    manifest: Manifest
    shard: int
    window: int
    owed: Iterator[int]


class Uploader:
    """Delivers the result in `state`, one at a time."""

    def __init__(
        self, state: DeviceState, sender: DeviceSender, transport: Transport, *, clock: Clock, rng: np.random.Generator
    ) -> None:
        self._state, self._sender, self._transport = state, sender, transport
        self._clock, self._rng = clock, rng
        self._upload: GrantedUpload | None = None
        self._announced: str | None = None  # id of the last `rdy`
        self._again_at_s: float | None = None  # when to announce again; None: nothing to deliver
        self._sent_twice: str | None = None  # the update that was sent again after a wrong hash

    def announce(self) -> None:
        """Send `rdy` for the stored result, and again later if no answer comes."""
        result = self._state.result
        if result is None:
            self.cancel()
            return
        self._upload = None
        told = {name: getattr(result, name) for name in ("attempt", "n", "what", "update", "seconds", "metrics")}
        try:
            self._announced = self._sender.send("rdy", **vars(result.key), **told)
        except Malformed as wrong:
            self._give_up(result.key, wrong)
        else:
            self._announce_in(ANNOUNCE_INTERVAL_S)

    def link_up(self) -> None:
        """After a new connection: announce a result that is not acknowledged."""
        self._upload = None
        if self._state.result is not None and self._state.result.status is None:
            self.announce()

    def link_lost(self) -> None:
        """Drop the credit, which ended with the connection."""
        self._upload = None

    def coordinator_restarted(self, spread_s: float) -> None:
        """Announce again to a restarted coordinator, within `spread_s` so that devices do not all send at once."""
        if self._again_at_s is not None:
            self._upload = None
            self._again_at_s = self._clock.now_s() + self._rng.uniform(0.0, spread_s)

    def cancel(self) -> None:
        """Stop the upload: its result is not wanted any more."""
        self._upload = self._again_at_s = None

    def _give_up(self, key: TaskKey, wrong: Exception) -> None:
        """Forget a result that cannot be delivered: its task may come again."""
        log.warning("lost the update of %s: %s", key, wrong)
        self._state.forget_result()
        self.cancel()

    def wait_s(self) -> float | None:
        """How long `step` has nothing to do; None: until something happens."""
        if self._upload is not None:
            return 0.0
        return None if self._again_at_s is None else max(0.0, self._again_at_s - self._clock.now_s())

    def step(self) -> None:
        """Send one block, or announce again, if either is due."""
        if self._upload is not None:
            self._send_block(self._upload)
        elif self._again_at_s is not None and self._clock.now_s() >= self._again_at_s:
            self.announce()

    def on_go(self, message: Mapping[str, Any]) -> None:
        """A credit for blocks. One for anything but the announced update is ignored."""
        result = self._state.result
        if result is None or result.update.sha256 != message["sha256"] or self._again_at_s is None:
            return
        try:
            owed = missing_blocks(result.update, message.get("have"))
        except Malformed as wrong:
            log.info("a credit with a bad bitmap: %s", wrong.message)
            return
        try:
            self._state.pending_result.verified(result.update.sha256)
        except (Malformed, OSError) as wrong:  # a damaged disk
            self._give_up(result.key, wrong)
            return
        self._upload = GrantedUpload(result.update, message["shard"], message["window"], owed)

    def on_ack(self, message: Mapping[str, Any]) -> None:
        """Handle the coordinator's decision on the update. An `ack` for any other update is ignored."""
        result = self._state.result
        if result is None or (result.key, result.update.sha256) != (TaskKey.of(message), message["sha256"]):
            return
        status = message["status"]
        log.info("%s: %s %s", result.key, status, message.get("detail", ""))
        self._upload = None
        if status == "retry":
            self._announce_in(message.get("retry_ms", ANNOUNCE_INTERVAL_S * 1000) / 1000)
        elif status == "bad_hash" and self._sent_twice != message["sha256"]:
            self._sent_twice = message["sha256"]
            self.announce()
        else:
            self._state.commit_acknowledgement(status)
            self.cancel()

    def on_error(self, message: Mapping[str, Any]) -> None:
        """Handle an error answer that names the last announcement; ignore any other."""
        if message.get("re") != self._announced or self._again_at_s is None:
            return
        if message["code"] in RETRY_CODES:
            self._announce_in(message.get("retry_ms", ANNOUNCE_INTERVAL_S * 1000) / 1000)
        else:
            self._state.commit_acknowledgement(message["code"])
            self.cancel()

    def _announce_in(self, seconds: float) -> None:
        self._again_at_s = self._clock.now_s() + seconds + self._rng.uniform(0.0, ANNOUNCE_JITTER_S)

    def _send_block(self, upload: GrantedUpload) -> None:
        """One block, once the broker has acknowledged enough of those before."""
        if not self._transport.drain(upload.window - 1, DRAIN_TIMEOUT_S):
            return
        index = next(upload.owed, None)
        if index is None:
            self._upload = None
            self._announce_in(ANNOUNCE_INTERVAL_S)
            return
        start, stop = body_range(upload.manifest, index)
        with self._state.pending_result.path(upload.manifest.sha256).open("rb") as file:
            file.seek(start)
            self._sender.send_block(upload.manifest, upload.shard, index, file.read(stop - start))
