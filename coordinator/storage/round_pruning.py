"""Forget what rounds of long ago left in the store: their states, updates, task blobs and rows.

A replay needs the newest state that can be read, and the replies and prekeys of the rounds after it; pictures need the
newest round. What a fact names (the program, its containers, the catalog and what these name) is never deleted. Files
go before their rows, so that a crash in between leaves no file without a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from coordinator.storage.late_update_store import late_fact
from coordinator.storage.store import Store
from edge_client.errors import Malformed

_SHA256 = re.compile(rb"\b[0-9a-f]{64}\b")
_MAX_NAMING_BYTES = 1 << 20  # of a program or catalog (PROTOCOL.md, section 14)
_ROUND_TABLES = ("exchanges", "tasks", "task_blobs", "replies", "closings", "refusals", "states", "journal")
_UPDATES = "select cid, sha256 from replies where {0} union select cid, sha256 from late where {1}"
_BLOBS = (
    "select blob from states where {0} union select sha256 from task_blobs where {0}"
    " union select base from replies where {0} union select base from late where {1}"
)
_FORGET_LATE = (
    "delete from meta where substr(key, 1, length(?1)) = ?1 and cast(substr(key, length(?1) + 1) as integer) <= ?2"
)
_FORGET_PREKEYS = (  # but for the newest of a device, which says where its numbers have come to
    "delete from prekeys where run = ? and round <= ?"
    " and number < (select max(number) from prekeys newer where newer.cid = prekeys.cid)"
)
# Of the rounds, and of the late updates: one may be given to the round after the next, which can be played again.
_OLD = "(run = ?1 and round <= ?2)", "(run = ?1 and shown between 1 and ?2 + 1)"
_KEPT = tuple(f"not {each}" for each in _OLD)


def prune_rounds(store: Store, run: str, last: int) -> None:
    """Forget the rounds of a run up to `last`, as far as no later round and no other run has the same blobs."""
    database, which = store.database, (run, last)
    if not database.rows(f"select 1 from states where {_OLD[0]} limit 1", which):  # noqa: S608 - our own text, as below
        return
    query = f"select * from ({_UPDATES.format(*_OLD)}) except select * from ({_UPDATES.format(*_KEPT)})"  # noqa: S608
    for cid, sha256 in database.rows(query, which):
        store.updates(cid).drop(sha256)
    named = named_by_facts(store)
    query = f"select * from ({_BLOBS.format(*_OLD)}) except select * from ({_BLOBS.format(*_KEPT)})"  # noqa: S608
    for (sha256,) in database.rows(query, which):
        if _SHA256.fullmatch(sha256.encode()) and sha256 not in named:
            store.blobs.drop(sha256)
    with database.transaction():
        for table in _ROUND_TABLES:
            database.execute(f"delete from {table} where {_OLD[0]}", which)  # noqa: S608
        database.execute(f"delete from late where {_OLD[1]}", which)  # noqa: S608
        database.execute(_FORGET_LATE, (late_fact(run, ""), last))
        database.execute(_FORGET_PREKEYS, which)


def named_by_facts(store: Store) -> set[str]:
    """The hashes that a fact names, and those that such a blob of JSON names, and so on."""
    named: set[str] = set()
    left = _hashes(value.encode() for (value,) in store.database.rows("select value from meta"))
    while left:
        named |= left
        left = _hashes(_text(store, sha256) for sha256 in left) - named
    return named


def _text(store: Store, sha256: str) -> bytes:
    """The blob if it is JSON."""
    try:
        path = store.blobs.path(sha256)
        data = path.read_bytes() if path.stat().st_size <= _MAX_NAMING_BYTES else b""
    except (OSError, Malformed):
        return b""
    return data if data.startswith(b"{") else b""


def _hashes(texts: Iterable[bytes]) -> set[str]:
    return {found.decode() for text in texts for found in _SHA256.findall(text)}
