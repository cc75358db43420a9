"""`fedcenters-emulator experiment`: a paper's table. Parses, calls, prints; command.py does the work."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated

import typer

from edge_client.errors import UsageError
from emulator.command_options import run_option
from emulator.console import ConsoleProgress
from emulator.stop_signals import DeferredSignals
from export.command_line import handle_errors


@handle_errors
def experiment(  # noqa: PLR0913 - a command line
    name: Annotated[str, typer.Argument(help="A paper's table, as wecfl-table2, or a file, as mine.toml.")],
    *,
    data: Annotated[Path | None, run_option("data")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs of each cell. Default: the experiment's; where nothing is run, all that are finished."
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rounds of each run. Default: the experiment's; where nothing is run, the finished cells'.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Methods (fedavg: all its rows), names of rows (FedAvg: that row), columns, numbers of centers (K=10);"
            " else all. With commas, or repeated."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Finished cells are kept here, and not run again.")] = Path(
        "runs/experiments"
    ),
    workers: Annotated[int, run_option("workers")] = 1,
    write: Annotated[Path | None, typer.Option(help="A Markdown file in which to put the table.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw accuracy by round, as .pdf, .png or .svg.")] = None,
    kept: Annotated[bool, typer.Option("--kept", help="Run nothing: the table of the finished cells.")] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROWS",
            help="Run nothing: paired differences of finished rows, as wecfl,fesem; or of all to: best. Repeatable.",
        ),
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Run nothing: which cells are finished.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run nothing: how many runs, of which rows, and roughly how long.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Run a paper's table and print it beside the paper's.

    Goes cell by cell, and on where it was stopped. `fedcenters-emulator list` has the names of the tables. Devices
    train with the engine that is the fastest here.

    example: fedcenters-emulator experiment fedsoft-table1 --rounds 10 --seeds 1 --only FedSoft,FedEM
    """
    if picture is not None and (compare or summary or dry_run):
        raise UsageError("--compare, --summary and --dry-run draw no picture", hint="--kept draws the finished cells")
    progress = ConsoleProgress()
    progress.say(f"reading {name}")
    from emulator.experiments import command
    from emulator.reports.console_tables import differences_table

    prepared = command.ExperimentArgs(
        name=name,
        data=data,
        seeds=seeds,
        rounds=rounds,
        only=only or (),
        out=out,
        workers=workers,
        write=write,
        picture=picture,
        kept=kept,
    )
    if compare:
        found = command.compare_experiment(prepared, compare, progress.say)
        print(json.dumps(found)) if as_json else differences_table(found)
        return
    if summary:
        found = command.summarise_experiment(prepared, progress.say)
        print(json.dumps(found) if as_json else found["table"])
        return
    if dry_run:
        found = command.dry_run_experiment(prepared)
        print(json.dumps(found) if as_json else found["text"])
        return
    with DeferredSignals([signal.SIGTERM]):  # as of a scheduler
        found = command.run_experiment(prepared, progress.say)
    for what, why in found["reasons"].items():
        progress.say(f"{what} was not run: {why}")
    print(json.dumps(found) if as_json else found["table"])
