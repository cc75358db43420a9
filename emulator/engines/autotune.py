"""Which engine is the cheapest for a model on this machine: each one trains a few made-up devices for a moment.

The clock is an argument. What an engine costs is seconds per local update; a recipe that runs in several processes at
once divides that by their number. An engine that cannot run here is left out, with its reason. Chooses, and says why;
changes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np

from coordinator.models.registry import Model
from edge_client.data.dataset import Dataset
from edge_client.errors import FedcentersError, RuntimeMissing
from edge_client.protocol.program import Program
from edge_client.protocol.task import Fit
from edge_client.training.fit_probe import job
from edge_client.training.learner import Job, Learner
from emulator.engines.base import Recipe
from emulator.engines.cpu.cpu_engine import lean
from emulator.engines.gpu.cuda_graphs import graphs
from emulator.engines.gpu.stacked import stacked
from export.compiler.program import vector_of
from export.compiler.program_functions import vocabulary

SECONDS = 1.0  # for all candidates together
REPEATS = 2  # at least; the lower median then passes over a first time that still chose kernels
log = logging.getLogger(__name__)
Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A recipe, and how many processes of this machine would run it at the same time."""

    recipe: Recipe
    processes: int = 1


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a made-up device does; up to `clients` of them train at once, as in a round."""

    clients: int = 128
    steps: int = 4
    batch: int = 32


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds per local update, or None with the reason why there is none; a reason may also stand for a time."""

    seconds: float | None
    reason: str = ""


def candidates(model: Model, *, dtype: str = "float32", processes: int = 1) -> dict[str, Candidate]:
    """What may be the fastest somewhere: a lean loop in so many processes, and two ways to keep one GPU busy.

    On a CPU clients side by side lose to the loop for every model that was measured, so they are not tried there.
    """
    return {
        "lean": Candidate(recipe=lean(model, dtype=dtype), processes=processes),
        "stacked": Candidate(recipe=stacked(model, device="cuda", dtype=dtype)),
        "graphs": Candidate(recipe=graphs(model, dtype=dtype)),
    }


def auto(
    model: Model,
    candidates: Mapping[str, Candidate],
    *,
    workload: Workload | None = None,
    seconds: float = SECONDS,
    clock: Clock = time.perf_counter,
) -> tuple[str, Recipe]:
    """The cheapest candidate's name and recipe. Raises RuntimeMissing when none can run this model here."""
    load = workload or Workload()
    opened = {name: _opened(candidate) for name, candidate in candidates.items()}
    able = [name for name, learner in opened.items() if not isinstance(learner, Cost)]
    costs = {
        name: learner
        if isinstance(learner, Cost)
        else Cost(seconds=0.0, reason="is the only one left")
        if able == [name]
        else measured(learner, candidates[name], model, load, seconds=seconds / len(able), clock=clock)
        for name, learner in opened.items()
    }
    name = cheapest(costs)
    log.info("engine %s for model %s: %s", name, model.name, sentence_of(costs))
    return name, candidates[name].recipe


def measured(
    learner: Learner, candidate: Candidate, model: Model, load: Workload, *, seconds: float, clock: Clock
) -> Cost:
    """What an update costs with as many clients at once as about `seconds` allow, after a training that counts nothing.

    What an engine does only once (recording, choosing kernels, measuring memory) belongs to no update. Results are on
    the host when the clock is read, so nothing is still under way.
    """
    jobs = made_up(model, learner.program, load)

    def timed(clients: int) -> float:
        start = clock()
        list(learner.train(jobs[:clients]))
        return clock() - start

    began, clients = clock(), 1
    timed(clients)
    times = [timed(clients)]
    while clients < len(jobs) and clock() - began + 2 * REPEATS * times[-1] <= seconds:
        clients = min(2 * clients, len(jobs))
        times = [timed(clients)]
    while len(times) < REPEATS or clock() - began < seconds:
        times.append(timed(clients))
    return Cost(seconds=median_low(times) / clients / candidate.processes)


def _opened(candidate: Candidate) -> Learner | Cost:
    try:
        return candidate.recipe.open()
    except FedcentersError as wrong:
        return Cost(seconds=None, reason=wrong.message)


def cheapest(costs: Mapping[str, Cost]) -> str:
    """The name with the least cost; of equals, the first."""
    timed = {name: cost.seconds for name, cost in costs.items() if cost.seconds is not None}
    if not timed:
        raise RuntimeMissing(
            f"no engine can run here: {sentence_of(costs)}",
            hint="choose one of the devices' runtimes: --engine onnx, litert or pt2",
        )
    return min(timed, key=timed.__getitem__)


def sentence_of(costs: Mapping[str, Cost]) -> str:
    """What each candidate costs, or what else there is to say."""
    return "; ".join(
        f"{name} {cost.reason}" if cost.reason else f"{name} {1000 * (cost.seconds or 0):.3g} ms per update"
        for name, cost in costs.items()
    )


def made_up(model: Model, program: Program, load: Workload) -> list[Job]:
    """Jobs on random samples, a proximal term in each: full batches, so that every step is like the others."""
    rng = np.random.default_rng(0)
    n, tokens = 2 * load.batch, vocabulary(model.module)
    shape = (n, *model.input)
    x = rng.integers(tokens, size=shape) if tokens else rng.standard_normal(shape)
    squared = model.loss == "squared-error"
    y = rng.standard_normal((n, *program.target)) if squared else rng.integers(model.classes, size=n)
    data, start = Dataset(x.astype(np.float32), y), vector_of(model.module, program.schema)
    steps = Fit(start=start, anchor=start, mu=0.01, momentum=0.9, lr=1e-3, steps=load.steps, batch=load.batch, seed=0)
    return [job(program, replace(steps, seed=seed), data) for seed in range(load.clients)]
