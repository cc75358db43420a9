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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.errors import UsageError
from emulator.experiments.measures import MEASURES, Measure
from emulator.experiments.plan import ExperimentPlan, PaperFigure, TableCell

Results = Callable[[TableCell], Sequence[Mapping[str, Any]]]  # a cell's finished seeds
Lost = Callable[[str, str], Sequence[str]]  # of a section's old and new text: what the new one lacks
NOT_RUN = "not run"
ROW_CELLS = ["data", "K", "method"]  # what names a row
CONFIDENCE = 0.95
SPREAD = (
    "Our ± behind a figure is the standard deviation between seeds (n - 1), behind a difference half of Student's 95 %"
    " interval"
)


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
    printed = {name for name in plan.metrics if any(name in cell.paper for cell in plan.cells)}
    compared = any(cell.row.against for cell in cells)
    run = [(cell, found) for cell in cells if (found := list(results(cell)))]
    also = [name for name in plan.also if any(seed_figures(found, name) for _, found in run)]
    titles = {name: MEASURES[name].title for name in plan.metrics}
    shown = [
        f"{title}: {what}" if what else title
        for name, title in titles.items()
        for what in (("paper", "ours", "verdict") if name in printed else ("",))
    ]
    shown += [MEASURES[name].title for name in also]
    pairs = [f"{titles[plan.metrics[0]]} against another row, paired"] if compared else []
    head = [*ROW_CELLS, *shown, *pairs, "seeds"]
    lines = [f"{plan.title}. {plan.source}.", "", f"`{command}`", ""]
    lines += [table_line(head), table_line(["---"] * len(head))]
    notes: set[str] = set()
    for cell, found in run:
        notes |= {f"{cell.column.name}: {one['note']}" for one in found if one["note"]}
        parts = [(name, _three(cell, name, found)) for name in plan.metrics]
        figures = [part for name, three in parts for part in (three if name in printed else three[1:2])]
        figures += [_beside(cell, name, plan.also[name], found) for name in also]
        figures += [_against(plan, cell, found, results)] if compared else []
        k = str(cell.settings.get("clusters", cell.row.k))
        lines.append(table_line([cell.column.name, k, cell.row.name, *figures, str(len(found))]))
    said = [*plan.notes, *sorted(notes), *(f"{what} was not run: {why}" for what, why in (reasons or {}).items())]
    if absent := len(cells) - len(run):
        said.append(f"{absent} of {len(cells)} cells were not run; `--summary` names them")
    said += told_figures(plan.metrics, several=any(len(found) > 1 for _, found in run))
    lines += ["", *(f"* {note}." for note in said)]
    return "\n".join(lines)


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


def seed_figures(found: Sequence[Mapping[str, Any]], name: str) -> dict[int, float]:
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
    path.write_text(text, encoding="utf-8")


def _three(cell: TableCell, name: str, found: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    paper = cell.paper.get(name)
    printed = (
        "" if paper is None else f"{paper.mean:g}" + ("" if paper.deviation is None else f" ± {paper.deviation:g}")
    )
    values = list(seed_figures(found, name).values())
    if not values:
        return printed, NOT_RUN, ""
    mean, deviation = mean_and_deviation(values)
    return printed, f"{mean:.2f}{plus_minus(deviation)}", verdict(MEASURES[name], paper, mean)


def _beside(cell: TableCell, name: str, metric: str, found: Sequence[Mapping[str, Any]]) -> str:
    """Our figure and its verdict in one; the seeds are named where some have no such figure."""
    values = list(seed_figures(found, name).values())
    if not values:
        return ""
    mean, deviation = mean_and_deviation(values)
    said = verdict(MEASURES[name], cell.paper.get(metric), mean)
    n = "" if len(values) == len(found) else f"n = {len(values)}"
    return "; ".join(part for part in (f"{mean:.2f}{plus_minus(deviation)}", said, n) if part)


def _against(plan: ExperimentPlan, cell: TableCell, found: Sequence[Mapping[str, Any]], results: Results) -> str:
    """The difference to the row that this one is read against, which has as many centers as this one, or the most."""
    others = [one for one in plan.cells if (one.row.name, one.column) == (cell.row.against, cell.column)]
    others.sort(key=lambda one: (one.row.k != cell.row.k, -one.row.k))
    if not others:
        return ""
    mean, half, n = paired_difference(
        seed_figures(found, plan.metrics[0]), seed_figures(results(others[0]), plan.metrics[0])
    )
    other = f"{cell.row.against}{'' if others[0].row.k == cell.row.k else f' (K = {others[0].row.k})'}"
    return f"{mean:+.2f}{plus_minus(half)} to {other}, n = {n}" if n else ""


def plus_minus(deviation: float | None) -> str:
    """Behind a figure: " ± 0.50", or "" for None."""
    return "" if deviation is None else f" ± {deviation:.2f}"


def table_line(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"
