"""Draw the cells of a table as curves: accuracy by round, one panel per column, one line per row.

A line is the mean over the seeds that all finished cells of its column have: draws differ more than methods do. A row
keeps its look in every panel. Panels begin a little below their lowest end, since tables are about where lines end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context

from emulator.experiments.plan import ExperimentPlan, TableCell
from emulator.experiments.table import Results
from emulator.reports import plots

Curves = dict[str, Sequence[float | None]]
WIDTH, HEIGHT = 6.5, 5.8  # inches, of one panel and its legend


def draw_table_curves(plan: ExperimentPlan, results: Results, out: Path) -> bool:
    """Draw what is finished; -> whether there was anything. The ending of `out` (.png, .svg) is the format."""
    panels = {name: curves for name, curves in by_column(plan, results).items() if curves}
    if not panels:
        return False
    drawn = {name for curves in panels.values() for name in curves}
    looks = [name for name in dict.fromkeys(map(row_label, plan.cells)) if name in drawn]
    drawings = [partial(_panel, curves=curves, title=title, looks=looks) for title, curves in panels.items()]
    figure = plots.make_figure(WIDTH * len(drawings), HEIGHT, *drawings)
    with rc_context(plots.STYLE):
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    return True


def by_column(plan: ExperimentPlan, results: Results) -> dict[str, Curves]:
    """-> for each column, with its number of seeds, each of its rows' accuracy (0..1) by round."""
    panels: dict[str, Curves] = {}
    for column in dict.fromkeys(cell.column.name for cell in plan.cells):
        found = {row_label(cell): told for cell in plan.cells if cell.column.name == column and (told := results(cell))}
        if not found:
            continue
        common = set.intersection(*({one["seed"] for one in told} for told in found.values()))
        title = f"{column}, {len(common)} seed{'s' * (len(common) > 1)}"
        lines = {
            name: mean_curve([one["curves"]["accuracy"] for one in told if one["seed"] in common])
            for name, told in found.items()
        }
        panels[title] = {name: line for name, line in lines.items() if line}
    return panels


def mean_curve(seeds: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Of runs of equal length, round by round; None where one of them has none, nothing where no round has any."""
    known = [None if None in told else float(np.mean(told)) for told in zip(*seeds, strict=True)]
    return known if any(value is not None for value in known) else []


def row_label(cell: TableCell) -> str:
    """A row's name with its number of centers."""
    return cell.row.name if cell.row.k == 1 else f"{cell.row.name}, K = {cell.row.k}"


def _panel(axes: Any, *, curves: Mapping[str, Any], title: str, looks: Sequence[str]) -> None:  # noqa: ANN401 - matplotlib's
    plots.draw_curves(axes, curves, title=title, looks=looks)
    ends = [values[-1] for values in curves.values() if values[-1] is not None]
    axes.set_ylim(bottom=max(0.0, math.floor(10 * min(ends, default=0.0) - 1) / 10), top=None)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.14), ncols=2, fontsize=8.5)  # beside lines, never above them
