"""`fedcenters-emulator experiment`: run the missing cells of a table, estimate the time left, write the table.

With `kept` nothing is run. `--compare` and `--summary` read finished cells only.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError
from emulator.data.registry import find_data_set
from emulator.experiments import plan as plans
from emulator.experiments.cells import (
    CHECKPOINT_EVERY,
    CellRun,
    CellStorage,
    cell_runs,
    kept_round,
    read_finished,
    run_cells,
)
from emulator.experiments.cells_summary import lost_counts, render_summary, summarise_cells
from emulator.experiments.compare import WHERE_CELLS_ARE, compare_rows
from emulator.experiments.kept_cells import (
    finished_results,
    finished_rounds,
    finished_seeds,
    kept_plan,
    other_rounds,
    rough_time,
    rounds_under_way,
)
from emulator.experiments.matrix import render_matrix
from emulator.experiments.plan import ExperimentPlan, TableCell, row_label
from emulator.experiments.progress import ProgressReporter, Report, format_duration
from emulator.experiments.table import lost_rows, render_table, replace_section
from export.output_paths import PICTURES, check_output_file, check_output_folder


def say_nothing(_: str) -> None:
    """The report of a caller that wants the result only."""


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
    def table(self) -> str:
        """What the table is called; `name` may be the path of the user's file."""
        return plans.table_name(self.name)

    @property
    def place(self) -> CellStorage:
        return CellStorage(data=self.data, out=self.out / self.table, workers=self.workers)

    def check_outputs(self) -> None:
        """Raise UsageError, before anything is run, for a place that cannot be written."""
        if self.picture is not None:
            check_output_file(self.picture, endings=PICTURES)
        if self.write is not None:
            check_output_file(self.write)
        if not self.kept:
            check_output_folder(self.place.out)

    def plan_of_kept(self, say: Report) -> ExperimentPlan:
        """The plan for commands that run nothing: without `rounds`, with the rounds of the finished cells."""
        return kept_plan(self.name, self.rounds, self.only, self.place, say)

    def seeds_of(self, plan: ExperimentPlan, cells: Sequence[TableCell]) -> int:
        """How many seeds: the asked ones, else the plan's, where nothing is run all that these cells have finished."""
        return self.seeds or max(plan.seeds, finished_seeds(cells, self.place) if self.kept else 0)


def run_experiment(prepared: ExperimentArgs, say: Report) -> dict[str, Any]:
    """Run it; -> what is finished, what could not be run and why, and the table in Markdown.

    Raises UsageError, before anything is run, for an unknown experiment or cell, or a picture of another format; after
    it where a figure of the file to write would be lost. Raises ConfigError if no cell could be run.
    """
    prepared.check_outputs()
    plan = prepared.plan_of_kept(say) if prepared.kept else plans.read_plan(prepared.name, rounds=prepared.rounds)
    chosen, place = plan.only(prepared.only), prepared.place
    seeds = prepared.seeds_of(plan, chosen)
    todo = cell_runs(chosen, seeds)
    missing = [job for job in todo if read_finished(job, place) is None]
    if not prepared.kept:
        say(render_outlook(outlook_of(prepared, plan, todo, missing)))
    asked = (*plan.metrics, *plan.also)
    reasons: dict[str, str] = {}
    try:
        if not prepared.kept:
            with ProgressReporter(missing, say) as told:
                reasons = run_cells(todo, place, asked, told, told.begin)
    except (KeyboardInterrupt, OSError, MemoryError) as ended:  # a full disk
        how = "interrupted" if isinstance(ended, KeyboardInterrupt) else "ended by an error"
        say(f"{how}; {told_where_to_go_on(prepared, todo)}")
        raise
    results = finished_results(place, seeds)
    render = render_matrix if plan.judged else render_table
    command = command_of(prepared, plan, seeds)
    section = render(plan, results, command=command, reasons=reasons, only=chosen)
    done = sum(read_finished(job, place) is not None for job in todo)
    if reasons and not done:
        raise ConfigError(f"no cell of {prepared.table} could be run", hint="; ".join(sorted(set(reasons.values()))))
    if prepared.write is not None:
        most = prepared.seeds_of(plan, plan.cells)
        every = command_of(replace(prepared, only=()), plan, most)  # the file keeps its other rows
        whole = render(plan, finished_results(place, most), command=every, reasons=reasons)
        replace_section(prepared.write, prepared.table, whole, lost=lost_rows)
    if prepared.picture is not None:
        from emulator.experiments.curves import draw_table_curves

        if not draw_table_curves(replace(plan, cells=chosen), results, prepared.picture):
            say(f"{prepared.picture} is left out: no finished cell has an accuracy")
    return {"experiment": prepared.table, "finished": done, "of": len(todo), "reasons": reasons, "table": section}


def dry_run_experiment(prepared: ExperimentArgs) -> dict[str, Any]:
    """What `run_experiment` would run, as JSON types and as `text`. Runs nothing. Raises UsageError."""
    plan = plans.read_plan(prepared.name, rounds=prepared.rounds)
    todo = cell_runs(plan.only(prepared.only), prepared.seeds or plan.seeds)
    missing = [job for job in todo if read_finished(job, prepared.place) is None]
    found = outlook_of(prepared, plan, todo, missing)
    return {**found, "text": render_outlook(found)}


def outlook_of(
    prepared: ExperimentArgs, plan: ExperimentPlan, todo: Sequence[CellRun], missing: Sequence[CellRun]
) -> dict[str, Any]:
    """What is run: `seconds` of what is missing by finished cells, None where there are none.

    `guessed`: the rows of which no cell is finished, whose seconds are those of other rows.
    """
    here = finished_rounds(prepared.name, prepared.only, prepared.place)
    time = rough_time(missing, prepared.place)
    return {
        "experiment": plan.name,
        "rounds": plan.rounds,
        "runs": len(todo),
        "finished": len(todo) - len(missing),
        "rows": list(dict.fromkeys(row_label(job.cell) for job in todo)),
        "columns": list(dict.fromkeys(job.cell.column.name for job in todo)),
        "seconds": None if time is None else time.seconds,
        "guessed": [] if time is None else list(time.guessed),
        "others": other_rounds(here, plan.rounds),
    }


def render_outlook(found: Mapping[str, Any]) -> str:
    """Lines: how many runs, which rows and columns, and roughly how long."""
    seconds, left = found["seconds"], found["runs"] - found["finished"]
    lines = [
        f"{found['experiment']}: {found['runs']} runs of {found['rounds']} rounds, {found['finished']} finished before",
        f"rows: {'; '.join(found['rows'])}",
        f"columns: {'; '.join(found['columns'])}",
    ]
    if left:
        known = None if seconds is None else f"roughly {format_duration(seconds)} by the finished cells here"
        lines.append(f"time of {left} runs: {known or 'not known before a cell is finished'}")
    if guessed := found["guessed"]:
        lines.append(
            f"no cell of {'; '.join(guessed)} is finished: the time of other rows stands for theirs, and a method that"
            " trains several models on a device takes several times as long"
        )
    return "\n".join([*lines, *([found["others"]] if found["others"] else [])])


def compare_experiment(prepared: ExperimentArgs, asked: Sequence[str], say: Report = say_nothing) -> dict[str, Any]:
    """Paired differences between finished rows, as `compare_rows` says. Runs nothing. Raises UsageError."""
    plan, place = prepared.plan_of_kept(say), prepared.place
    results = finished_results(place, prepared.seeds)
    here = other_rounds(finished_rounds(prepared.name, prepared.only, place), plan.rounds)
    metrics, hint = (*plan.metrics, *plan.also), here or WHERE_CELLS_ARE
    found = compare_rows(plan.only(prepared.only), results, metrics, asked, hint=hint)
    return {"experiment": plan.name, "rounds": plan.rounds, "comparisons": [one.to_json() for one in found]}


def summarise_experiment(prepared: ExperimentArgs, say: Report = say_nothing) -> dict[str, Any]:
    """Which cells are finished, as JSON types and as `table` in Markdown; written where `write` says. Runs nothing.

    Raises UsageError where the file to write tells of finished cells, and here are none.
    """
    if prepared.write is not None:
        check_output_file(prepared.write)
    plan = prepared.plan_of_kept(say)
    place = prepared.place
    results, begun = finished_results(place, prepared.seeds), rounds_under_way(place)
    found = summarise_cells(plan, plan.only(prepared.only), results, begun)
    section = render_summary(found)
    if prepared.write is not None:
        replace_section(prepared.write, prepared.table, section, lost=lost_counts)
    return {**found, "table": section}


def told_where_to_go_on(prepared: ExperimentArgs, todo: Sequence[CellRun]) -> str:
    """What a table keeps that ended early, what is left of it, and the command that goes on."""
    place = prepared.place
    left = [job for job in todo if read_finished(job, place) is None]
    begun = [f"round {number} of {job.cell.rounds} of {job.name}" for job in left if (number := kept_round(job, place))]
    return (
        f"{place.out} keeps {len(todo) - len(left)} of {len(todo)} runs"
        + (
            "".join(f", and {one}" for one in begun)
            or f"; of a run under way, every {CHECKPOINT_EVERY}th round is kept"
        )
        + f". Left: {len(left)}. Go on with: {shlex.join(command_line(prepared))}"
    )


def command_line(prepared: ExperimentArgs) -> list[str]:
    """The words of the command with these options, without those at their default."""
    words = ["fedcenters-emulator", "experiment", prepared.name]
    for option in ("data", "seeds", "rounds", "out", "workers", "write", "picture"):
        value = getattr(prepared, option)
        if value != getattr(ExperimentArgs, option):
            words += [f"--{option}", str(value)]
    for one in prepared.only:
        words += ["--only", one]
    return words


def command_of(prepared: ExperimentArgs, plan: ExperimentPlan, seeds: int) -> str:
    """The command that reproduces the table, without paths of this machine."""
    only = "".join(f" --only {shlex.quote(one)}" for one in prepared.only)
    data = " --data DIR" if any(find_data_set(cell.column.data_set).files for cell in plan.only(prepared.only)) else ""
    name = shlex.quote(Path(prepared.name).name)
    return f"fedcenters-emulator experiment {name}{data} --rounds {plan.rounds} --seeds {seeds}{only}"
