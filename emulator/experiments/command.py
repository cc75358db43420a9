"""`fedcenters-emulator experiment`: run the missing cells of a table, estimate the time left, write the table.

With `kept` nothing is run. `--compare` and `--summary` read finished cells only.

Only this module reads the clock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError, UsageError
from emulator.experiments import plan as plans
from emulator.experiments.cells import CellRun, CellStorage, cell_runs, read_finished, run_cells
from emulator.experiments.cells_summary import render_summary, summarise_cells
from emulator.experiments.compare import compare_rows
from emulator.experiments.matrix import render_matrix
from emulator.experiments.plan import TableCell
from emulator.experiments.table import Results, render_table, replace_section
from emulator.run.summary import Record

REPORT_INTERVAL_S = 15.0
PICTURES = (".png", ".svg")
SEED_OF_FILE = re.compile(r"-s(\d+)-[0-9a-f]+\.json$")
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
    kept: bool = False

    @property
    def place(self) -> CellStorage:
        return CellStorage(data=self.data, out=self.out / self.name, workers=self.workers)


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
    place = prepared.place
    missing = [job for job in todo if read_finished(job, place) is None]
    say(f"{prepared.name}: {len(todo)} runs of {plan.rounds} rounds, {len(todo) - len(missing)} finished before")
    asked = (*plan.metrics, *plan.also)
    reasons = {} if prepared.kept else run_cells(todo, place, asked, ProgressReporter(missing, say))
    results = finished_results(place, seeds)
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


def compare_experiment(prepared: ExperimentArgs, asked: Sequence[str]) -> dict[str, Any]:
    """Paired differences between finished rows, as `compare_rows` says. Runs nothing. Raises UsageError."""
    plan = plans.read_plan(prepared.name, rounds=prepared.rounds)
    results = finished_results(prepared.place, prepared.seeds)
    found = compare_rows(plan.only(prepared.only), results, (*plan.metrics, *plan.also), asked)
    return {"experiment": plan.name, "rounds": plan.rounds, "comparisons": [one.to_json() for one in found]}


def summarise_experiment(prepared: ExperimentArgs) -> dict[str, Any]:
    """Which cells are finished, as JSON types and as `table` in Markdown; written where `write` says. Runs nothing."""
    plan = plans.read_plan(prepared.name, rounds=prepared.rounds)
    found = summarise_cells(plan, plan.only(prepared.only), finished_results(prepared.place, prepared.seeds))
    section = render_summary(found)
    if prepared.write is not None:
        replace_section(prepared.write, prepared.name, section, figures=False)
    return {**found, "table": section}


def finished_results(place: CellStorage, seeds: int | None) -> Results:
    """A cell's finished seeds: those below `seeds`, or every seed of which the folder has a file."""
    named = [int(found[1]) for path in place.out.glob("*.json") if (found := SEED_OF_FILE.search(path.name))]
    most = 1 + max(named, default=-1) if seeds is None else seeds

    def results(cell: TableCell) -> list[Mapping[str, Any]]:
        held = [read_finished(CellRun(cell=cell, seed=seed), place) for seed in range(most)]
        return [one for one in held if one is not None]

    return results


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
