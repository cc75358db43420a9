"""Draw the cells of a table as curves: accuracy by round, one panel per column, one line per row.

A line is the mean over the seeds that all finished cells of its column have: draws differ more than methods do. Beside
its end are the figures of these seeds, a dot each. A row keeps its look in every panel. Panels begin a little below
their lowest dot, since tables are about where lines end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context

from coordinator.rounds.metrics import LAST_ROUNDS
from emulator.experiments.plan import ExperimentPlan, row_label
from emulator.experiments.table import Results
from emulator.reports import plots

Curve = Sequence[float | None]
Seeds = dict[str, list[Curve]]  # a row -> the curve of each seed
WIDTH, HEIGHT = 6.5, 5.8  # inches, of one panel and its legend
FIRST_DOT, NEXT_DOT = 1.02, 0.014  # where the dots of rows stand, as shares of the number of rounds


def draw_table_curves(plan: ExperimentPlan, results: Results, out: Path) -> bool:
    """Draw what is finished; -> whether there was anything. The ending of `out` (.png, .svg) is the format."""
    panels = by_column(plan, results)
    if not panels:
        return False
    drawn = {name for seeds in panels.values() for name in seeds}
    looks = [name for name in dict.fromkeys(map(row_label, plan.cells)) if name in drawn]
    drawings = [partial(_panel, seeds=seeds, title=title, looks=looks) for title, seeds in panels.items()]
    figure = plots.make_figure(WIDTH * len(drawings), HEIGHT, *drawings)
    with rc_context(plots.STYLE):
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    return True


def by_column(plan: ExperimentPlan, results: Results) -> dict[str, Seeds]:
    """-> for each column, with its number of seeds, the accuracy (0..1) by round of each row and seed.

    Rows and columns without any accuracy are left out.
    """
    panels: dict[str, Seeds] = {}
    for column in dict.fromkeys(cell.column.name for cell in plan.cells):
        found = {row_label(cell): told for cell in plan.cells if cell.column.name == column and (told := results(cell))}
        if not found:
            continue
        common = set.intersection(*({one["seed"] for one in told} for told in found.values()))
        rows = {
            name: [one["curves"]["accuracy"] for one in told if one["seed"] in common] for name, told in found.items()
        }
        if kept := {name: curves for name, curves in rows.items() if mean_curve(curves)}:
            panels[f"{column}, {len(common)} seed{'s' * (len(common) > 1)}"] = kept
    return panels


def seed_ends(curves: Sequence[Curve]) -> list[float]:
    """Of each seed the mean over its last three rounds, which is its figure in the table."""
    return [float(np.mean(known[-LAST_ROUNDS:])) for curve in curves if (known := [v for v in curve if v is not None])]


def mean_curve(seeds: Sequence[Curve]) -> list[float | None]:
    """Of runs of equal length, round by round; None where one of them has none, nothing where no round has any."""
    known = [None if None in told else float(np.mean(told)) for told in zip(*seeds, strict=True)]
    return known if any(value is not None for value in known) else []


def _panel(axes: Any, *, seeds: Seeds, title: str, looks: Sequence[str]) -> None:  # noqa: ANN401 - matplotlib's
    lines = {name: mean_curve(curves) for name, curves in seeds.items()}
    plots.draw_curves(axes, lines, title=title, looks=looks)
    rounds, ends = max(map(len, lines.values())), {name: seed_ends(curves) for name, curves in seeds.items()}
    for i, (name, values) in enumerate(ends.items()):
        x = [rounds * (FIRST_DOT + NEXT_DOT * i)] * len(values)
        axes.scatter(x, values, s=12, color=plots.center_colour(looks.index(name)), lw=0, zorder=3)
    lowest = min(value for values in ends.values() for value in values)
    axes.set_ylim(bottom=max(0.0, math.floor(10 * lowest - 1) / 10), top=None)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.14), ncols=2, fontsize=8.5)  # beside lines, never above them
