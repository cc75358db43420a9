"""The sums' side of emulated devices: choices, fits and words, as edge_client/training/summed.py computes them.

The devices of an exchange train together, so that an engine may batch them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
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
    contribution,
    next_fit,
    plain_fits,
)

TrainAll = Callable[[Mapping[ClientId, Fit]], Mapping[ClientId, Reply | Malformed]]


def emulated_secret(seed: int) -> np.random.Generator:
    """In place of the secret numbers of a device: they follow from a seed, so that a run can be repeated."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(1,))))


@dataclass(kw_only=True)
class SummedDevices:
    """The devices' trained models of this round by device and slot, over the emulator's stores.

    `own` are the devices' own models, `posterior` what their last probe left.
    """

    own: MutableMapping[tuple[ClientId, str], Flat]
    posterior: dict[ClientId, Array]
    trained: dict[tuple[ClientId, str], TrainedChoice] = field(default_factory=dict)

    def answers(
        self,
        learner: Learner,
        local: Mapping[ClientId, DeviceData],
        tasks: Mapping[ClientId, SummedFit],
        train: TrainAll,
    ) -> dict[ClientId, Reply | Malformed]:
        """The words of each device, or its refusal; `train` carries plain fits out."""
        found: dict[ClientId, Reply | Malformed] = {}
        scores: dict[ClientId, F64 | None] = {}
        fits: dict[ClientId, list[Fit]] = {}
        for who, task in tasks.items():
            if (who, task.slot) in self.trained:
                continue
            last, keep = self.own.get((who, CHOICE_SLOT)), partial(self.posterior.__setitem__, who)
            try:
                scores[who] = choose_before(learner, task, local[who], last, keep)
                fits[who] = [replace(fit, upload=True) for fit in plain_fits(task, scores[who], last)]
            except Malformed as refusal:
                found[who] = refusal
        for who, models in self._trained(tasks, fits, train, found).items():
            task, last = tasks[who], self.own.get((who, CHOICE_SLOT))
            self.trained[who, task.slot] = choose_after(task, models, scores[who], last)
        for who, task in tasks.items():
            if who not in found:
                found[who] = self._words(who, task)
        return found

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
        mine = self.trained[who, task.slot]
        if task.stage in ("choose", "add") and task.choose != "given":
            if task.points is not None and task.stage == "choose":
                mine = self.trained[who, task.slot] = choose_after(task, mine.models, None, None)
            self.own[who, CHOICE_SLOT] = mine.among(task.open)
        try:
            return contribution(task, mine, emulated_secret(task.seed))
        except Malformed as refusal:
            return refusal
