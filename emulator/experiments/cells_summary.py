"""Which cells of a table are run, with how many seeds, and which are not: as JSON types and as Markdown. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge_client.printable import counted
from emulator.experiments.plan import ExperimentPlan, TableCell, row_label
from emulator.experiments.table import Results, table_line

Begun = Callable[[TableCell], Mapping[int, int]]  # seed -> the round that is kept of a run under way

COUNT = re.compile(r": (\d+) of \d+ cells run,")


def summarise_cells(
    plan: ExperimentPlan, cells: Sequence[TableCell], results: Results, begun: Begun = lambda _: {}
) -> dict[str, Any]:
    """`cells` with the seeds that each has, and how many have one seed and all `seeds` that the table is meant for.

    `under_way` of a cell: of each seed that is not finished, the round that its checkpoint keeps.
    """
    told: list[Mapping[str, Any]] = [
        {
            "data": cell.column.name,
            "k": cell.centers,
            "method": cell.row.name,
            "label": row_label(cell),
            "seeds": sorted(int(one["seed"]) for one in results(cell)),
            "under_way": {str(seed): number for seed, number in begun(cell).items()},
        }
        for cell in cells
    ]
    return {
        "experiment": plan.name,
        "title": plan.title,
        "rounds": plan.rounds,
        "seeds": plan.seeds,
        "of": len(told),
        "run": sum(bool(one["seeds"]) for one in told),
        "with_all_seeds": sum(len(one["seeds"]) >= plan.seeds for one in told),
        "cells": told,
    }


def render_summary(found: Mapping[str, Any]) -> str:
    """A line of counts, and a row per column of the table: which rows have how many seeds, and which have none."""
    every = counted(found["seeds"], "seed")
    counts = f"{found['run']} of {found['of']} cells run, {found['with_all_seeds']} with {every}"
    some = any(one["under_way"] for one in found["cells"])
    head = ["data", "run (seeds)", *["under way"] * some, "not run"]
    lines = [f"{found['title']}: {counts}; {found['rounds']} rounds.", ""]
    lines += [table_line(head), table_line(["---"] * len(head))]
    for column in dict.fromkeys(one["data"] for one in found["cells"]):
        here = [one for one in found["cells"] if one["data"] == column]
        run = "; ".join(f"{one['label']} ({len(one['seeds'])})" for one in here if one["seeds"])
        begun = "; ".join(
            f"{one['label']}, seed {seed}: round {number} of {found['rounds']} kept"
            for one in here
            for seed, number in one["under_way"].items()
        )
        absent = "; ".join(one["label"] for one in here if not one["seeds"] and not one["under_way"])
        lines.append(table_line([text or "-" for text in (column, run, *[begun] * some, absent)]))
    return "\n".join(lines)


def lost_counts(old: str, new: str) -> list[str]:
    """The finished cells that a section's `old` text counts, where the `new` one counts none; the table that it is."""
    before, now = ([int(count) for count in COUNT.findall(text)] for text in (old, new))
    if not before and old.strip():
        return ["the table itself"]
    return [f"{before[0]} cells"] if any(before) and not any(now) else []
