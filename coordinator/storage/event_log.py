"""metrics.jsonl: one JSON object per line, a copy of the store's events that other programs may watch while it grows.

The store is the truth: lines that a crash kept out of the file are added at the next start, half a line is completed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coordinator.storage.store import Store


class EventLog:
    """Appends to `path`, and tells `watch` every event that happens now."""

    def __init__(self, path: Path, store: Store, watch: Callable[[Mapping[str, Any]], None]) -> None:
        self._path, self._store, self._watch = path, store, watch
        self._lines = _whole_lines(path)
        self.catch_up()

    def write(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - JSON values
        """Store one event, then show it."""
        record = {"event": event, **fields}
        self._store.put_event(record)
        self.append_stored(record)

    def append_stored(self, record: Mapping[str, Any]) -> None:
        """Show an event that was stored together with something else."""
        self.catch_up()
        self._watch(record)

    def catch_up(self) -> None:
        """Append what the store has and the file lacks."""
        new = self._store.events(after=self._lines)
        if not new:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in new)
        self._lines += len(new)


def _whole_lines(path: Path) -> int:
    """Cut off half a line at the end; -> how many lines there are."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole.count(b"\n")
