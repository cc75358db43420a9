"""Everything that a coordinator keeps on disk, so that a crash at any moment loses nothing that a device was told.

The order of writes (PROTOCOL.md, rounds): tasks are stored before they are sent, replies before they are acknowledged,
the set of replies that an exchange closes with before it is aggregated, and the state after a round together with its
line of metrics.jsonl. A blob is written and synchronised before the row that names it is committed.
"""

from __future__ import annotations

from pathlib import Path

from coordinator.storage.database import Database
from coordinator.storage.event_log import EventStore
from coordinator.storage.exchange_store import ExchangeStore
from coordinator.storage.journal_store import JournalStore
from coordinator.storage.key_value_store import KeyValueStore
from coordinator.storage.late_update_store import LateUpdateStore
from coordinator.storage.prekey_store import PrekeyStore
from coordinator.storage.round_state_store import StateStore
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.task import ClientId
from edge_client.transport.blobs import PARTIAL, BlobFolder


class Store:
    """One folder with one writer: `folder`/coordinator.sqlite, `folder`/blobs, `folder`/updates/<cid>."""

    def __init__(self, folder: Path, database: Database | None = None) -> None:
        self.folder = folder
        self.database = database or Database(folder)
        self.blobs = BlobFolder(folder / "blobs")
        self.facts = KeyValueStore(self.database)
        self.states = StateStore(self.database, self.blobs)
        self.exchanges = ExchangeStore(self.database)
        self.journal = JournalStore(self.database, self.exchanges)
        self.late_updates = LateUpdateStore(self.database)
        self.prekeys = PrekeyStore(self.database)
        self.events = EventStore(self.database)
        self.uploading: dict[ClientId, list[Manifest]] = {}  # of each device, of all exchanges: open, or to be stored

    def close(self) -> None:
        """Close the database and release the folder. Idempotent."""
        self.database.close()

    def drop_stale_partials(self) -> None:
        """Forget unfinished uploads of devices that no open exchange asks, and their folders where nothing is left."""
        asked = self.exchanges.open_devices()
        for folder in (self.folder / "updates").glob("*"):
            if folder.is_dir() and folder.name not in asked:
                self.updates(folder.name).drop_partials()
                if [each.name for each in folder.iterdir()] == [PARTIAL]:
                    (folder / PARTIAL).rmdir()
                    folder.rmdir()

    def updates(self, cid: ClientId) -> BlobFolder:
        """The blobs that one device sent, in a folder of its own: a device cannot refer to another device's blob."""
        return BlobFolder(self.folder / "updates" / cid)
