"""Emulated devices whose work is done by a Ray cluster. The replies have the same bits as those of one process.

A unit of work is a function of its tasks, its samples, and the own models and posteriors that the tasks use. All state
stays in this process, so that Ray repeats the units of a lost machine elsewhere with the same bits. Samples are put
into the object store once, where each machine caches those that it uses. All machines have the same fedcenters
installed; this process runs on one of them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.strategies.base import Exchange
from edge_client.data.dataset import DeviceData
from edge_client.errors import FedcentersError, Malformed, NetworkError, RuntimeMissing, install_hint
from edge_client.protocol.program import Program
from edge_client.protocol.summed_task import SummedProbe
from edge_client.protocol.task import Array, ClientId, Fit, Flat, Reply, Task
from edge_client.training.learner import Learner
from emulator.engines.base import Recipe
from emulator.engines.device_runtime import RuntimeRecipe
from emulator.simulation.emulated_devices import EmulatedDevices, no_rounding, own_slots

TASK_RETRIES = 3  # of a unit whose machine or process was lost
GROUPS_PER_CPU = 4  # units of an exchange; more balance better, and each carries the exchange's models once more
WORKERS_LOST_HINT = "see that a machine of the cluster remains, with enough memory, and start the run again"
PROBE_TIMEOUT_S = 5.0
Slot = tuple[ClientId, str]


@dataclass(frozen=True, kw_only=True)
class PortableRecipe:
    """A runtime's recipe with its containers inside, for machines that share no folder; Linux."""

    engine: str
    program: Program
    containers: Mapping[str, bytes]

    @staticmethod
    def from_recipe(recipe: RuntimeRecipe) -> PortableRecipe:
        containers = {name: path.read_bytes() for name, path in recipe.files.items()}
        return PortableRecipe(engine=recipe.engine, program=recipe.program, containers=containers)

    def open(self) -> Learner:
        """See `Recipe`. The files have no name, so that a killed process leaves none behind."""
        files = {name: _unnamed(name, data) for name, data in self.containers.items()}
        return RuntimeRecipe(engine=self.engine, program=self.program, files=files).open()


@dataclass(frozen=True, kw_only=True)
class GroupTask:
    """Tasks of some devices, and what these devices have kept that the tasks ask for."""

    tasks: Mapping[ClientId, Task]
    own: Mapping[Slot, Flat]
    posterior: Mapping[ClientId, Array]


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """The answers, updates not yet rounded, and what the devices keep from now on."""

    answers: Mapping[ClientId, Reply | str]
    own: Mapping[Slot, Flat]
    posterior: Mapping[ClientId, Array]


def run_group_task(learner: Learner, local: Mapping[ClientId, DeviceData], unit: GroupTask) -> GroupResult:
    """Do one unit of work."""
    devices = EmulatedDevices(
        learner=learner, local=local, wire=no_rounding, own=dict(unit.own), posterior=dict(unit.posterior)
    )
    answers = devices.answers(unit.tasks)
    fitted = [(c, task.slot) for c, task in unit.tasks.items() if isinstance(task, Fit) and _answered(answers[c])]
    return GroupResult(answers=answers, own={key: devices.own[key] for key in fitted}, posterior=devices.posterior)


@dataclass(kw_only=True)
class RayWorkerPool(EmulatedDevices):
    """Devices whose work is done by a cluster. `home` is a device's group, `samples` the groups' data, over there."""

    recipe: Any = field(repr=False)  # Ray's references have no types
    samples: Sequence[Any] = field(repr=False)
    home: Mapping[ClientId, int] = field(repr=False)
    remote: Any = field(repr=False)

    def _outcomes(self, tasks: Exchange) -> dict[ClientId, Reply | Malformed]:
        """All groups at once, on the machines with free CPUs. An evaluation that is summed needs this process's books.

        The fits behind a sum come here without their choices (`SummedDevices`), as many at a time as have room.
        """
        here = {who: task for who, task in tasks.items() if isinstance(task, SummedProbe)}
        shares: dict[int, dict[ClientId, Task]] = {}
        for who, task in tasks.items():
            if who not in here:
                shares.setdefault(self.home[who], {})[who] = task
        under_way = [self.remote.remote([self.recipe], self.samples[g], self._unit(shares[g])) for g in sorted(shares)]
        found = super()._outcomes(here)
        for done in _gathered(under_way):
            found |= self._entered(tasks, done)
        return {who: found[who] for who in tasks}

    def _unit(self, tasks: Mapping[ClientId, Task]) -> GroupTask:
        keys = [(who, slot) for who, task in tasks.items() for slot in sorted(own_slots(task))]
        rows = [c for c, task in tasks.items() if isinstance(task, Fit) and task.rows != "ones"]
        return GroupTask(
            tasks=tasks,
            own={key: self.own[key] for key in keys if key in self.own},
            posterior={c: self.posterior[c] for c in rows if c in self.posterior},
        )

    def _entered(self, tasks: Exchange, done: GroupResult) -> dict[ClientId, Reply | Malformed]:
        """Into the books, as copies: what lies in the object store would stay there for as long as it is held."""
        own = {key: np.array(vector) for key, vector in done.own.items()}
        self.own.update(own)
        self.posterior.update({c: np.array(rows) for c, rows in done.posterior.items()})
        found: dict[ClientId, Reply | Malformed] = {}
        for who, answer in done.answers.items():
            task = tasks[who]
            if isinstance(answer, str):
                found[who] = Malformed(answer, "said on the cluster")
            elif isinstance(task, Fit) and task.upload:
                found[who] = replace(answer, update=self.wire(task, own[who, task.slot]))
            else:
                found[who] = answer
        return found


@contextmanager
def connect_to_ray(address: str) -> Iterator[None]:
    """The cluster at `address` (host:port, or "auto" for the one of this machine), for `make_ray_pool`.

    Raises RuntimeMissing without Ray, NetworkError where no cluster answers.
    """
    _check_listening(address)
    ray = _ray()
    try:
        ray.init(address=address, configure_logging=False, log_to_driver=False)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as wrong:
        raise _no_cluster(address, wrong) from wrong
    try:
        yield
    finally:
        ray.shutdown()


def make_ray_pool(recipe: Recipe, local: Mapping[ClientId, DeviceData]) -> RayWorkerPool:
    """The devices of `local` on the connected cluster."""
    ray = _ray()
    groups = _groups(local, int(ray.cluster_resources().get("CPU", 1)) * GROUPS_PER_CPU)
    return RayWorkerPool(
        learner=recipe.open(),
        local=local,
        recipe=ray.put(PortableRecipe.from_recipe(recipe) if isinstance(recipe, RuntimeRecipe) else recipe),
        samples=[ray.put(group) for group in groups],
        home={who: g for g, group in enumerate(groups) for who in group},
        remote=ray.remote(num_cpus=1, max_retries=TASK_RETRIES)(_on_a_worker),
    )


_open: dict[str, Learner] = {}  # of this worker process: the one recipe that it has opened


def _on_a_worker(recipe: list[Any], local: Mapping[ClientId, DeviceData], unit: GroupTask) -> GroupResult:
    (where,) = recipe  # in a list, because Ray would fetch a bare reference for every unit
    if where.hex() not in _open:
        _open.clear()
        _open[where.hex()] = _ray().get(where).open()
    return run_group_task(_open[where.hex()], local, unit)


def _check_listening(address: str) -> None:
    """Raise NetworkError unless something listens at host:port: Ray itself would try for minutes before it says so."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as wrong:
        raise _no_cluster(address, wrong) from wrong


def _no_cluster(address: str, wrong: Exception) -> NetworkError:
    hint = "start one with `ray start --head`, join this machine to it, and pass its host:port"
    return NetworkError(f"no Ray cluster at {address}: {wrong}", hint=hint)


def _gathered(under_way: list[Any]) -> Iterator[GroupResult]:
    """Each unit's result as it comes; the last reference to it goes with it."""
    ray = _ray()
    try:
        while under_way:
            (ready, *_), under_way = ray.wait(under_way, num_returns=1)
            done: GroupResult = ray.get(ready)
            yield done
    except ray.exceptions.RayTaskError as wrong:
        raise FedcentersError(f"a unit of work failed on the cluster:\n{wrong}") from None
    except ray.exceptions.RayError as lost:
        raise NetworkError(f"the Ray cluster could not finish a unit of work: {lost}", hint=WORKERS_LOST_HINT) from lost


def _groups(local: Mapping[ClientId, DeviceData], most: int) -> list[dict[ClientId, DeviceData]]:
    """At most `most` groups of devices, dealt out by name."""
    names = sorted(local)
    count = max(1, min(most, len(names)))
    return [{who: local[who] for who in names[g::count]} for g in range(count)]


def _answered(answer: Reply | str) -> bool:
    return isinstance(answer, Reply)


def _unnamed(name: str, data: bytes) -> Path:
    file = os.memfd_create(name)
    with os.fdopen(os.dup(file), "wb") as out:
        out.write(data)
    return Path(f"/proc/self/fd/{file}")


def _ray() -> Any:  # noqa: ANN401 - no types there
    try:
        import ray
        import ray.exceptions
    except ImportError as missing:
        raise RuntimeMissing("ray is not installed", hint=install_hint("ray")) from missing
    return ray
