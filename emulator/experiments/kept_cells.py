"""What a folder of finished cells holds: each cell's seeds, and with how many rounds they were run. Runs nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from emulator.experiments.cells import CellRun, CellStorage, kept_round, read_finished
from emulator.experiments.plan import ExperimentPlan, TableCell, read_plan, row_label
from emulator.experiments.table import Results

NAME_OF_CELL = re.compile(r"-r(\d+)-s(\d+)-[0-9a-f]+$")  # `TableCell.key`
CellsByRounds = Mapping[int, int]  # number of rounds -> how many cells of the table have a finished seed with it


def finished_results(place: CellStorage, seeds: int | None) -> Results:
    """A cell's finished seeds: those below `seeds`, or every seed of which the folder has a file."""
    most = 1 + max((seed for _, seed in _names(place)), default=-1) if seeds is None else seeds

    def results(cell: TableCell) -> list[Mapping[str, Any]]:
        held = [read_finished(CellRun(cell=cell, seed=seed), place) for seed in range(most)]
        return [one for one in held if one is not None]

    return results


def finished_seeds(cells: Iterable[TableCell], place: CellStorage) -> int:
    """One more than the greatest seed that one of these cells has finished; 0 for none."""
    results = finished_results(place, None)
    return 1 + max((int(one["seed"]) for cell in cells for one in results(cell)), default=-1)


def rounds_under_way(place: CellStorage) -> Callable[[TableCell], Mapping[int, int]]:
    """Of a cell's seeds that are not finished, the round that a checkpoint keeps, where one does."""
    seeds = sorted({seed for _, seed in _names(place, ".started")})

    def begun(cell: TableCell) -> dict[int, int]:
        jobs = [CellRun(cell=cell, seed=seed) for seed in seeds]
        return {job.seed: number for job in jobs if (number := kept_round(job, place))}

    return begun


def finished_rounds(name: str, only: Sequence[str], place: CellStorage) -> CellsByRounds:
    """How many of the chosen cells are finished, by their number of rounds. Raises UsageError as `read_plan`."""
    results = finished_results(place, None)
    counts = {
        rounds: sum(bool(results(cell)) for cell in read_plan(name, rounds=rounds).only(only))
        for rounds in sorted({rounds for rounds, _ in _names(place)})
    }
    return {rounds: count for rounds, count in counts.items() if count}


@dataclass(frozen=True, kw_only=True)
class RoughTime:
    """How long runs may take. `guessed` are the rows of which no cell is finished: theirs is the time of other rows."""

    seconds: float
    guessed: tuple[str, ...] = ()


def rough_time(missing: Sequence[CellRun], place: CellStorage) -> RoughTime | None:
    """How long runs take by the finished cells here, per round: of the same cell, else row, else column, else any.

    None where no cell is finished. The finished ones may have been run on another machine.
    """
    told = [one for path in place.out.glob("*.json") if (one := _seconds_of(path)) is not None]
    if not told:
        return None
    total, guessed = 0.0, dict[str, None]()
    for job in missing:
        row, column = job.cell.row.name, job.cell.column.name
        own = [[s for r, c, s in told if r == row and c == column], [s for r, _, s in told if r == row]]
        others = [[s for _, c, s in told if c == column], [s for _, _, s in told]]
        if not any(own):
            guessed[row_label(job.cell)] = None
        total += job.cell.rounds * median(next(some for some in [*own, *others] if some))
    return RoughTime(seconds=total, guessed=tuple(guessed))


def _seconds_of(path: Path) -> tuple[str, str, float] | None:
    """Row, column and seconds of a round of a finished cell; None for another file."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return told["row"], told["column"], told["seconds"] / told["rounds"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def kept_plan(
    name: str, rounds: int | None, only: Sequence[str], place: CellStorage, say: Callable[[str], None]
) -> ExperimentPlan:
    """The plan with `rounds`; without it with those of most finished cells, else of cells under way, else its own.

    `say` is told of the cells with other numbers of rounds.
    """
    found = finished_rounds(name, only, place)
    if rounds is None:
        begun = dict.fromkeys((number for number, _ in _names(place, ".started")), 0)
        rounds = max(found or begun, key=lambda number: (found.get(number, 0), number), default=None)
    plan = read_plan(name, rounds=rounds)
    if others := other_rounds(found, plan.rounds):
        taken = f"the cells with {plan.rounds} rounds are taken" if plan.rounds in found else _none(plan.rounds)
        say(f"{taken}; {others}")
    return plan


def other_rounds(found: CellsByRounds, rounds: int) -> str:
    """Which cells with other numbers of rounds are there, and the option that takes them; "" for none."""
    told = [f"{count} cells with {number} rounds" for number, count in found.items() if number != rounds]
    return f"{' and '.join(told)} are here: --rounds takes them" if told else ""


def _none(rounds: int) -> str:
    return f"no cell with {rounds} rounds is finished"


def _names(place: CellStorage, ending: str = ".json") -> list[tuple[int, int]]:
    """(rounds, seed) of everything that is named as a finished cell, or with ".started" as one under way."""
    named = (NAME_OF_CELL.search(path.stem) for path in place.out.glob(f"*{ending}"))
    return [(int(found[1]), int(found[2])) for found in named if found]
