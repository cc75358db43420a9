"""`fedcenters-emulator experiment`: run the missing cells of a table, estimate the time left, write the table.

Only this module reads the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError, UsageError
from emulator.experiments import plan as plans
from emulator.experiments.cells import CellRun, CellStorage, cell_runs, read_finished, run_cells
from emulator.experiments.matrix import render_matrix
from emulator.experiments.plan import TableCell
from emulator.experiments.table import render_table, replace_section
from emulator.run.summary import Record

REPORT_INTERVAL_S = 15.0
PICTURES = (".png", ".svg")
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ExperimentArgs:
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


def run_experiment(prepared: ExperimentArgs, say: Report) -> dict[str, Any]:
    """Run it; -> what is finished, what could not be run and why, and the table in Markdown.

    Raises UsageError, before anything is run, for an unknown experiment or cell, or a picture of another format; after
    it where a figure of the file to write would be lost. Raises ConfigError if no cell could be run.
    """
    if prepared.picture is not None and prepared.picture.suffix not in PICTURES:
        raise UsageError(f"{prepared.picture} ends with neither {' nor '.join(PICTURES)}", hint="name it curves.svg")
    plan = plans.read_plan(prepared.name, rounds=prepared.rounds)
    seeds = prepared.seeds or plan.seeds
    todo = cell_runs(plan.only(prepared.only), seeds)
    place = CellStorage(data=prepared.data, out=prepared.out / prepared.name, workers=prepared.workers)
    missing = [job for job in todo if read_finished(job, place) is None]
    say(f"{prepared.name}: {len(todo)} runs of {plan.rounds} rounds, {len(todo) - len(missing)} finished before")
    reasons = run_cells(todo, place, plan.metrics, ProgressReporter(missing, say))

    def results(cell: TableCell) -> list[Mapping[str, Any]]:
        held = [read_finished(CellRun(cell=cell, seed=seed), place) for seed in range(seeds)]
        return [one for one in held if one is not None]

    render = render_matrix if plan.judged else render_table
    section = render(plan, results, command=command_of(prepared, plan.rounds, seeds), reasons=reasons)
    done = sum(read_finished(job, place) is not None for job in todo)
    if reasons and not done:
        raise ConfigError(f"no cell of {prepared.name} could be run", hint="; ".join(sorted(set(reasons.values()))))
    if prepared.write is not None:
        replace_section(prepared.write, prepared.name, section)
    if prepared.picture is not None:
        from emulator.experiments.curves import draw_table_curves

        if not draw_table_curves(plan, results, prepared.picture):
            say(f"{prepared.picture} is left out: no finished cell has an accuracy")
    return {"experiment": prepared.name, "finished": done, "of": len(todo), "reasons": reasons, "table": section}


def command_of(prepared: ExperimentArgs, rounds: int, seeds: int) -> str:
    """The command that reproduces the table, without paths of this machine."""
    return f"fedcenters-emulator experiment {prepared.name} --data DIR --rounds {rounds} --seeds {seeds}"


@dataclass(kw_only=False)
class ProgressReporter:
    """A line now and then: which run, which round, how well, and about how long the rest takes."""

    missing: Sequence[CellRun]
    say: Report
    _began_s: float = field(default_factory=time.perf_counter)
    _said_s: float = -REPORT_INTERVAL_S
    _rounds: int = 0

    def __call__(self, job: CellRun, record: Record) -> None:
        now_s = time.perf_counter()
        self._rounds += 1
        last = record["round"] == record["of"]
        if now_s - self._said_s < REPORT_INTERVAL_S and not last:
            return
        self._said_s = now_s
        number = 1 + next(i for i, one in enumerate(self.missing) if one == job)
        left = record["of"] - record["round"] + sum(one.cell.rounds for one in self.missing[number:])
        rest_s = left * (now_s - self._began_s) / self._rounds
        accuracy = record["accuracy"]["micro"]
        well = "" if accuracy is None else f", accuracy {accuracy:.1%}"
        self.say(
            f"run {number}/{len(self.missing)}: {job.cell.row.name} (K={job.cell.row.k}), {job.cell.column.name},"
            f" seed {job.seed}: round {record['round']}/{record['of']}{well}; {format_duration(rest_s)} left"
        )


def format_duration(seconds: float) -> str:
    """A duration in rounded units."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(1, minutes)} min"  # noqa: PLR2004 - an hour
