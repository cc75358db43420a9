"""The pace of transfers: which blocks to ask for next, and which to send. Pure; the time is an argument, in seconds.

The receiver sets the pace. A download has at most `window` blocks asked for and not arrived; the window adds one for
each window that arrives without loss and halves on a timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from edge_client.protocol.blocks import Bitmap, Manifest

INITIAL_WINDOW = 4
MAX_WINDOW = 16
REQUEST_TIMEOUTS_S = (8.0, 16.0, 32.0)  # by the number of timeouts in a row before
MAX_TIMEOUTS_IN_A_ROW = len(REQUEST_TIMEOUTS_S)  # then this source is given up


@dataclass
class BlobPull:
    """One download from one source. `bitmap` belongs to the owner of the blocks; here it is only read."""

    bitmap: Bitmap
    window: int = INITIAL_WINDOW
    timeouts: int = 0  # in a row
    _due: dict[int, float] = field(default_factory=dict)  # asked for -> when it counts as lost
    _since_change: int = 0  # blocks that arrived since the window last changed

    @property
    def exhausted(self) -> bool:
        """Whether to try another source."""
        return self.timeouts >= MAX_TIMEOUTS_IN_A_ROW

    def next_request(self, now_s: float) -> list[list[int]]:
        """The `at` of the next `get`, or nothing for now.

        Asks once half of the window is free, so that a long transfer costs few requests.
        """
        self._expire(now_s)
        if self.exhausted or len(self._due) > self.window // 2:
            return []
        runs = self.bitmap.missing(self.window - len(self._due), skip=self._due)
        until = now_s + REQUEST_TIMEOUTS_S[self.timeouts]
        self._due |= {index: until for first, count in runs for index in range(first, first + count)}
        return runs

    def mark_arrived(self, index: int) -> None:
        """A good block came, asked for or not."""
        self._due.pop(index, None)
        self.timeouts = 0
        self._since_change += 1
        if self._since_change >= self.window:
            self.window, self._since_change = min(self.window + 1, MAX_WINDOW), 0

    def forget_asked(self) -> None:
        """The link broke: what was asked for will not come. Not a timeout."""
        self._due.clear()

    def next_due_s(self) -> float | None:
        """When `next_request` has to be called at the latest; None when nothing is asked for."""
        return min(self._due.values(), default=None)

    def _expire(self, now_s: float) -> None:
        late = [index for index, until in self._due.items() if until <= now_s]
        if late:
            for index in late:
                del self._due[index]
            self.timeouts += 1
            self.window, self._since_change = max(1, self.window // 2), 0


def missing_blocks(manifest: Manifest, have: str | None) -> Iterator[int]:
    """The blocks that an upload still owes, in order; `have` is the bitmap of a `go`, None says nothing has arrived."""
    bitmap = Bitmap(manifest.total) if have is None else Bitmap.from_base64(manifest.total, have)
    return (index for first, count in bitmap.missing(manifest.total) for index in range(first, first + count))
