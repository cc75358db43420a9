"""The finished cells of a plan as Markdown: the paper's figure, ours, a verdict, and a comparison between our rows.

Rows that were not run are counted below the table, not shown (cells_summary.py lists them). A measure of which the
paper prints no figure shows ours alone. A measure that only some cells have (`also` of the plan) has one column, with
its verdict against the same printed figure. A seed's figure is the mean over its last rounds. Ours is the mean over
seeds ± their standard deviation (n - 1 in the denominator); one seed has no ±.

The verdict is the difference, ours less the paper's. "agrees" before it: the difference is at most two of the paper's
deviations and at most twice the measure's slack, or at most its slack. Our own deviation plays no part: a wide one
agrees with anything. Rows that name another row `against` which they are read have their difference to it, paired by
seed, with Student's 95 % interval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edge_client.errors import UsageError
from emulator.experiments.measures import MEASURES, Measure
from emulator.experiments.plan import ExperimentPlan, PaperFigure, TableCell
from emulator.reports.display_names import signed
from emulator.reports.output_files import write_output

Seeds = Sequence[Mapping[str, Any]]  # the finished seeds of a cell
Results = Callable[[TableCell], Seeds]
Lost = Callable[[str, str], Sequence[str]]  # of a section's old and new text: what the new one lacks
NOT_RUN = "not run"
CONFIDENCE = 0.95
SPREAD = (
    "Our ± behind a figure is the standard deviation between seeds (n - 1), behind a difference half of Student's 95 %"
    " interval"
)


class _Column(NamedTuple):
    """One column: its heading, and what it says of a cell and its finished seeds."""

    head: str
    says: Callable[[TableCell, Seeds], str]


NAMES_OF_ROW = (
    _Column("data", lambda cell, _: cell.column.name),
    _Column("K", lambda cell, _: str(cell.centers)),
    _Column("method", lambda cell, _: cell.row.name),
)
ROW_CELLS = [column.head for column in NAMES_OF_ROW]


def render_table(
    plan: ExperimentPlan,
    results: Results,
    *,
    command: str,
    reasons: Mapping[str, str] | None = None,
    only: Sequence[TableCell] = (),
) -> str:
    """The whole section under its heading, without one; with `only`, of these cells.

    `reasons` says why a column or a method could not be run.
    """
    cells = only or plan.cells
    run = [(cell, found) for cell in cells if (found := list(results(cell)))]
    columns = [
        *NAMES_OF_ROW,
        *(column for name in plan.metrics for column in _of_metric(plan, name)),
        *(_beside(plan, name) for name in plan.also if any(seed_figures(found, name) for _, found in run)),
        *([_against(plan, results)] if any(cell.row.against for cell in cells) else ()),
        _Column("seeds", lambda _, found: str(len(found))),
    ]
    rows = [[column.says(cell, found) for column in columns] for cell, found in run]
    notes = sorted({f"{cell.column.name}: {one['note']}" for cell, found in run for one in found if one["note"]})
    absent = len(cells) - len(run)
    unnamed = [f"{absent} of {len(cells)} cells were not run; `--summary` names them"] if absent else []
    told = told_figures(plan.metrics, several=any(len(found) > 1 for _, found in run))
    return section(plan, command, [c.head for c in columns], rows, [*notes, *told_reasons(reasons), *unnamed, *told])


def section(
    plan: ExperimentPlan, command: str, head: Sequence[str], rows: Iterable[Sequence[str]], said: Iterable[str]
) -> str:
    """The plan's title, the command, a table, and the notes: the plan's and what else is `said`."""
    lines = [f"{plan.title}. {plan.source}.", "", f"`{command}`", ""]
    lines += [table_line(row) for row in (head, ["---"] * len(head), *rows)]
    lines += ["", *(f"* {note}." for note in (*plan.notes, *said))]
    return "\n".join(lines)


def told_reasons(reasons: Mapping[str, str] | None) -> list[str]:
    """Why columns or methods could not be run, a note each."""
    return [f"{what} was not run: {why}" for what, why in (reasons or {}).items()]


def told_figures(metrics: Sequence[str], *, several: bool) -> list[str]:
    """The notes on what a figure is: of which rounds, and with `several` seeds what its ± is."""
    rounds = "A seed's figures are those after its last round"
    if any(MEASURES[name].of_last_rounds for name in metrics):
        rounds = "A seed's accuracy and F1 are means of its last three rounds; a progress line has the last round alone"
    return [rounds, SPREAD] if several else [rounds]


def verdict(measure: Measure, paper: PaperFigure | None, ours: float) -> str:
    """By how much ours is higher or lower, as "+2.5", or as "agrees (-0.4)"; "" without a figure of the paper's."""
    if paper is None:
        return ""
    difference, slack = ours - paper.mean, max(measure.slack, measure.relative_slack * abs(paper.mean))
    said = f"{difference:+.1f}" if round(difference, 1) else "0.0"
    range_ = 2 * (paper.deviation or 0.0)
    if abs(difference) <= max(slack, min(range_, 2 * slack)):
        return f"agrees ({said})"
    return f"{said}, within 2 sd" if abs(difference) <= range_ else said


def seed_figures(found: Seeds, name: str) -> dict[int, float]:
    """Seed -> the mean of a measure's values in that seed."""
    return {int(one["seed"]): float(np.mean(values)) for one in found if (values := one["values"].get(name))}


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean over seeds, and the standard deviation between them (n - 1); None for one seed."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def paired_difference(ours: Mapping[int, float], other: Mapping[int, float]) -> tuple[float, float | None, int]:
    """The mean of ours less the other over common seeds, half of Student's 95 % interval, and the number of seeds.

    The interval is None for one seed; the mean is NaN without any.
    """
    from scipy import stats

    differences = [ours[seed] - other[seed] for seed in sorted(ours.keys() & other.keys())]
    n = len(differences)
    if n < 2:  # noqa: PLR2004 - a spread needs two
        return float(np.mean(differences)) if n else float("nan"), None, n
    half = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * np.std(differences, ddof=1) / n**0.5
    return float(np.mean(differences)), float(half), n


def lost_rows(old: str, new: str) -> list[str]:
    """The rows of a table that have fewer figures or seeds in its `new` text than in the `old`, by their first cells.

    These are data, K and method; in a table with a column for each method (matrix.py) the data alone. A row of no seed,
    which tables had before, has none. The last cell is the number of seeds, as "5", or of the methods' as "3 to 5".
    """

    def figures(text: str) -> dict[str, tuple[int, int]]:
        lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
        told = len(ROW_CELLS) if lines and lines[0][: len(ROW_CELLS)] == ROW_CELLS else 1
        rows = {", ".join(cells[:told]): [cell.strip() for cell in cells] for cells in lines[2:]}
        return {
            row: (
                sum(cell not in ("", NOT_RUN) for cell in cells),
                max(map(int, re.findall(r"\d+", cells[-1])), default=0),
            )
            for row, cells in rows.items()
            if cells[-1] != "-"
        }

    now = figures(new)
    return [
        row
        for row, held in figures(old).items()
        if any(mine < its for mine, its in zip(now.get(row, (0, 0)), held, strict=True))
    ]


def replace_section(path: Path, name: str, section: str, *, lost: Lost | None = None) -> None:
    """Replace what stands between the markers of `name` in a Markdown file; without markers it is added at the end.

    Raises UsageError, and leaves the file, where `lost` names something of the old text that the new one lacks.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    block = f"{begin}\n{section}\n{end}"
    before, found, rest = text.partition(begin)
    if found and end in rest:
        if lost and (gone := lost(rest.partition(end)[0], section)):
            raise UsageError(
                f"{path} has figures that were not run here ({'; '.join(gone[:3])}); it stays as it is",
                hint="give the folder of its finished cells as --out, their numbers of rounds and seeds as --rounds and"
                " --seeds, another file as --write, or delete the section",
            )
        text = before + block + rest.partition(end)[2]
    else:
        text = f"{text.rstrip()}\n\n## {name}\n\n{block}\n".lstrip()
    write_output(path, text.encode())


def _of_metric(plan: ExperimentPlan, name: str) -> list[_Column]:
    """The paper's figure, ours and the verdict; ours alone where the paper prints none in the whole table."""
    measure = MEASURES[name]

    def printed(cell: TableCell, _: Seeds) -> str:
        paper = cell.paper.get(name)
        if paper is None:
            return ""
        return f"{paper.mean:g}" + ("" if paper.deviation is None else f" ± {paper.deviation:g}")

    def ours(_: TableCell, found: Seeds) -> str:
        values = list(seed_figures(found, name).values())
        return _figure(values) if values else NOT_RUN

    def judged(cell: TableCell, found: Seeds) -> str:
        values = list(seed_figures(found, name).values())
        return verdict(measure, cell.paper.get(name), mean_and_deviation(values)[0]) if values else ""

    if not any(name in cell.paper for cell in plan.cells):
        return [_Column(measure.title, ours)]
    columns = (("paper", printed), ("ours", ours), ("verdict", judged))
    return [_Column(f"{measure.title}: {what}", says) for what, says in columns]


def _beside(plan: ExperimentPlan, name: str) -> _Column:
    """Our figure and its verdict in one; the seeds are named where some have no such figure."""
    measure = MEASURES[name]

    def says(cell: TableCell, found: Seeds) -> str:
        values = list(seed_figures(found, name).values())
        if not values:
            return ""
        judged = verdict(measure, cell.paper.get(plan.also[name]), mean_and_deviation(values)[0])
        n = "" if len(values) == len(found) else f"n = {len(values)}"
        return "; ".join(part for part in (_figure(values), judged, n) if part)

    return _Column(measure.title, says)


def _against(plan: ExperimentPlan, results: Results) -> _Column:
    """The difference to the row that this one is read against, which has as many centers as this one, or the most."""
    name = plan.metrics[0]

    def says(cell: TableCell, found: Seeds) -> str:
        others = [one for one in plan.cells if (one.row.name, one.column) == (cell.row.against, cell.column)]
        if not others:
            return ""
        other = min(others, key=lambda one: (one.row.k != cell.row.k, -one.row.k))
        mean, half, n = paired_difference(seed_figures(found, name), seed_figures(results(other), name))
        called = f"{cell.row.against}{'' if other.row.k == cell.row.k else f' (K = {other.row.k})'}"
        return f"{signed(mean)}{plus_minus(half)} to {called}, n = {n}" if n else ""

    return _Column(f"{MEASURES[name].title} against another row, paired", says)


def _figure(values: Sequence[float]) -> str:
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.2f}{plus_minus(deviation)}"


def plus_minus(deviation: float | None) -> str:
    """Behind a figure: " ± 0.50", or "" for None."""
    return "" if deviation is None else f" ± {deviation:.2f}"


def table_line(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"
