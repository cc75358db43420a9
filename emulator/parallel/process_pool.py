"""Devices divided among worker processes of one thread each. The replies have the same bits as those of one process.

A device stays in one worker, with its data, its models and its posterior. Only tasks and statistics travel; samples are
read once from a file, and updates are written into a matrix that all processes share. This process has the list of the
devices and of their own models. The first worker resolves the `EngineSpec`, so that torch is loaded in the process that
the workers are forked from, and not in this one.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from coordinator.strategies.base import Exchange
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import ConfigError, FedcentersError
from edge_client.protocol.program import Program
from edge_client.protocol.summed_task import SummedFit
from edge_client.protocol.task import F64, Array, ClientId, Fit, Flat, Reply
from edge_client.training.learner import Learner, TrainedModel, TrainingJob
from emulator.engines.engine_spec import EngineSpec
from emulator.parallel.shared_matrix import SharedMatrix
from emulator.parallel.worker import (
    USER_ERRORS,
    ModelWanted,
    ResolvedSpec,
    StateTransfer,
    WorkerSetup,
    WorkItem,
    open_recipe,
    run_worker,
)
from emulator.simulation import checkpoint
from emulator.simulation.emulated_devices import EmulatedDevices

UPDATE_IN_MATRIX = np.empty(0, np.float32)  # in place of a model that a worker has
STOP_TIMEOUT_S = 10.0
_ONE_AT_A_TIME = threading.Lock()
PRELOAD_MODULES = ["emulator.parallel.preload"]  # imported once, by the process that the workers are forked from


@dataclass(frozen=True, kw_only=True)
class WorkerProcess:
    """A worker process and this side's end of its pipe."""

    pipe: Connection
    process: BaseProcess

    def send(
        self,
        what: EngineSpec | WorkerSetup | WorkItem | StateTransfer | ModelWanted | None,
        rows: SharedMatrix | None = None,
    ) -> None:
        """Send a message of worker.py, and with a work item the matrix for its rows; None opens a round."""
        try:
            self.pipe.send(what)
            if rows is not None:
                rows.share_with(self.pipe, self.process.pid or 0)
        except (BrokenPipeError, ConnectionResetError):
            raise _worker_lost_error() from None

    def receive(self) -> Any:  # noqa: ANN401 - a device and its reply, `ResolvedSpec` to an order
        """Wait for the answer. Raises the error that the worker met."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise _worker_lost_error() from None
        if isinstance(answer, str):
            raise FedcentersError(f"a worker failed:\n{answer}")
        if isinstance(answer, (*USER_ERRORS, OSError)):
            raise answer
        return answer


class LazyLearner:
    """See `Learner`. The recipe is opened in this process at the first use, which most runs do not need."""

    fixed_batch: int | None = None

    def __init__(self, recipe: bytes, program: Program) -> None:
        self._recipe, self.program = recipe, program

    @cached_property
    def _learner(self) -> Learner:
        return open_recipe(self._recipe)

    def train(self, jobs: Sequence[TrainingJob]) -> Iterator[TrainedModel]:
        return self._learner.train(jobs)

    def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[F64, Array]:
        return self._learner.evaluate(models, data, batch=batch)

    def gradient(self, model: Flat, data: Dataset, *, batch: int, seed: int) -> Flat:
        return self._learner.gradient(model, data, batch=batch, seed=seed)


@dataclass(kw_only=True)
class WorkerPool(EmulatedDevices):
    """Devices whose work is done by worker processes."""

    workers: list[WorkerProcess] = field(repr=False)
    home: Mapping[ClientId, int] = field(repr=False)  # a device's worker

    def open_round(self) -> None:
        self.sums.open_round()
        for worker in self.workers:
            worker.send(None)

    def keep(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._all(StateTransfer(folder=folder, write=True))

    def recall(self, folder: Path) -> None:
        """Every worker reads the models of its devices from the files of all workers."""
        self._all(StateTransfer(folder=folder, write=False))
        for slot in checkpoint.stored_slots(folder):
            self.own[slot] = UPDATE_IN_MATRIX

    def own_model(self, who: ClientId, slot: str) -> Flat | None:
        """The device's worker sends a copy."""
        worker = self.workers[self.home[who]]
        worker.send(ModelWanted(who=who, slot=slot))
        kept: Flat | None = worker.receive()
        return kept

    def _all(self, books: StateTransfer) -> None:
        wrong: list[OSError] = []
        for worker in self.workers:
            worker.send(books)
        for worker in self.workers:  # all, since the run may go on without what a full disk did not take
            try:
                worker.receive()
            except OSError as failed:  # noqa: PERF203 - as many as workers
                wrong.append(failed)
        if wrong:
            raise wrong[0]

    def each_answer(self, tasks: Exchange) -> Iterator[tuple[ClientId, Reply | str]]:
        """All workers run at once, and wait where this process has not taken what they send."""
        uploads = {who: i for i, who in enumerate(c for c, t in tasks.items() if isinstance(t, Fit) and t.upload)}
        rows = SharedMatrix(len(uploads), self.program.schema.size) if uploads else None
        try:
            self._share_out(tasks, uploads, rows)
            for next_one in tasks:
                who, reply = self.workers[self.home[next_one]].receive()
                task = tasks[who]
                if isinstance(task, Fit) and not isinstance(reply, str):
                    self.own[who, task.slot] = UPDATE_IN_MATRIX
                if isinstance(task, SummedFit) and not isinstance(reply, str):
                    self.sums.note_answer(who, task)
                if rows is not None and who in uploads and isinstance(reply, Reply):
                    reply = replace(reply, update=rows.matrix[uploads[who]])
                yield who, reply
        finally:
            if rows is not None:
                rows.close()

    def _share_out(self, tasks: Exchange, uploads: Mapping[ClientId, int], rows: SharedMatrix | None) -> None:
        parts: list[dict[ClientId, Any]] = [{} for _ in self.workers]
        for who, task in tasks.items():
            parts[self.home[who]][who] = task
        for worker, part in zip(self.workers, parts, strict=True):
            mine = {who: uploads[who] for who in part if who in uploads}
            if part:
                worker.send(WorkItem(tasks=part, rows=mine), rows if mine else None)


def start_forkserver() -> None:
    """Start the process that the workers are forked from, if it does not run. It imports in the background.

    Raises ConfigError where its socket's path would be too long.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD_MODULES)
    try:
        forkserver.ensure_running()
    except OSError as wrong:
        raise ConfigError(
            f"no process for workers can be started with temporary files in {tempfile.gettempdir()}: {wrong}",
            hint="set TMPDIR to a short path, as /tmp: a socket lies there, whose path may have about 100 characters",
        ) from wrong


@contextmanager
def open_pool(
    spec: EngineSpec, local: Mapping[ClientId, DeviceData], *, workers: int
) -> Iterator[tuple[WorkerPool, Flat]]:
    """`workers` processes with the devices of `local` divided among them, and the common first model.

    `spec.folder` holds the samples until the workers have read them. A GPU has one process. Raises what
    `EngineSpec.resolve` raises.
    """
    with _worker_processes() as (started, until):
        until(1)
        started[0].send(spec)
        ready: ResolvedSpec = started[0].receive()
        until(1 if ready.on_a_gpu else min(workers, len(local)))
        learner = LazyLearner(ready.recipe, ready.program)
        recipes = [None, *[ready.recipe] * (len(started) - 1)]
        yield _set_up_pool(started, learner, recipes, local, spec.folder), ready.start


@contextmanager
def _worker_processes() -> Iterator[tuple[list[WorkerProcess], Callable[[int], None]]]:
    """-> the started workers, none at first, and a function that starts up to a count. The end stops all of them."""
    started: list[WorkerProcess] = []

    def until(count: int) -> None:
        while len(started) < count:
            started.append(_started())

    start_forkserver()
    try:
        yield started, until
    finally:
        for worker in started:
            worker.pipe.close()  # the worker reads the end of the pipe and exits
        for worker in started:
            worker.process.join(STOP_TIMEOUT_S)
            if worker.process.is_alive():
                worker.process.terminate()
                worker.process.join()


def _started() -> WorkerProcess:
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=run_worker, args=(there,), daemon=True)
    with _without_main():
        process.start()
    there.close()
    return WorkerProcess(pipe=here, process=process)


@contextmanager
def _without_main() -> Iterator[None]:
    """A process that starts now does not run the user's script again, so that this needs no `if __name__ == ...`.

    One thread at a time: of two, the second would put the first one's empty module back for good.
    """
    with _ONE_AT_A_TIME:
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _set_up_pool(
    started: list[WorkerProcess],
    learner: Learner,
    recipes: Sequence[bytes | None],
    local: Mapping[ClientId, DeviceData],
    folder: Path,
) -> WorkerPool:
    home = balance(local, len(started))
    for w, (worker, recipe) in enumerate(zip(started, recipes, strict=True)):
        samples = folder / f"worker-{w}.npz"
        _save(samples, {who: local[who] for who in sorted(local) if home[who] == w})
        # Not an argument of the process: a large one would wait for ever for a worker that died before it read it.
        worker.send(WorkerSetup(recipe=recipe, samples=samples))
    return WorkerPool(learner=learner, local=local, workers=started, home=home)


def balance(local: Mapping[ClientId, DeviceData], workers: int) -> dict[ClientId, int]:
    """A worker for each device, so that workers have equal numbers of devices and about equal numbers of samples.

    Devices are assigned from the largest to the smallest, to workers 0, 1, 2, 2, 1, 0, 0, ...
    """
    there = [*range(workers)]
    turns = itertools.cycle([*there, *reversed(there)])
    return dict(zip(sorted(local, key=lambda who: (-len(local[who].train), who)), turns, strict=False))


def _worker_lost_error() -> FedcentersError:
    return FedcentersError("a worker process ended", hint="the machine may be short of memory: use fewer --workers")


def _save(path: Path, local: Mapping[ClientId, DeviceData]) -> None:
    arrays: dict[str, Array] = {}
    for who, held in local.items():
        for part, data in (("train", held.train), ("test", held.test)):
            if data is not None:
                arrays |= {f"{who}/{part}/x": data.x, f"{who}/{part}/y": data.y}
    np.savez(path, allow_pickle=False, **arrays)
