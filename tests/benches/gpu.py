"""`python -m tests.benches.gpu`: local updates per second on a CUDA machine, of the usual loop and of our engines.

An update is 10 steps of SGD with momentum and a proximal term, batches of 32, in float32 (our engines without TF32, the
loop as torch comes). The contestants take turns; the figures are medians, with everything on the host again when the
clock is read. Each gets as many clients as keep it busy for a moment. Before a figure counts, the contestant's update
of one client must be the loop's. Markdown goes to stdout, progress to stderr; without CUDA it says so and exits with 3.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 - torch's custom

from coordinator.models.registry import Model, build_model
from edge_client.errors import RuntimeMissing
from edge_client.protocol.task import Flat
from edge_client.run_cli import run_cli
from edge_client.training.learner import Learner, TrainingJob
from emulator.engines.autotune import Workload, random_jobs
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.engines.gpu.cuda_graphs import GraphRecipe
from emulator.engines.gpu.stacked import StackedRecipe
from export.compiler.program import load_vector, make_source, program_without_containers, schema_of, vector_of
from tests.benches.machine import described

# Relative difference of an update from the loop's, float32. TF32 in the loop's convolutions keeps 10 bits, and batch
# norm passes rounding on to relu and max, which may choose differently. A wrong term shows as 1e-1.
TOLERANCE = 5e-2
REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class ClientsPerTurn:
    """How many clients each contestant trains per turn."""

    loop: int
    lean: int
    stacked: int
    graphs: int


PLANS = {
    "mnist-mlp": ClientsPerTurn(loop=16, lean=16, stacked=1024, graphs=128),
    "wecfl-cnn": ClientsPerTurn(loop=16, lean=8, stacked=512, graphs=128),
    "femnist-cnn": ClientsPerTurn(loop=16, lean=1, stacked=128, graphs=64),
}


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """Trains `clients` once per call; `first` is the update of the first of them, [size]."""

    clients: int
    turn: Callable[[], object]
    first: Callable[[], Flat]


def loop(model: Model, jobs: list[TrainingJob], device: torch.device) -> list[Flat]:
    """Module, autograd, torch.optim.SGD, the proximal term in the loss, samples on the device already."""
    module = copy.deepcopy(model.module).to(device).train()
    schema, found = schema_of(model.module), []
    x, y = (torch.from_numpy(part).to(device) for part in (jobs[0].data.x, jobs[0].data.y))
    for job in jobs:
        load_vector(module, schema, job.start)
        anchor = [p.detach().clone() for p in module.parameters()]
        optimizer = torch.optim.SGD(module.parameters(), lr=job.task.lr, momentum=job.task.momentum)
        for index in job.batches:
            rows = torch.from_numpy(index).to(device)
            optimizer.zero_grad()
            pulls = [((p - a) ** 2).sum() for p, a in zip(module.parameters(), anchor, strict=True)]
            loss = F.cross_entropy(module(x[rows]), y[rows]) + job.task.mu / 2 * torch.stack(pulls).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        found.append(vector_of(module, schema))
    return found


def contestants(model: Model, plan: ClientsPerTurn, device: torch.device) -> dict[str, Contestant]:
    """By name. All train on the same samples, which a fleet would not: then each client's come over the bus."""
    program = program_without_containers(make_source(model.module, input=model.input, target=(model.classes,)))
    most = max(plan.loop, plan.lean, plan.stacked, plan.graphs)
    jobs = random_jobs(model, program, Workload(clients=most, steps=10, batch=32))

    def ours(learner: Learner, clients: int) -> Contestant:
        return Contestant(
            clients=clients,
            turn=lambda: list(learner.train(jobs[:clients])),
            first=lambda: next(learner.train(jobs[:1])).vector,
        )

    return {
        "loop": Contestant(
            clients=plan.loop,
            turn=lambda: loop(model, jobs[: plan.loop], device),
            first=lambda: loop(model, jobs[:1], device)[0],
        ),
        "lean, one core": ours(cpu_recipe(model).open(), plan.lean),
        "stacked": ours(StackedRecipe(model=model, device=str(device)).open(), plan.stacked),
        "graphs, 1 lane": ours(GraphRecipe(model=model, device=str(device), lanes=1).open(), plan.graphs),
        "graphs, 4 lanes": ours(GraphRecipe(model=model, device=str(device), lanes=4).open(), plan.graphs),
    }


def race(some: Mapping[str, Contestant], *, seconds: float, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Updates per second of each turn: one turn each that does not count, then up to REPEATS while there is time."""
    began, found = clock(), {name: list[float]() for name in some}
    for one in some.values():
        one.turn()
    for repeat in range(REPEATS):
        if repeat and clock() - began > seconds * (repeat + 1) / (repeat + 2):  # no time for one more like these
            break
        for name, one in some.items():
            start = clock()
            one.turn()
            found[name].append(one.clients / (clock() - start))
    return found


def differences(some: Mapping[str, Contestant], start: Flat) -> dict[str, float]:
    """Of each first client's update from the loop's, relative."""
    expected = some["loop"].first()
    update = np.linalg.norm(expected - start)
    return {name: float(np.linalg.norm(one.first() - expected) / update) for name, one in some.items()}


def row(model: str, speeds: Mapping[str, list[float]], errors: Mapping[str, float]) -> str:
    """One line of the table; a contestant whose update is another one has no figure."""
    plain = statistics.median(speeds["loop"])

    def cell(name: str) -> str:
        if not errors[name] <= TOLERANCE:
            return f"wrong by {errors[name]:.0e}"
        median = statistics.median(speeds[name])
        return f"{median:.4g} ({median / plain:.1f}x)"

    return f"| {model} | {' | '.join(cell(name) for name in speeds)} | {len(speeds['loop'])} |"


def measure(seconds: float) -> None:
    """Of a CUDA machine. Raises RuntimeMissing elsewhere."""
    if not torch.cuda.is_available():
        raise RuntimeMissing(
            f"torch {torch.__version__} finds no CUDA device here, so nothing was measured",
            hint="run it on a machine with a CUDA device and a torch build for its driver",
        )
    device = torch.device("cuda")
    compare(device, f"{torch.cuda.get_device_name(device)}, {described()}", seconds=seconds)


def compare(device: torch.device, machine: str, *, seconds: float) -> None:
    """Print the table, every model's line as soon as it is known."""
    say = sys.stdout.write
    say(f"Updates per second on {machine}; medians of interleaved turns, in brackets the ratio to the loop.\n\n")
    for i, (name, plan) in enumerate(PLANS.items()):
        model = build_model(name, seed=0)
        some = contestants(model, plan, device)
        if i == 0:
            say(f"| model | {' | '.join(some)} | turns |\n|{'---|' * (len(some) + 2)}\n")
        errors = differences(some, vector_of(model.module, schema_of(model.module)))
        sys.stderr.write(f"{name}: {errors}\n")
        say(row(name, race(some, seconds=seconds / len(PLANS), clock=time.perf_counter), errors) + "\n")
        sys.stdout.flush()


def main() -> int:
    """Measure all models; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="for the turns of all models together")
    asked = parser.parse_args()
    return run_cli(lambda: measure(asked.seconds))


if __name__ == "__main__":
    raise SystemExit(main())
