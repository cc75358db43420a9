"""Devices divided among processes, one thread each: the same answers to the last bit, sooner.

A device always lives in the same process, with its data, its models and its posterior. Only tasks and replies travel;
samples are read once from a file. This process keeps the books: who is there, and who has a model of its own.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.strategies.base import Exchange
from edge_client.dataset import Dataset, Local
from edge_client.errors import FedcentersError
from edge_client.protocol.task import Array, ClientId, Fit, Reply
from emulator.engines.base import Recipe
from emulator.virtual import Devices

ELSEWHERE = np.empty(0, np.float32)  # stands for a model that a worker holds
LEAVE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a worker needs to become its devices."""

    recipe: Recipe
    samples: Path


@dataclass(kw_only=True)
class Crew(Devices):
    """Devices whose work is done by worker processes."""

    workers: list[Connection] = field(repr=False)
    home: Mapping[ClientId, int] = field(repr=False)  # a device's worker

    def open_round(self) -> None:
        """Tell every worker."""
        for worker in self.workers:
            _told(worker, None)

    def answers(self, tasks: Exchange) -> Mapping[ClientId, Reply | str]:
        """All workers at once; each goes through its devices in the order of the tasks."""
        shares: list[dict[ClientId, Any]] = [{} for _ in self.workers]
        for who, task in tasks.items():
            shares[self.home[who]][who] = task
        busy = [(worker, share) for worker, share in zip(self.workers, shares, strict=True) if share]
        for worker, share in busy:
            _told(worker, share)
        found: dict[ClientId, Reply | str] = {}
        for worker, _ in busy:
            found |= _heard(worker)
        for who, task in tasks.items():
            if isinstance(task, Fit) and not isinstance(found[who], str):
                self.own[who, task.slot] = ELSEWHERE
        return {who: found[who] for who in tasks}


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
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for w in range(min(workers, len(names))):
            samples = folder / f"worker-{w}.npz"
            _save(samples, {who: local[who] for who in names if home[who] == w})
            here, there = context.Pipe()
            setup = Setup(recipe=recipe, samples=samples)
            process = context.Process(target=serve, args=(there, setup), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        yield Crew(learner=recipe.open(), local=local, workers=pipes, home=home)
    finally:
        for pipe in pipes:
            pipe.close()  # the worker reads its end and leaves
        for process in processes:
            process.join(LEAVE_S)
            if process.is_alive():
                process.terminate()
                process.join()


def serve(connection: Connection, setup: Setup) -> None:
    """A worker's life: a mapping of tasks comes in, one of answers goes out; None opens a round; the end is the end."""
    devices: Devices | None = None
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            tasks = connection.recv()
            try:
                if devices is None:
                    devices = Devices(learner=setup.recipe.open(), local=_read(setup.samples))
                if tasks is None:
                    devices.open_round()
                else:
                    connection.send(devices.answers(tasks))
            except Exception:  # noqa: BLE001 - whatever it is, the run's process must hear of it
                connection.send(traceback.format_exc())


def _told(worker: Connection, what: object) -> None:
    try:
        worker.send(what)
    except BrokenPipeError:
        raise _gone() from None


def _heard(worker: Connection) -> dict[ClientId, Reply | str]:
    try:
        answer = worker.recv()
    except (EOFError, ConnectionResetError):
        raise _gone() from None
    if isinstance(answer, str):
        raise FedcentersError(f"a worker failed:\n{answer}")
    return dict(answer)


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
