"""Devices divided among processes, one thread each: the same answers to the last bit, sooner.

A device always lives in the same process, with its data, its models and its posterior. Only tasks and statistics
travel; samples are read once from a file, and updates are written into a matrix that all processes share. This process
keeps the books: who is there, and who has a model of its own.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.strategies.base import Exchange
from edge_client.dataset import Dataset, Local
from edge_client.errors import FedcentersError
from edge_client.protocol.task import Array, ClientId, Fit, Reply
from emulator.engines.base import Recipe
from emulator.rows import Rows, borrowed
from emulator.virtual import Devices

ELSEWHERE = np.empty(0, np.float32)  # stands for a model that a worker holds
LEAVE_S = 10.0
PRELOAD = ["emulator.workers", "emulator.engines.lean"]  # imported once, by the process that all workers are copies of


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a worker needs to become its devices."""

    recipe: Recipe
    samples: Path


@dataclass(frozen=True, kw_only=True)
class Share:
    """A worker's part of an exchange; the updates of `rows` go into a matrix of this shape, which is lent after it."""

    tasks: Exchange
    rows: Mapping[ClientId, int]
    shape: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A process and this end of its pipe."""

    pipe: Connection
    process: BaseProcess

    def tell(self, what: Setup | Share | None, rows: Rows | None = None) -> None:
        """Hand over a setup, or a share and the matrix for its rows; None opens a round."""
        try:
            self.pipe.send(what)
            if rows is not None:
                rows.lend(self.pipe, self.process.pid or 0)
        except (BrokenPipeError, ConnectionResetError):
            raise _gone() from None

    def hear(self) -> dict[ClientId, Reply | str]:
        """Wait for what it answers."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise _gone() from None
        if isinstance(answer, str):
            raise FedcentersError(f"a worker failed:\n{answer}")
        return dict(answer)


@dataclass(kw_only=True)
class Crew(Devices):
    """Devices whose work is done by worker processes."""

    workers: list[Worker] = field(repr=False)
    home: Mapping[ClientId, int] = field(repr=False)  # a device's worker

    def open_round(self) -> None:
        """Tell every worker."""
        for worker in self.workers:
            worker.tell(None)

    def answers(self, tasks: Exchange) -> Mapping[ClientId, Reply | str]:
        """All workers at once; each goes through its devices in the order of the tasks."""
        uploads = {who: i for i, who in enumerate(c for c, t in tasks.items() if isinstance(t, Fit) and t.upload)}
        rows = Rows(len(uploads), self.program.schema.size) if uploads else None
        try:
            found = self._found(tasks, uploads, rows)
        finally:
            if rows is not None:
                rows.close()
        for who, task in tasks.items():
            if isinstance(task, Fit) and not isinstance(found[who], str):
                self.own[who, task.slot] = ELSEWHERE
        return {who: found[who] for who in tasks}

    def _found(
        self, tasks: Exchange, uploads: Mapping[ClientId, int], rows: Rows | None
    ) -> dict[ClientId, Reply | str]:
        parts: list[dict[ClientId, Any]] = [{} for _ in self.workers]
        for who, task in tasks.items():
            parts[self.home[who]][who] = task
        busy = [(worker, part) for worker, part in zip(self.workers, parts, strict=True) if part]
        for worker, part in busy:
            mine = {who: uploads[who] for who in part if who in uploads}
            share = Share(tasks=part, rows=mine, shape=rows.shape if rows is not None else (0, 0))
            worker.tell(share, rows if mine else None)
        found: dict[ClientId, Reply | str] = {}
        for worker, _ in busy:
            found |= worker.hear()
        for who, i in uploads.items():
            if rows is not None and isinstance(reply := found[who], Reply):
                found[who] = replace(reply, update=rows.matrix[i])
        return found


@contextmanager
def crew(
    recipe: Recipe,
    local: Mapping[ClientId, Local],
    *,
    workers: int,
    folder: Path,
) -> Iterator[Crew]:
    """`workers` processes with the devices of `local` divided among them; `folder` holds their samples meanwhile."""
    names = sorted(local)
    home = {who: i % workers for i, who in enumerate(names)}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    started: list[Worker] = []
    try:
        for _ in range(min(workers, len(names))):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there,), daemon=True)
            process.start()
            there.close()
            started.append(Worker(pipe=here, process=process))
        learner = recipe.open()  # while they start
        for w, worker in enumerate(started):
            samples = folder / f"worker-{w}.npz"
            _save(samples, {who: local[who] for who in names if home[who] == w})
            # Not an argument of the process: a large one would wait for ever for a worker that died before it read it.
            worker.tell(Setup(recipe=recipe, samples=samples))
        yield Crew(learner=learner, local=local, workers=started, home=home)
    finally:
        for worker in started:
            worker.pipe.close()  # the worker reads its end and leaves
        for worker in started:
            worker.process.join(LEAVE_S)
            if worker.process.is_alive():
                worker.process.terminate()
                worker.process.join()


def serve(connection: Connection) -> None:
    """A worker's life: a setup, then a share comes in, and a mapping of answers goes out; None opens a round."""
    devices: Devices | None = None
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        setup: Setup = connection.recv()
        while True:
            share: Share | None = connection.recv()
            try:
                if devices is None:
                    devices = Devices(learner=setup.recipe.open(), local=_read(setup.samples))
                if share is None:
                    devices.open_round()
                else:
                    matrix = borrowed(connection, share.shape) if share.rows else None
                    connection.send(_written(devices.answers(share.tasks), share.rows, matrix))
            except Exception:  # noqa: BLE001 - whatever it is, the run's process must hear of it
                connection.send(traceback.format_exc())


def _written(
    answers: Mapping[ClientId, Reply | str], rows: Mapping[ClientId, int], matrix: Array | None
) -> dict[ClientId, Reply | str]:
    """The answers without their updates, which are in the matrix now."""
    left = dict(answers)
    for who, i in rows.items():
        reply = left[who]
        if isinstance(reply, Reply) and matrix is not None:
            matrix[i] = reply.update
            left[who] = replace(reply, update=None)
    return left


def _gone() -> FedcentersError:
    return FedcentersError("a worker process ended", hint="the machine may be short of memory: use fewer --workers")


def _save(path: Path, local: Mapping[ClientId, Local]) -> None:
    arrays: dict[str, Array] = {}
    for who, held in local.items():
        for part, data in (("train", held.train), ("test", held.test)):
            if data is not None:
                arrays |= {f"{who}/{part}/x": data.x, f"{who}/{part}/y": data.y}
    np.savez(path, allow_pickle=False, **arrays)


def _read(path: Path) -> dict[ClientId, Local]:
    with np.load(path, allow_pickle=False) as arrays:
        parts = {
            tuple(name.rsplit("/", 2)[:2]): Dataset(arrays[name], arrays[f"{name[:-2]}/y"])
            for name in arrays.files
            if name.endswith("/x")
        }
    path.unlink()  # read once; the samples are large
    return {
        who: Local(train=data, test=parts.get((who, "test"))) for (who, part), data in parts.items() if part == "train"
    }
