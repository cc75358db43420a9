"""`fedcenters-emulator experiment`: runs what is missing of a table, says how long it will take, writes the table.

The clock is read here and nowhere below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_client.errors import UsageError
from emulator.experiments import plan as plans
from emulator.experiments.cells import Job, Place, carry_out, finished, jobs
from emulator.experiments.plan import Cell
from emulator.experiments.table import put, render
from emulator.simulate import Record

SAY_EVERY_S = 15.0
PICTURES = (".png", ".svg")
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command line. None leaves a number as the experiment's file has it."""

    name: str
    data: Path | None = None
    seeds: int | None = None
    rounds: int | None = None
    only: Sequence[str] = ()
    out: Path = Path("runs/experiments")
    workers: int = 1
    write: Path | None = None
    picture: Path | None = None


def experiment(asked: Asked, say: Say) -> dict[str, Any]:
    """Run it; -> what is finished, what could not be run and why, and the table in Markdown.

    Raises UsageError, before anything is run, for an unknown experiment or cell, or a picture of another format.
    """
    if asked.picture is not None and asked.picture.suffix not in PICTURES:
        raise UsageError(f"{asked.picture} ends with neither {' nor '.join(PICTURES)}", hint="name it curves.svg")
    plan = plans.read(asked.name, rounds=asked.rounds)
    seeds = asked.seeds or plan.seeds
    todo = jobs(plan.only(asked.only), seeds)
    place = Place(data=asked.data, out=asked.out / asked.name, workers=asked.workers)
    missing = [job for job in todo if finished(job, place) is None]
    say(f"{asked.name}: {len(todo)} runs of {plan.rounds} rounds, {len(todo) - len(missing)} finished before")
    reasons = carry_out(todo, place, plan.metrics, Teller(missing, say))

    def results(cell: Cell) -> list[Mapping[str, Any]]:
        held = [finished(Job(cell=cell, seed=seed), place) for seed in range(seeds)]
        return [one for one in held if one is not None]

    section = render(plan, results, command=command_of(asked, plan.rounds, seeds), reasons=reasons)
    if asked.write is not None:
        put(asked.write, asked.name, section)
    if asked.picture is not None:
        from emulator.experiments.curves import draw

        if not draw(plan, results, asked.picture):
            say(f"{asked.picture} is left out: no finished cell has an accuracy")
    done = sum(finished(job, place) is not None for job in todo)
    return {"experiment": asked.name, "finished": done, "of": len(todo), "reasons": reasons, "table": section}


def command_of(asked: Asked, rounds: int, seeds: int) -> str:
    """What reproduces the table, without this machine's paths."""
    return f"fedcenters-emulator experiment {asked.name} --data DIR --rounds {rounds} --seeds {seeds}"


@dataclass(kw_only=False)
class Teller:
    """A line now and then: which run, which round, how well, and about how long the rest takes."""

    missing: Sequence[Job]
    say: Say
    _began_s: float = field(default_factory=time.perf_counter)
    _said_s: float = -SAY_EVERY_S
    _rounds: int = 0

    def __call__(self, job: Job, record: Record) -> None:
        """After every round of every run."""
        now_s = time.perf_counter()
        self._rounds += 1
        last = record["round"] == record["of"]
        if now_s - self._said_s < SAY_EVERY_S and not last:
            return
        self._said_s = now_s
        number = 1 + next(i for i, one in enumerate(self.missing) if one == job)
        left = record["of"] - record["round"] + sum(one.cell.rounds for one in self.missing[number:])
        rest_s = left * (now_s - self._began_s) / self._rounds
        accuracy = record["accuracy"]["micro"]
        well = "" if accuracy is None else f", accuracy {accuracy:.1%}"
        self.say(
            f"run {number}/{len(self.missing)}: {job.cell.row.name} (K={job.cell.row.k}), {job.cell.column.name},"
            f" seed {job.seed}: round {record['round']}/{record['of']}{well}; {in_time(rest_s)} left"
        )


def in_time(seconds: float) -> str:
    """About how long, for a person."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(1, minutes)} min"  # noqa: PLR2004 - an hour
