"""A plan as a table with a line for each column of data and a column for each method, and one that judges a method.

The row `judged` is compared with the best other row of the same data, which is chosen after the fact by the mean of the
paired differences: this can only make the judged method look worse. The interval is Student's, 95 %. Of an error the
best is the least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from emulator.experiments.measures import MEASURES
from emulator.experiments.plan import ExperimentPlan, TableCell
from emulator.experiments.table import (
    NOT_RUN,
    Results,
    mean_and_deviation,
    paired_difference,
    plus_minus,
    section,
    seed_figures,
    told_figures,
    told_reasons,
)
from emulator.reports.display_names import signed

LEAST_SEEDS = 3  # of a row that is judged without all of the judged row's
Figures = Mapping[str, Mapping[int, float]]  # row -> seed -> figure


def render_matrix(
    plan: ExperimentPlan,
    results: Results,
    *,
    command: str,
    reasons: Mapping[str, str] | None = None,
    only: Sequence[TableCell] = (),
) -> str:
    """The whole section, without a heading; with `only`, of these cells."""
    cells_shown = only or plan.cells
    rows = list(dict.fromkeys(cell.row.name for cell in cells_shown))
    by_column: dict[str, list[TableCell]] = {}
    for cell in cells_shown:
        by_column.setdefault(cell.column.name, []).append(cell)
    head = [MEASURES[plan.metrics[0]].title, *rows, f"{plan.judged} less the best other", "seeds"]
    lines = []
    for name, cells in by_column.items():
        found = {cell.row.name: seed_figures(results(cell), plan.metrics[0]) for cell in cells}
        shown = [_figure(list(found[row].values())) for row in rows]
        judged = against_best(found, plan.judged, lower_is_better=MEASURES[plan.metrics[0]].lower_is_better)
        lines.append([name, *shown, judged, _seeds(list(found.values()))])
    several = any(len(results(cell)) > 1 for cell in cells_shown)
    said = [*told_reasons(reasons), *told_figures(plan.metrics, several=several)]
    return section(plan, command, head, lines, said)


def against_best(found: Figures, judged: str, *, lower_is_better: bool = False) -> str:
    """The difference of the judged row to the best of the others; "" without one.

    A row that lacks seeds may be the best: with three or more it is judged on those, and their number is told.
    """
    ours = found.get(judged, {})
    others = {row: mine.keys() & ours.keys() for row, mine in found.items() if row != judged}
    judging = {row for row, seeds in others.items() if ours and (len(seeds) >= LEAST_SEEDS or seeds == ours.keys())}
    if not judging:
        return ""
    differences = {row: paired_difference(ours, found[row]) for row in found if row in judging}
    sign = -1 if lower_is_better else 1
    best = min(differences, key=lambda row: math.inf if math.isnan(differences[row][0]) else sign * differences[row][0])
    mean, half, seeds = differences[best]
    some = "" if seeds == len(ours) else f", {seeds} seeds"
    return f"{signed(mean)}{plus_minus(half)} ({best}{some})"


def _figure(values: Sequence[float]) -> str:
    if not values:
        return NOT_RUN
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.1f}" + ("" if deviation is None else f" ± {deviation:.1f}")


def _seeds(found: Sequence[Mapping[int, Any]]) -> str:
    """How many seeds the methods have, the fewest and the most."""
    counts = sorted({len(by_seed) for by_seed in found if by_seed})
    return " to ".join(str(n) for n in (counts if len(counts) < 3 else [counts[0], counts[-1]])) or "-"  # noqa: PLR2004 - a range
