"""A worker process of process_pool.py: it has some of the devices, and receives messages through a pipe."""

from __future__ import annotations

import gc
import pickle
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import numpy as np

from coordinator.strategies.base import Exchange
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import ConfigError, ProgramRefused, RuntimeMissing, UsageError
from edge_client.malloc import trim_heap
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, ClientId, Flat, Reply
from edge_client.training.learner import Learner
from emulator.engines.base import Recipe
from emulator.engines.engine_spec import EngineSpec
from emulator.parallel.shared_matrix import open_shared_matrix
from emulator.simulation import checkpoint
from emulator.simulation.emulated_devices import EmulatedDevices

# sent back unchanged
USER_ERRORS = (UsageError, ConfigError, RuntimeMissing, ProgramRefused, ImportError)


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """The engine and the samples of a worker. The recipe is pickled; None means that of the spec that it resolved."""

    recipe: bytes | None
    samples: Path


@dataclass(frozen=True, kw_only=True)
class ResolvedSpec:
    """A resolved `EngineSpec`. The recipe is pickled because its classes load torch."""

    recipe: bytes
    program: Program
    start: Flat
    on_a_gpu: bool


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """A worker's part of an exchange. The updates of `rows` go into a matrix, which is sent after the item."""

    tasks: Exchange
    rows: Mapping[ClientId, int]


@dataclass(frozen=True, kw_only=True)
class StateTransfer:
    """Write the worker's own models into a folder, or read those of its devices from there."""

    folder: Path
    write: bool


@dataclass(frozen=True, kw_only=True)
class ModelWanted:
    """The model [schema.size] that a device of the worker keeps in a slot is to be sent; None where it keeps none."""

    who: ClientId
    slot: str


def run_worker(connection: Connection) -> None:
    """The loop of a worker. The first worker receives an `EngineSpec`, every worker a `WorkerSetup` and then work.

    A `WorkItem` is answered with one message for each of its devices, a `StateTransfer` with
    an empty mapping, a `ModelWanted` with the model; None opens a round without answer.
    """
    devices: EmulatedDevices | None = None
    learner, new = None, True
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError, ConnectionResetError):  # the run's process has ended
        told: EngineSpec | WorkerSetup = connection.recv()
        if isinstance(told, EngineSpec):
            answer, learner = _resolve_spec(told)
            connection.send(answer)
            told = connection.recv()
        setup = cast("WorkerSetup", told)
        while True:
            share: WorkItem | StateTransfer | ModelWanted | None = connection.recv()
            try:
                if devices is None:
                    devices = EmulatedDevices(learner=learner or open_recipe(setup.recipe), local=_read(setup.samples))
                _answer(connection, devices, share)
                if new and isinstance(share, WorkItem):
                    gc.collect()  # a recording leaves 20 MB of cycles behind
                    trim_heap()
                    new = False
            except (*USER_ERRORS, OSError) as wrong:
                connection.send(wrong)
            except Exception:  # noqa: BLE001 - every failure is sent to the run's process
                connection.send(traceback.format_exc())


def _answer(
    connection: Connection, devices: EmulatedDevices, share: WorkItem | StateTransfer | ModelWanted | None
) -> None:
    """Do what the run's process has sent, and send what comes of it."""
    if share is None:
        devices.open_round()
    elif isinstance(share, (StateTransfer, ModelWanted)):
        connection.send(_of_own_models(devices, share))
    else:
        with open_shared_matrix(connection) if share.rows else nullcontext() as put:
            for given in devices.each_answer(share.tasks):
                connection.send(_written(given, share.rows, put))


def _of_own_models(devices: EmulatedDevices, asked: StateTransfer | ModelWanted) -> Mapping[str, object] | Flat | None:
    """Do what is asked of the models that devices keep; -> the answer."""
    if isinstance(asked, ModelWanted):
        return devices.own_model(asked.who, asked.slot)
    if asked.write:
        checkpoint.save_models(asked.folder, f"own-{min(devices.local)}", devices.own)
    else:
        devices.recall(asked.folder)
    return {}


def _resolve_spec(spec: EngineSpec) -> tuple[ResolvedSpec | Exception | str, Learner | None]:
    try:
        made = spec.resolve()
        learner, recipe = made.recipe.open(), pickle.dumps(made.recipe)
        plain = {name: str(version) for name, version in learner.program.versions.items()}  # torch's is a class
        program = replace(learner.program, versions=plain)
        ready = ResolvedSpec(recipe=recipe, program=program, start=made.initial_model(program), on_a_gpu=made.on_a_gpu)
    except USER_ERRORS as wrong:
        return wrong, None
    except Exception:  # noqa: BLE001 - as in `run_worker`
        return traceback.format_exc(), None
    return ready, learner


def open_recipe(recipe: bytes | None) -> Learner:
    """Open the learner of a recipe that this run has pickled."""
    if recipe is None:
        raise ValueError("no recipe, and no order before it")
    opened: Recipe = pickle.loads(recipe)  # noqa: S301 - by this run
    return opened.open()


def _written(
    answer: tuple[ClientId, Reply | str], rows: Mapping[ClientId, int], put: Callable[[int, Array], None] | None
) -> tuple[ClientId, Reply | str]:
    """Write the update into the matrix; -> the answer without it."""
    who, reply = answer
    if who in rows and isinstance(reply, Reply) and reply.update is not None and put is not None:
        put(rows[who], reply.update)
        return who, replace(reply, update=None)
    return answer


def _read(path: Path) -> dict[ClientId, DeviceData]:
    with np.load(path, allow_pickle=False) as arrays:
        parts = {
            tuple(name.rsplit("/", 2)[:2]): Dataset(arrays[name], arrays[f"{name[:-2]}/y"])
            for name in arrays.files
            if name.endswith("/x")
        }
    path.unlink()  # read once; the samples are large
    return {
        who: DeviceData(train=data, test=parts.get((who, "test")))
        for (who, part), data in parts.items()
        if part == "train"
    }
