"""Facts about a run folder, by key: the epoch, the hashes of configuration, program and catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coordinator.storage.database import Database
from coordinator.storage.event_log import insert_events

SETTINGS_FACT, DONE_FACT = "lesson", "done"  # what decides the results, as JSON; that every run has ended
REVOKED_FACT = "revoked"  # the devices of which the log says that they were revoked, as JSON
MAX_EPOCH = 2**32  # versions that did not check a record's signature stored any epoch, and then could not start


class KeyValueStore:
    """Named strings, each of which survives a restart."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, key: str) -> str | None:
        return self._database.meta(key)

    def put(
        self, key: str, value: str, events: Iterable[Mapping[str, Any]] = (), *, forget: Iterable[str] = ()
    ) -> None:
        """Store a fact, replacing an older one, and the events that report it, in one transaction.

        The same transaction deletes the facts of `forget`.
        """
        with self._database.transaction():
            self._database.put_meta(key, value)
            for old in forget:
                self._database.execute("delete from meta where key = ?", (old,))
            insert_events(self._database, events)

    def get_or_make(self, key: str, make: Callable[[], str]) -> str:
        """Return the fact `key`; the first call makes and stores it."""
        known = self.get(key)
        if known is None:
            known = make()
            self.put(key, known)
        return known

    @property
    def epoch(self) -> int:
        """The stored epoch, or 0. A number that no coordinator reaches by starting is not one: see MAX_EPOCH."""
        stored = int(self.get("epoch") or 0)
        return stored if stored <= MAX_EPOCH else 0

    def next_epoch(self, seen: int) -> int:
        """Store and return an epoch greater than the stored one and than `seen`, the newest at the broker."""
        epoch = max(self.epoch, seen) + 1
        self.put("epoch", str(epoch))
        return epoch
