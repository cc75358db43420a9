"""Choose the fastest engine for a model on this machine: each engine trains a few random devices for a short time.

The cost of an engine is its seconds per local update, divided by the number of processes that run its recipe at once.
An engine that cannot run here, or fails in its trial, is left out with the reason. The clock is an argument.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low
from typing import TypeVar

import numpy as np

from coordinator.models.registry import Model
from edge_client.data.dataset import Dataset
from edge_client.errors import FedcentersError, RuntimeMissing
from edge_client.protocol.program import Program
from edge_client.protocol.task import Fit
from edge_client.training.fit_probe import make_job
from edge_client.training.learner import Learner, TrainingJob
from emulator.engines.base import Recipe
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.engines.gpu.cuda_graphs import GraphRecipe
from emulator.engines.gpu.memory import release_memory
from emulator.engines.gpu.stacked import StackedRecipe
from export.compiler.program import vector_of
from export.compiler.program_functions import vocabulary_size

TRIAL_SECONDS = 1.0  # for all candidates together
TRIAL_REPEATS = 2  # at least; the lower median then skips a first run that still chose kernels
log = logging.getLogger(__name__)
Clock = Callable[[], float]
Tried = TypeVar("Tried")


@dataclass(frozen=True, kw_only=True)
class EngineCandidate:
    """A recipe, and how many processes of this machine would run it at the same time."""

    recipe: Recipe
    processes: int = 1


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The local update of a random device; up to `clients` devices train at once, as in a round."""

    clients: int = 128
    steps: int = 4
    batch: int = 32


@dataclass(frozen=True, kw_only=True)
class EngineCost:
    """Seconds per local update, or None with the reason why there is none; a reason may also replace a measurement."""

    seconds: float | None
    reason: str = ""


def candidates(model: Model, *, processes: int = 1) -> dict[str, EngineCandidate]:
    """The engines that are the fastest on some machine: the CPU engine in `processes` processes, and two for one GPU.

    On a CPU the loop over clients was faster than stacked clients for every measured model.
    """
    return {
        "lean": EngineCandidate(recipe=cpu_recipe(model), processes=processes),
        "stacked": EngineCandidate(recipe=StackedRecipe(model=model, device="cuda")),
        "graphs": EngineCandidate(recipe=GraphRecipe(model=model)),
    }


def choose_engine(
    model: Model,
    candidates: Mapping[str, EngineCandidate],
    *,
    workload: Workload | None = None,
    seconds: float = TRIAL_SECONDS,
    clock: Clock = time.perf_counter,
) -> tuple[str, Recipe]:
    """The cheapest candidate's name and recipe. Raises RuntimeMissing when none can run this model here."""
    load = workload or Workload()
    opened = {name: _tried(name, candidate.recipe.open) for name, candidate in candidates.items()}
    costs = {name: cost for name, cost in opened.items() if isinstance(cost, EngineCost)}
    learners = {name: learner for name, learner in opened.items() if not isinstance(learner, EngineCost)}
    del opened
    if len(learners) == 1:
        costs |= {name: EngineCost(seconds=0.0, reason="is the only one left") for name in learners}
    else:
        share = seconds / max(1, len(learners))
        for name in list(learners):
            facts = candidates[name], model, load
            costs[name] = _tried(name, partial(measure_engine, learners.pop(name), *facts, seconds=share, clock=clock))
            release_memory()  # the next trial, and the run, find the GPU empty
    costs = {name: costs[name] for name in candidates}  # in their order
    name = cheapest_engine(costs)
    log.info("engine %s for model %s: %s", name, model.name, format_costs(costs))
    return name, candidates[name].recipe


def measure_engine(
    learner: Learner, candidate: EngineCandidate, model: Model, load: Workload, *, seconds: float, clock: Clock
) -> EngineCost:
    """The cost of an update with as many clients at once as about `seconds` allow, after one training for warm-up.

    The warm-up takes the work that an engine does once: recording, choosing kernels, measuring memory. All results are
    on the host when the clock is read.
    """
    jobs = random_jobs(model, learner.program, load)

    def timed(clients: int) -> float:
        start = clock()
        list(learner.train(jobs[:clients]))
        return clock() - start

    began, clients = clock(), 1
    timed(clients)
    times = [timed(clients)]
    while clients < len(jobs) and clock() - began + 2 * TRIAL_REPEATS * times[-1] <= seconds:
        clients = min(2 * clients, len(jobs))
        times = [timed(clients)]
    while len(times) < TRIAL_REPEATS or clock() - began < seconds:
        times.append(timed(clients))
    return EngineCost(seconds=median_low(times) / clients / candidate.processes)


def _tried(name: str, run: Callable[[], Tried]) -> Tried | EngineCost:
    """What `run` returns, or the reason why this engine is left out: any error, since another engine can do the work.

    An error that we do not foresee, such as a CUDA recording that is refused, is a warning with its traceback in debug.
    """
    try:
        return run()
    except FedcentersError as wrong:
        reason = wrong.message
    except Exception as wrong:
        reason = f"failed in its trial: {type(wrong).__name__}: {str(wrong).strip().partition(chr(10))[0]}"
        log.warning("engine %s %s", name, reason)
        log.debug("engine %s", name, exc_info=wrong)
    return EngineCost(seconds=None, reason=reason)


def cheapest_engine(costs: Mapping[str, EngineCost]) -> str:
    """The name with the least cost; of equals, the first. Raises RuntimeMissing when no engine has a cost."""
    timed = {name: cost.seconds for name, cost in costs.items() if cost.seconds is not None}
    if not timed:
        raise RuntimeMissing(
            f"no engine can run here: {format_costs(costs)}",
            hint="choose one of the devices' runtimes: --engine onnx, litert or pt2",
        )
    return min(timed, key=timed.__getitem__)


def format_costs(costs: Mapping[str, EngineCost]) -> str:
    """The cost or the reason of each candidate, in one line."""
    return "; ".join(
        f"{name} {cost.reason}" if cost.reason else f"{name} {1000 * (cost.seconds or 0):.3g} ms per update"
        for name, cost in costs.items()
    )


def random_jobs(model: Model, program: Program, load: Workload) -> list[TrainingJob]:
    """Jobs on random samples with a proximal term. All batches are full, so that all steps cost the same."""
    rng = np.random.default_rng(0)
    n, tokens = 2 * load.batch, vocabulary_size(model.module)
    shape = (n, *model.input)
    x = rng.integers(tokens, size=shape) if tokens else rng.standard_normal(shape)
    truth = (n, *program.truth)
    y = rng.integers(program.classes, size=truth) if program.has_classes else rng.standard_normal(truth)
    data, start = Dataset(x.astype(np.float32), y), vector_of(model.module, program.schema)
    steps = Fit(start=start, anchor=start, mu=0.01, momentum=0.9, lr=1e-3, steps=load.steps, batch=load.batch, seed=0)
    return [make_job(program, replace(steps, seed=seed), data) for seed in range(load.clients)]
