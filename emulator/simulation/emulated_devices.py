"""Devices in one process, which share one learner and run the client's own training code."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from coordinator.strategies.base import Exchange, Fleet
from edge_client.data.dataset import DeviceData
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.program import Program
from edge_client.protocol.summed_task import SummedFit, SummedProbe
from edge_client.protocol.task import (
    MAX_SLOTS,
    TOO_MANY_SLOTS,
    Array,
    ClientId,
    Fit,
    Flat,
    OwnModel,
    Probe,
    Reply,
    Task,
)
from edge_client.training.fit_probe import fit_result, make_job, run_probe
from edge_client.training.learner import Learner, TrainedModel, TrainingJob
from edge_client.training.summed import evaluation_words
from emulator.simulation import checkpoint
from emulator.simulation.drawn_devices import DrawnDevices
from emulator.simulation.probes_together import probes_for, run_probes
from emulator.simulation.spill import SpilledModels
from emulator.simulation.summed_devices import SummedDevices, emulated_secret

T = TypeVar("T")
MAIN_SLOT = "main"  # whose running statistics `Probe.buffers` "own" takes


def round_through_f32_delta(task: Fit, vector: Flat) -> Flat:
    """What the server decodes when a device sends `vector` in codec f32: base + float32(vector - base)."""
    base = task.start if isinstance(task.start, np.ndarray) else task.anchor
    base32 = np.zeros(vector.shape, np.float32) if base is None else base.astype(np.float32)
    return base32 + (vector.astype(np.float32) - base32)


def no_rounding(task: Fit, vector: Flat) -> Flat:  # noqa: ARG001 - as round_through_f32_delta
    """No rounding, for runs in float64."""
    return vector


@dataclass(kw_only=True)
class EmulatedDevices:
    """Emulated devices that share one learner; each has its own data, models by slot, and posterior [M, n]."""

    learner: Learner
    local: Mapping[ClientId, DeviceData]
    wire: Callable[[Fit, Flat], Flat] = round_through_f32_delta
    own: MutableMapping[tuple[ClientId, str], Flat] = field(default_factory=SpilledModels)
    posterior: dict[ClientId, Array] = field(default_factory=dict)  # what the round's last probe left
    asks_own: bool = field(default=False, init=False)  # whether some task names a device's own model, or will
    trained: set[str] = field(default_factory=set, init=False)  # the slots of all fits so far
    forgotten: set[str] = field(default_factory=set, init=False)  # those whose models were not kept
    sums: SummedDevices = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.sums = SummedDevices(own=self.own, posterior=self.posterior)

    @property
    def program(self) -> Program:
        return self.learner.program

    @property
    def fleet(self) -> Fleet:
        return fleet_of(self.local)

    def open_round(self) -> None:
        """Discard the posteriors that the probes of the last round left for its fits.

        Of devices that are drawn, also the models of their own that no task will name.
        """
        if isinstance(self.local, DrawnDevices) and not self.asks_own:
            self.own.clear()
            self.forgotten |= self.trained
        self.posterior.clear()
        self.sums.open_round()

    def answer(self, who: ClientId, task: Task) -> Reply:
        """Carry the task out as the real client does. Raises Malformed with the code of a refusal."""
        ((_, outcome),) = self._each({who: task})
        if isinstance(outcome, Malformed):
            raise outcome
        return outcome

    def answers(self, tasks: Exchange) -> Mapping[ClientId, Reply | str]:
        """Each device's reply, or the code of its refusal."""
        found = dict(self.each_answer(tasks))
        return {who: found[who] for who in tasks}

    def each_answer(self, tasks: Exchange) -> Iterator[tuple[ClientId, Reply | str]]:
        """`answers` one at a time, in any order: the words of a device for a sum are made when it is its turn."""
        return ((who, o.code if isinstance(o, Malformed) else o) for who, o in self._each(tasks))

    def _each(self, tasks: Exchange) -> Iterator[tuple[ClientId, Reply | Malformed]]:
        sums = {who: task for who, task in tasks.items() if isinstance(task, SummedFit)}
        yield from self.sums.answers(self.learner, self.local, sums, self._outcomes)
        rest = {who: task for who, task in tasks.items() if who not in sums}
        found = self._outcomes(rest)
        yield from ((who, found[who]) for who in rest)

    def _outcomes(self, tasks: Exchange) -> dict[ClientId, Reply | Malformed]:
        """The learner gets all fits at once, so that it may batch them over devices."""
        found: dict[ClientId, Reply | Malformed] = {}
        jobs: dict[ClientId, TrainingJob] = {}
        probes = probes_for(self.learner, {who: task for who, task in tasks.items() if isinstance(task, Probe)})
        found |= run_probes(self.learner, probes, lambda learner, who: self._probed(learner, who, probes[who]))
        for who, task in tasks.items():
            if isinstance(task, SummedProbe):
                drawn = emulated_secret(zlib.crc32(who.encode()))  # the tasks of all devices have one seed
                own = partial(self._own, who)
                found[who] = _result_or_refusal(
                    partial(evaluation_words, self.learner, task, self.local[who], own=own, drawn=drawn)
                )
            elif isinstance(task, Probe):
                continue
            elif isinstance(mine := _result_or_refusal(partial(self._job, who, task)), TrainingJob):
                jobs[who] = mine
            else:
                found[who] = mine
        for (who, mine), trained in zip(jobs.items(), self.learner.train(list(jobs.values())), strict=True):
            found[who] = _result_or_refusal(partial(self._fitted, who, mine.task, trained))
        return found

    def _job(self, who: ClientId, task: Fit) -> TrainingJob:
        own, posterior = self._own(who, task.slot), self.posterior.get(who)
        fixed = self.learner.fixed_batch
        return make_job(self.program, task, self.local[who].train, own=own, posterior=posterior, fixed_batch=fixed)

    def _fitted(self, who: ClientId, task: Fit, trained: TrainedModel) -> Reply:
        fitted, n = fit_result(task, trained), len(self.local[who].train)
        self.own[who, task.slot] = fitted.vector
        if not task.upload:
            return Reply(n=n, losses=np.array([fitted.loss]))
        return Reply(n=n, update=self.wire(task, fitted.vector))

    def _probed(self, learner: Learner, who: ClientId, task: Probe) -> Reply | Malformed:
        keep = partial(self.posterior.__setitem__, who)
        return _result_or_refusal(
            lambda: run_probe(learner, task, self.local[who], own=partial(self._own, who), keep=keep)
        )

    def keep(self, folder: Path) -> None:
        checkpoint.save_models(folder, "own", self.own)

    def recall(self, folder: Path) -> None:
        checkpoint.load_models(folder, self.local.keys(), self.own)

    def work(self, who: ClientId, task: Task) -> tuple[int, int]:
        """The local steps, and the models to evaluate, that a task costs the device.

        A probe for the least loss counts as one of all losses, though a device may leave models early.
        """
        if isinstance(task, SummedFit):
            return self.sums.work(who, task)
        if isinstance(task, Fit):
            return task.steps, 0
        return 0, 1 if isinstance(task, SummedProbe) and task.served == "center" else len(task.models)

    def fetched(self, who: ClientId, task: Task) -> list[Flat]:
        """The models that the device downloads for a task: each once, and no `init` where it has a model of its own."""
        self._note(who, task)
        if isinstance(task, Probe):
            own = [m.init for m in task.models if isinstance(m, OwnModel) and self._own(who, m.slot) is None]
            named = [*own, *(m for m in task.models if not isinstance(m, OwnModel))]
        else:
            has = isinstance(task.start, str) and self._own(who, task.slot) is not None
            start = None if isinstance(task.start, str) else task.start
            named = [start, None if has else task.init, task.anchor, task.linear]
        if isinstance(task, SummedFit):
            named = [*named, *task.centers] if len(task.centers) > 1 else named
        return list({id(v): v for v in named if v is not None}.values())

    def _note(self, who: ClientId, task: Task) -> None:
        """A checkpoint has the own models once a task has named one: those of a slot from its first fit on, or none.

        Raises ConfigError for a model that is gone, and for one more than a device keeps.
        """
        named = own_slots(task)
        self.asks_own |= bool(named)
        if lost := sorted(named & self.forgotten):
            told = f"the devices' own models {lost[0]!r} are gone: no task had named them in the rounds before"
            raise ConfigError(told, hint="run again without --resume, with a method that names them in the first round")
        if isinstance(task, Fit):
            self.trained.add(task.slot)
            here = (slot == task.slot or (who, slot) in self.own for slot in self.trained)
            if len(self.trained) > MAX_SLOTS and sum(here) > MAX_SLOTS:
                raise ConfigError(TOO_MANY_SLOTS, hint="use fewer names: a device refuses a task that needs more")

    def own_model(self, who: ClientId, slot: str) -> Flat | None:
        """The model [schema.size] that the device keeps in a slot, of float32 or as its fit gave it; None: none."""
        return self._own(who, slot)

    def _own(self, who: ClientId, slot: str) -> Flat | None:
        return self.own.get((who, slot))


def fleet_of(local: Mapping[ClientId, DeviceData]) -> Fleet:
    """The devices with their numbers of training samples."""
    return local.fleet if isinstance(local, DrawnDevices) else {c: len(local[c].train) for c in sorted(local)}


def own_slots(task: Task) -> set[str]:
    """The slots whose models on the device a task names: to go on from, to evaluate, or for their statistics."""
    if isinstance(task, Fit):
        sums = isinstance(task, SummedFit)
        return {task.slot} if sums or isinstance(task.start, str) or task.buffers == "own" else set()
    named = {model.slot for model in task.models if isinstance(model, OwnModel)}
    return named | ({MAIN_SLOT} if task.buffers == "own" else set())


def _result_or_refusal(do: Callable[[], T]) -> T | Malformed:
    """The value of `do`, or the refusal that it raises."""
    try:
        return do()
    except Malformed as refusal:
        return refusal
