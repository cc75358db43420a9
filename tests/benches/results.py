"""What a bench found, and the file of a whole run. Plain data to and from JSON; nothing here measures or formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BenchFigure:
    """One row of goals.py: our number, theirs, and the `score` that its goal compares.

    `unmeasured` says why there is none: a peer that is not installed, a bench that cannot run here. `points` are
    (size, CPU seconds) where the score is the exponent of a cost that grows.
    """

    row: str
    ours: float | None = None
    theirs: float | None = None
    score: float | None = None
    note: str = ""
    unmeasured: str = ""
    points: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class BenchResults:
    """A run of the benches. `load` is the load average at the start and the highest after a bench.

    `seconds` is each bench's wall time.
    """

    date: str
    machine: str
    load: tuple[float, float]
    repeats: int
    versions: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    figures: tuple[BenchFigure, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> BenchResults:
        """What `to_json` gave. Raises TypeError for another object."""
        figures = tuple(
            BenchFigure(**{**one, "points": tuple((size, took) for size, took in one["points"])})
            for one in read["figures"]
        )
        before, after = read["load"]
        return cls(**{**read, "figures": figures, "load": (before, after), "commands": tuple(read["commands"])})


def missing_figures(rows: tuple[str, ...], why: str) -> tuple[BenchFigure, ...]:
    """The rows of a bench that could not run."""
    return tuple(BenchFigure(row=row, unmeasured=why) for row in rows)
