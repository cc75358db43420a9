"""The sums' side of emulated devices: choices, fits and words, as edge_client/training/summed.py computes them.

The devices of an exchange train together, so that an engine may batch them: as many as have room in memory with their
models. Trained models and words are kept as in spill.py, so memory does not grow with the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from edge_client.data.dataset import DeviceData
from edge_client.errors import Malformed
from edge_client.protocol.summed_task import SummedFit
from edge_client.protocol.task import F64, Array, ClientId, Fit, Flat, Reply
from edge_client.training.learner import Learner
from edge_client.training.summed import (
    CHOICE_SLOT,
    TrainedChoice,
    choose_after,
    choose_before,
    chooses_by_probe,
    contribution,
    next_fit,
    plain_fits,
)
from emulator.simulation import spill
from emulator.simulation.spill import Slot, SpilledModels

TrainAll = Callable[[Mapping[ClientId, Fit]], Mapping[ClientId, Reply | Malformed]]
NO_MODELS = np.empty((0, 0), np.float32)  # of a choice whose models are in `models`
ELSEWHERE = TrainedChoice(models=NO_MODELS, weights=np.empty(0), order=None)  # of a device in a worker process


def emulated_secret(seed: int) -> np.random.Generator:
    """In place of the secret numbers of a device: they follow from a seed, so that a run can be repeated."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(1,))))


@dataclass(kw_only=True)
class SummedDevices:
    """The devices' trained models of this round by device and slot, over the emulator's stores.

    `own` are the devices' own models, `posterior` what their last probe left.
    """

    own: MutableMapping[Slot, Flat]
    posterior: dict[ClientId, Array]
    choices: dict[Slot, TrainedChoice] = field(default_factory=dict)
    models: SpilledModels = field(default_factory=SpilledModels)  # [M * size] of each choice

    def open_round(self) -> None:
        """Forget what was trained in the last round."""
        self.choices.clear()
        self.models.clear()

    def work(self, who: ClientId, task: SummedFit) -> tuple[int, int]:
        """The local steps and the models to evaluate on all samples that a task costs: nothing once it has trained."""
        if (who, task.slot) in self.choices:
            return 0, 0
        k, last = len(task.centers), self.own.get((who, CHOICE_SLOT))
        fits = k if task.choose == "posterior" else 1
        return fits * task.repeats * task.steps, k if chooses_by_probe(task, last) else 0

    def note_answer(self, who: ClientId, task: SummedFit) -> None:
        """A worker process has answered the task: so much is known here as `work` asks for."""
        self.choices[who, task.slot] = ELSEWHERE
        if _keeps_choice(task):
            self.own[who, CHOICE_SLOT] = ELSEWHERE.weights

    def answers(
        self,
        learner: Learner,
        local: Mapping[ClientId, DeviceData],
        tasks: Mapping[ClientId, SummedFit],
        train: TrainAll,
    ) -> Iterator[tuple[ClientId, Reply | Malformed]]:
        """The words of each device, or its refusal, one at a time; `train` carries plain fits out."""
        for part in _with_room(tasks):
            refused = self._train(learner, local, part, train)
            for who, task in part.items():
                yield who, refused[who] if who in refused else self._words(who, task)

    def _train(
        self,
        learner: Learner,
        local: Mapping[ClientId, DeviceData],
        tasks: Mapping[ClientId, SummedFit],
        train: TrainAll,
    ) -> dict[ClientId, Reply | Malformed]:
        """Let those devices train that have not in this round; -> the refusals."""
        refused: dict[ClientId, Reply | Malformed] = {}
        scores: dict[ClientId, F64 | None] = {}
        fits: dict[ClientId, list[Fit]] = {}
        for who, task in tasks.items():
            if (who, task.slot) in self.choices:
                continue
            last, keep = self.own.get((who, CHOICE_SLOT)), partial(self.posterior.__setitem__, who)
            try:
                scores[who] = choose_before(learner, task, local[who], last, keep)
                fits[who] = [replace(fit, upload=True) for fit in plain_fits(task, scores[who], last)]
            except Malformed as refusal:
                refused[who] = refusal
        for who, models in self._trained(tasks, fits, train, refused).items():
            task, last = tasks[who], self.own.get((who, CHOICE_SLOT))
            self.models[who, task.slot] = models.ravel()
            self._keep(who, task, choose_after(task, models, scores[who], last))
        return refused

    def _keep(self, who: ClientId, task: SummedFit, mine: TrainedChoice) -> None:
        self.choices[who, task.slot] = replace(mine, models=NO_MODELS)

    def _trained(
        self,
        tasks: Mapping[ClientId, SummedFit],
        fits: Mapping[ClientId, list[Fit]],
        train: TrainAll,
        refused: dict[ClientId, Reply | Malformed],
    ) -> dict[ClientId, Array]:
        """[M, size] the trained models of each device; a device that cannot train is noted in `refused`."""
        models: dict[ClientId, list[Flat]] = {who: [] for who in fits}
        for m in range(max((len(mine) for mine in fits.values()), default=0)):
            now = {who: mine[m] for who, mine in fits.items() if who not in refused}
            for again in range(max(tasks[who].repeats for who in fits)):
                for who, reply in train(now).items():
                    if isinstance(reply, Malformed) or reply.update is None:
                        refused[who] = reply
                        now.pop(who)
                    elif again + 1 < tasks[who].repeats or tasks[who].move < 1:
                        now[who], moved = next_fit(now[who], reply.update, tasks[who].move)
                        models[who] = [*models[who][:m], moved]
                    else:
                        models[who] = [*models[who][:m], reply.update]
        return {who: np.stack(found) for who, found in models.items() if who not in refused}

    def _words(self, who: ClientId, task: SummedFit) -> Reply | Malformed:
        models = self.models[who, task.slot].reshape(-1, task.centers.shape[1])
        mine = replace(self.choices[who, task.slot], models=models)
        if _keeps_choice(task):
            if task.points is not None and task.stage == "choose":
                mine = choose_after(task, models, None, None)
                self._keep(who, task, mine)
            self.own[who, CHOICE_SLOT] = mine.kept(task.open)
        try:
            return contribution(task, mine, emulated_secret(task.seed))
        except Malformed as refusal:
            return refusal


def _keeps_choice(task: SummedFit) -> bool:
    """Whether the device keeps its weights in the centers for later rounds."""
    return task.stage in ("choose", "add") and task.choose != "given"


def _with_room(tasks: Mapping[ClientId, SummedFit]) -> Iterator[Mapping[ClientId, SummedFit]]:
    """The tasks in their order, so many at a time that the models of their devices have room in memory."""
    part, room = dict[ClientId, SummedFit](), 0
    for who, task in tasks.items():
        part[who] = task
        room += task.centers.nbytes if task.choose == "posterior" else task.centers[0].nbytes
        if room >= spill.MAX_MEMORY_BYTES:
            yield part
            part, room = {}, 0
    if part:
        yield part
