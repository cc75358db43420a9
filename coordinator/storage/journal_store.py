"""The journal of a run that waits for no device: which devices were given tasks, and whose updates came, in order.

Each task is an exchange of one device (exchange_store.py), whose number is that of the task. A round that is played
again takes the steps of its journal in their order. An update and its step are stored together, before the `ack`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from coordinator.storage.database import Database
from coordinator.storage.exchange_store import ExchangeKey, ExchangeStore, StoredReply
from edge_client.protocol.task import ClientId

HAND, TAKE, REFUSE, EXPIRE, END = "hand", "take", "refuse", "expire", "end"


class Step(NamedTuple):
    """One step: what happened to which devices, and the task that it ended, by its round (from 1) and number."""

    what: str
    devices: Sequence[ClientId]
    task: tuple[int, int] = (0, 0)


class OpenedTask(NamedTuple):
    """A task to be stored before it is sent: its hash and its blobs."""

    key: ExchangeKey
    cid: ClientId
    sha256: str
    blobs: Collection[str]


class JournalStore:
    """The journals of all runs; `place` counts the steps of a round."""

    def __init__(self, database: Database, exchanges: ExchangeStore) -> None:
        self._database, self._exchanges = database, exchanges

    def steps(self, run: str, number: int) -> list[Step]:
        """The steps of round `number`, in order."""
        query = "select what, said from journal where run = ? and round = ? order by place"
        rows = [(what, json.loads(said)) for what, said in self._database.rows(query, (run, number))]
        return [Step(what, said["devices"], tuple(said["task"])) for what, said in rows]

    def hand(self, run: str, number: int, place: int, tasks: Sequence[OpenedTask]) -> None:
        """These devices are given tasks, together. Without any, full or not, the buffers are emptied."""
        with self._database.transaction():
            self._open(tasks)
            self._note(run, number, place, Step(HAND, [task.cid for task in tasks]))

    def open(self, tasks: Sequence[OpenedTask]) -> None:
        """Tasks that follow from a step that is stored."""
        with self._database.transaction():
            self._open(tasks)

    def take(self, run: str, number: int, place: int, replies: Mapping[ExchangeKey, StoredReply]) -> None:
        """These replies came, in this order; their blobs are on disk."""
        with self._database.transaction():
            for past, (key, reply) in enumerate(replies.items()):
                self._exchanges.write_replies(key, [reply])
                self._exchanges.write_closing(key, [reply.cid], {})
                self._note(run, number, place + past, Step(TAKE, [reply.cid], (key.round, key.exchange)))

    def end(self, run: str, number: int, place: int, step: Step, why: str) -> None:
        """A device's task ended without a reply that counts: `step` is REFUSE or EXPIRE of this task."""
        with self._database.transaction():
            self._exchanges.write_closing(ExchangeKey(run, *step.task), (), {step.devices[0]: why})
            self._note(run, number, place, step)

    def end_round(self, run: str, number: int, place: int) -> None:
        """The round ends before its buffers were filled."""
        with self._database.transaction():
            self._note(run, number, place, Step(END, []))

    def stop(self, tasks: Mapping[ClientId, ExchangeKey], why: str) -> None:
        """These tasks are wanted no more; it follows from steps that are stored. May be called again."""
        with self._database.transaction():
            for cid, key in tasks.items():
                self._exchanges.write_closing(key, (), {cid: why})

    def oldest_task(self, run: str, after: int) -> int | None:
        """The earliest round whose tasks ended in a round later than `after`."""
        query = "select min(task_round) from journal where run = ? and round > ?"
        found: int | None = self._database.rows(query, (run, after))[0][0]
        return found

    def _open(self, tasks: Sequence[OpenedTask]) -> None:
        for key, cid, sha256, blobs in tasks:
            self._exchanges.write_open(key, {cid: sha256}, 0.0, blobs)

    def _note(self, run: str, number: int, place: int, step: Step) -> None:
        said = json.dumps({"devices": list(step.devices), "task": step.task})
        task_round = step.task[0] or None
        self._database.execute(
            "insert into journal values (?, ?, ?, ?, ?, ?)", (run, number, place, step.what, said, task_round)
        )
