"""Draw the cells of a table as curves: accuracy by round, one panel per column, one line per row.

A line is the mean over the seeds that all finished cells of its column have: draws differ more than methods do. Right
of the lines every finished seed of a row has a dot at its figure, as the legend says. A row keeps its look in every
panel. Panels begin below the lowest value of any line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context

from coordinator.rounds.metrics import LAST_ROUNDS
from edge_client.printable import counted
from emulator.experiments.plan import ExperimentPlan, row_label
from emulator.experiments.table import Results
from emulator.reports import plots
from emulator.reports.output_files import save_figure

Curve = Sequence[float | None]
WIDTH, HEIGHT = 6.5, 5.8  # inches, of one panel and its part of the legend
COLUMNS_OF_PANEL = 2  # of the legend
DOTS = f"a seed's figure: mean of its last {LAST_ROUNDS} rounds"
NO_DATE: Mapping[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}  # the same cells, the same bytes
FIRST_DOT, NEXT_DOT = 1.02, 0.014  # where the dots of rows stand, as shares of the number of rounds


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A column of the table, with the number of seeds of its lines; accuracies in 0..1, by row.

    `lines` have a value per round, `dots` one per finished seed. Rows without any accuracy are left out.
    """

    title: str
    lines: Mapping[str, Curve]
    dots: Mapping[str, Sequence[float]]


def draw_table_curves(plan: ExperimentPlan, results: Results, out: Path) -> bool:
    """Draw what is finished; -> whether there was anything. The ending of `out` (.pdf, .png, .svg) is the format."""
    panels = [panel for panel in by_column(plan, results) if panel.lines]
    if not panels:
        return False
    drawn = {name for panel in panels for name in panel.lines}
    looks = [name for name in dict.fromkeys(map(row_label, plan.cells)) if name in drawn]
    drawings = [partial(_draw_panel, panel=panel, looks=looks) for panel in panels]
    figure = plots.make_figure(WIDTH * len(drawings), HEIGHT, *drawings)
    with rc_context(plots.STYLE):
        _draw_legend(figure, looks)
        save_figure(figure, out, metadata=NO_DATE.get(out.suffix))
    return True


def by_column(plan: ExperimentPlan, results: Results) -> list[Panel]:
    """A panel for each column with a finished cell."""
    panels = []
    for column in dict.fromkeys(cell.column.name for cell in plan.cells):
        found = {row_label(cell): told for cell in plan.cells if cell.column.name == column and (told := results(cell))}
        if not found:
            continue
        common = set.intersection(*({one["seed"] for one in told} for told in found.values()))
        lines = {
            name: mean_curve([one["curves"]["accuracy"] for one in told if one["seed"] in common])
            for name, told in found.items()
        }
        lines = {name: line for name, line in lines.items() if line}
        dots = {name: seed_ends([one["curves"]["accuracy"] for one in found[name]]) for name in lines}
        title = f"{column}, {counted(len(common), 'seed')}"
        panels.append(Panel(title=title, lines=lines, dots=dots))
    return panels


def seed_ends(curves: Sequence[Curve]) -> list[float]:
    """Of each seed the mean over its last three rounds, which is its figure in the table."""
    return [float(np.mean(known[-LAST_ROUNDS:])) for curve in curves if (known := [v for v in curve if v is not None])]


def mean_curve(seeds: Sequence[Curve]) -> list[float | None]:
    """Of runs of equal length, round by round; None where one of them has none, nothing where no round has any."""
    known = [None if None in told else float(np.mean(told)) for told in zip(*seeds, strict=True)]
    return known if any(value is not None for value in known) else []


def _draw_panel(axes: Any, *, panel: Panel, looks: Sequence[str]) -> None:  # noqa: ANN401 - matplotlib's
    plots.draw_curves(axes, panel.lines, title=panel.title, looks=looks)
    axes.set_ylabel("accuracy")
    rounds, x = max(map(len, panel.lines.values())), 0.0
    for i, (name, values) in enumerate(panel.dots.items()):
        x = rounds * (FIRST_DOT + NEXT_DOT * i)
        axes.scatter([x] * len(values), values, s=12, color=plots.curve_colour(looks.index(name)), lw=0, zorder=3)
    axes.set_xlim(right=x + rounds * NEXT_DOT)
    shown = [value for values in (*panel.lines.values(), *panel.dots.values()) for value in values if value is not None]
    axes.set_ylim(bottom=max(0.0, math.floor(10 * min(shown)) / 10), top=None)
    axes.scatter([], [], s=12, color="#6b7280", lw=0, label=DOTS)


def _draw_legend(figure: Any, looks: Sequence[str]) -> None:  # noqa: ANN401 - matplotlib's
    """One legend below all panels: a row has the same look in each."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        axes.get_legend().remove()
        handles |= {name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = [*looks, DOTS]
    columns = COLUMNS_OF_PANEL * len(figure.axes)
    figure.legend([handles[n] for n in names], names, loc="outside lower left", ncols=columns, fontsize=8.5)
