"""The state after each round of each run, from which a restarted coordinator continues; the runs and their fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coordinator.storage import state_codec
from coordinator.storage.database import Database
from coordinator.storage.event_log import insert_events
from coordinator.strategies.base import State
from edge_client.protocol.task import ClientId
from edge_client.transport.blobs import BlobFolder


class StateStore:
    """The states of the runs, the ids of the runs, and the devices that all runs train on."""

    def __init__(self, database: Database, blobs: BlobFolder) -> None:
        self._database, self._blobs = database, blobs

    def enrol(self, devices: Mapping[ClientId, tuple[int, str]], events: Iterable[Mapping[str, Any]] = ()) -> None:
        """Add devices to the fleet that trains, (samples, engine) each, and the events that report it."""
        with self._database.transaction():
            insert_events(self._database, events)
            rows = [(cid, n, engine) for cid, (n, engine) in devices.items()]
            self._database.insert("insert into devices values (?, ?, ?)", rows)

    def enrolled(self) -> dict[ClientId, tuple[int, str]]:
        """(samples, engine) per device, sorted by device; empty before `enrol`."""
        rows = self._database.rows("select cid, n, engine from devices order by cid")
        return {cid: (n, engine) for cid, n, engine in rows}

    def run_id(self, name: str, make: Callable[[], str]) -> str:
        """Return the protocol's id of the run `name`; the first call makes and stores it."""
        rows = self._database.rows("select run from runs where name = ?", (name,))
        if rows:
            return str(rows[0][0])
        run = make()
        with self._database.transaction():
            self._database.execute("insert into runs values (?, ?)", (name, run))
        return run

    def run_names(self) -> dict[str, str]:
        return dict(self._database.rows("select run, name from runs"))

    def put(self, run: str, number: int, state: State, events: Iterable[Mapping[str, Any]] = ()) -> None:
        """Store the state after round `number` (0: before the first) and the round's events, in one transaction."""
        blob = self._blobs.put(state_codec.encode_state(state))
        with self._database.transaction():
            self._database.execute("insert into states values (?, ?, ?)", (run, number, blob))
            insert_events(self._database, events)

    def last(self, run: str) -> tuple[int, State] | None:
        """The newest (round, state) of a run, or None before its first `put`."""
        query = "select round, blob from states where run = ? order by round desc limit 1"
        rows = self._database.rows(query, (run,))
        return (rows[0][0], state_codec.decode_state(self._blobs.read(rows[0][1]))) if rows else None
