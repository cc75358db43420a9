"""The finished cells of a plan as Markdown: the paper's figure, ours with its deviation, a verdict.

A plan without any figure of a paper shows ours alone.

Ours is the mean over seeds and rounds pooled, ± their standard deviation. The verdict is the difference, ours less the
paper's; "agrees" before it means within two standard deviations of both or within the measure's slack, whichever is
wider. The difference is always printed, since a wide deviation agrees with many figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.rounds.metrics import mean_and_deviation
from emulator.experiments.measures import MEASURES, Measure
from emulator.experiments.plan import ExperimentPlan, PaperFigure, TableCell

Results = Callable[[TableCell], Sequence[Mapping[str, Any]]]  # a cell's finished seeds
NOT_RUN = "not run"


def render_table(
    plan: ExperimentPlan, results: Results, *, command: str, reasons: Mapping[str, str] | None = None
) -> str:
    """The whole section under its heading, without one. `reasons` says why a column or a method could not be run."""
    known = any(cell.paper for cell in plan.cells)
    titles = [MEASURES[name].title for name in plan.metrics]
    shown = [f"{t}: {what}" for t in titles for what in ("paper", "ours", "verdict")] if known else titles
    head = ["data", "K", "method", *shown, "seeds"]
    lines = [f"{plan.title}. {plan.source}.", "", f"`{command}`", ""]
    lines += [_line(head), _line(["---"] * len(head))]
    notes: set[str] = set()
    for cell in plan.cells:
        found = list(results(cell))
        notes |= {f"{cell.column.name}: {one['note']}" for one in found if one["note"]}
        parts = [_three(cell, name, found) for name in plan.metrics]
        figures = [part for three in parts for part in (three if known else three[1:2])]
        lines.append(_line([cell.column.name, str(cell.row.k), cell.row.name, *figures, str(len(found) or "-")]))
    said = [*plan.notes, *sorted(notes), *(f"{what} was not run: {why}" for what, why in (reasons or {}).items())]
    lines += ["", *(f"* {note}." for note in said)] if said else []
    return "\n".join(lines)


def verdict(measure: Measure, paper: PaperFigure | None, ours: tuple[float, float]) -> str:
    """By how much ours is higher or lower, as "+2.5", or as "agrees (-0.4)"; "" without a figure of the paper's."""
    if paper is None:
        return ""
    mean, deviation = ours
    spread = 2 * ((paper.deviation or 0.0) ** 2 + deviation**2) ** 0.5
    difference = mean - paper.mean
    said = f"{difference:+.1f}" if round(difference, 1) else "0.0"
    agrees = abs(difference) <= max(spread, measure.slack, measure.relative_slack * abs(paper.mean))
    return f"agrees ({said})" if agrees else said


def replace_section(path: Path, name: str, section: str) -> None:
    """Replace what stands between the markers of `name` in a Markdown file; without markers it is added at the end."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    block = f"{begin}\n{section}\n{end}"
    before, found, rest = text.partition(begin)
    if found and end in rest:
        text = before + block + rest.partition(end)[2]
    else:
        text = f"{text.rstrip()}\n\n## {name}\n\n{block}\n".lstrip()
    path.write_text(text, encoding="utf-8")


def _three(cell: TableCell, name: str, found: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    paper = cell.paper.get(name)
    printed = (
        "" if paper is None else f"{paper.mean:g}" + ("" if paper.deviation is None else f" ± {paper.deviation:g}")
    )
    values = [value for one in found for value in one["values"].get(name, ())]
    if not values:
        return printed, NOT_RUN, ""
    ours = mean_and_deviation(values)
    return printed, f"{ours[0]:.2f} ± {ours[1]:.2f}", verdict(MEASURES[name], paper, ours)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
