"""Updates that arrived after their exchange had closed, and the later round that each of them is given to."""

from __future__ import annotations

from coordinator.storage.database import Database
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from edge_client.protocol.task import ClientId


def late_fact(run: str, number: int | str) -> str:
    """The fact that a round was given its late updates; with "" what the facts of all rounds of the run begin with."""
    return f"late/{run}/{number}"


class LateUpdateStore:
    """The late updates of all runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, key: ExchangeKey, reply: StoredReply) -> None:
        """Store a verified late update, whose blob is on disk, and the refusal "late" of its exchange.

        A second late update of a device is ignored.
        """
        with self._database.transaction():
            values = (*key, *reply, 0)
            self._database.execute("insert or ignore into late values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
            self._database.execute("insert or replace into refusals values (?, ?, ?, ?, 'late')", (*key, reply.cid))

    def find(self, key: ExchangeKey, cid: ClientId) -> str | None:
        """The sha256 of this device's late update of an exchange."""
        query = "select sha256 from late where run = ? and round = ? and exchange = ? and cid = ?"
        return next((sha256 for (sha256,) in self._database.rows(query, (*key, cid))), None)

    def assign(self, run: str, number: int) -> list[StoredReply]:
        """The late updates of round `number`: at the first call all that have no round; a replay gets the same."""
        assigned = late_fact(run, number)
        if self._database.meta(assigned) is None:
            with self._database.transaction():
                self._database.execute("update late set shown = ? where run = ? and shown = 0", (number, run))
                self._database.put_meta(assigned, "shown")
        query = (
            "select cid, sha256, size, n, what, base, seconds from late"
            " where run = ? and shown = ? order by cid, round, exchange"
        )
        return [StoredReply(*row) for row in self._database.rows(query, (run, number))]
