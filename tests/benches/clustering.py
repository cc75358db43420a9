"""Bench: the server's clustering against scikit-learn; the measuring is tests/benches/clustering_scaling.py's."""

from __future__ import annotations

from collections.abc import Iterable

from tests.benches.clustering_scaling import ClusteringRow, measure
from tests.benches.goals import GOALS
from tests.benches.results import BenchFigure

MOST_REPEATS = 5  # scikit-learn takes seconds


def run(repeats: int) -> tuple[list[BenchFigure], dict[str, str]]:
    """Its rows, the large one included."""
    from sklearn import __version__ as sklearn_version

    rows = measure(repeats=min(repeats, MOST_REPEATS), large=True)
    return figures_of(rows), {"scikit-learn": str(sklearn_version)}


def figures_of(rows: Iterable[ClusteringRow]) -> list[BenchFigure]:
    """A goal in seconds compares our seconds, that of weak clusters how far below we are, any other the ratio."""
    units = {goal.row: goal.unit for goal in GOALS}

    def score(row: ClusteringRow) -> float:
        if row.name == "clustering-weak":
            return row.ratio - 1
        return row.ours if units.get(row.name) in ("ms", "s") else row.ratio

    return [
        BenchFigure(row=row.name, ours=row.ours, theirs=row.theirs, score=score(row), note=row.note) for row in rows
    ]
