"""The devices' one-time prekeys for masked sums: which are unused, and which one a sum took.

A device's prekeys are taken in rising order, and the row of its newest one stays when it was taken, so none is taken
twice. What a sum took is stored before its roster is sent, and forgotten with its round (round_pruning.py); a replay is
given the same prekeys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from coordinator.storage.database import Database
from coordinator.storage.exchange_store import ExchangeKey
from edge_client.protocol.secure.keys import PublicPrekey
from edge_client.protocol.secure.sum_messages import PrekeyBatch
from edge_client.protocol.task import ClientId

_THIS = "run = ? and round = ? and exchange = ?"


class PrekeyStore:
    """The prekeys of all devices."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def newest(self, cid: ClientId) -> int:
        """The highest number that the device has offered, or -1; a later offer has higher ones."""
        known = self._database.rows("select max(number) from prekeys where cid = ?", (cid,))[0][0]
        return -1 if known is None else int(known)

    def lacking(self, cids: Collection[ClientId]) -> set[ClientId]:
        """Those devices without an unused prekey."""
        stocked = {cid for (cid,) in self._database.rows("select distinct cid from prekeys where run is null")}
        return set(cids) - stocked

    def taken(self, key: ExchangeKey) -> dict[ClientId, PublicPrekey]:
        """What the sum of this exchange took, by device; empty before `take`."""
        rows = self._database.rows(f"select cid, number, keys from prekeys where {_THIS}", key)  # noqa: S608 - our text
        return {cid: PublicPrekey.of(number, keys) for cid, number, keys in rows}

    def take(
        self, key: ExchangeKey, cids: Collection[ClientId], offered: Mapping[ClientId, PrekeyBatch]
    ) -> dict[ClientId, PublicPrekey]:
        """Store what was offered, and take the next prekey of each device for the sum of this exchange alone.

        Both are one transaction, so a replay that finds nothing taken finds nothing offered either.
        """
        with self._database.transaction():
            for cid, batch in sorted(offered.items()):
                newest = self.newest(cid)
                fresh = [(cid, k.number, k.keys) for k in batch.keys if k.number > newest]
                self._database.insert("insert into prekeys (cid, number, keys) values (?, ?, ?)", fresh)
            rows = self._database.rows("select cid, min(number) from prekeys where run is null group by cid")
            numbers = [(*key, cid, number) for cid, number in rows if cid in cids]
            self._database.insert(
                "update prekeys set run = ?, round = ?, exchange = ? where cid = ? and number = ?", numbers
            )
        return self.taken(key)

    def forget(self, key: ExchangeKey, cid: ClientId) -> None:
        """The device does not know the prekey that this sum took, and so none that it offered before: it lost them.

        In a replay those stay that it offered for a later sum.
        """
        mine = "select number from prekeys where cid = ?4 and run = ?1 and round = ?2 and exchange = ?3"
        later = f"select 1 from prekeys where cid = ?4 and run is not null and number > ({mine})"  # noqa: S608 - our text
        query = "update prekeys set run = ?1, round = ?2, exchange = -1 where cid = ?4 and run is null"
        with self._database.transaction():
            self._database.execute(f"{query} and not exists ({later})", (*key, cid))
