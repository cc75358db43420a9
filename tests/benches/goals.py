"""What each bench is measured against, what it must reach and what it aims at. Numbers only: nothing here measures.

The goals are the rows of goals.txt. A goal compares one number, the `score` of a figure (results.py): a ratio to a
peer, a share of a limit, an exponent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One row of the table. `unit` is that of the score; without `at_least` a row only informs."""

    row: str
    bench: str
    against: str
    at_least: float | None = None
    aim: float | None = None
    better: Literal["more", "less"] = "more"
    unit: Literal["x", "%", "", "ms", "s"] = "x"

    def met(self, score: float, bound: float) -> bool:
        """Whether the score is on the right side of a bound."""
        return score >= bound if self.better == "more" else score <= bound


def _read(path: Path) -> Iterator[Goal]:
    """The rows of a table whose columns are the fields of a Goal; an empty number is None."""
    head, *rows = ([cell.strip() for cell in line.split("|")] for line in path.read_text(encoding="utf-8").splitlines())
    for row in rows:
        given: dict[str, Any] = dict(zip(head, row, strict=True))
        bounds = {key: float(given[key]) if given[key] else None for key in ("at_least", "aim")}
        yield Goal(**given | bounds)


GOALS = tuple(_read(Path(__file__).with_suffix(".txt")))
