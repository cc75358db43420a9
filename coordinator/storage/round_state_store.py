"""The state after each round of each run, from which a restarted coordinator continues; the runs and their fleet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coordinator.storage import state_codec
from coordinator.storage.database import Database
from coordinator.storage.event_log import insert_events
from coordinator.strategies.base import State
from edge_client.errors import Malformed
from edge_client.protocol.task import ClientId
from edge_client.transport.blobs import BlobFolder

log = logging.getLogger(__name__)


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

    def let_in(self) -> dict[ClientId, int]:
        """The number of the event of each device that joined later."""
        query = "select json_extract(line, '$.device'), id from events where json_extract(line, '$.event') = 'let-in'"
        return dict(self._database.rows(query))

    def ended(self) -> dict[str, list[int]]:
        """By the names of the runs: the number of the event of each round, from the first one on."""
        query = (
            "select id from events where json_extract(line, '$.event') = 'round'"
            " and json_extract(line, '$.run') = ? order by id"
        )
        names = self.run_names().values()
        return {name: [number for (number,) in self._database.rows(query, (name,))] for name in names}

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

    def put(self, run: str, number: int, state: State, events: Iterable[Mapping[str, Any]] = ()) -> bool:
        """Store the state after round `number` (0: before the first) and the round's events, in one transaction.

        -> whether the round is new. The events of a round that is played again, because its state was damaged, are
        stored already.
        """
        blob = self._blobs.put(state_codec.encode_state(state))
        known = self._database.rows("select 1 from states where run = ? and round = ?", (run, number))
        with self._database.transaction():
            self._database.execute("insert or replace into states values (?, ?, ?)", (run, number, blob))
            insert_events(self._database, () if known else events)
        return not known

    def last(self, run: str) -> tuple[int, State] | None:
        """The newest (round, state) of a run that can be read, or None without any.

        The rounds after it are then played again from their stored replies.
        """
        query = "select round, blob from states where run = ? order by round desc"
        found = ((number, self._read(number, blob)) for number, blob in self._database.rows(query, (run,)))
        return next(((number, state) for number, state in found if state is not None), None)

    def of_round(self, run: str, number: int) -> State | None:
        """The state after round `number`; None where it is not stored, or cannot be read."""
        rows = self._database.rows("select blob from states where run = ? and round = ?", (run, number))
        return self._read(number, rows[0][0]) if rows else None

    def _read(self, number: int, blob: str) -> State | None:
        """The state after round `number`, or None where its blob is damaged or lost."""
        try:
            return state_codec.decode_state(self._blobs.read(blob))
        except Malformed as wrong:
            log.warning("the state after round %d is lost, so that round is played again: %s", number, wrong.message)
            return None
