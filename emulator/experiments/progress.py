"""What a running table says: which run, which round, how well, how long the rest takes, and what Ctrl-C leaves.

Only this module reads the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from emulator.experiments.cells import CellRun
from emulator.run.summary import Record

REPORT_INTERVAL_S = 15.0
Report = Callable[[str], None]


@dataclass(kw_only=False)
class ProgressReporter:
    """A line now and then: which run, which round, how well, and about how long the rest takes."""

    missing: Sequence[CellRun]
    say: Report
    _began_s: float = field(default_factory=time.perf_counter)
    _said_s: float = -REPORT_INTERVAL_S
    _rounds: int = 0

    def __call__(self, job: CellRun, record: Record) -> None:
        now_s = time.perf_counter()
        self._rounds += 1
        last = record["round"] == record["of"]
        if now_s - self._said_s < REPORT_INTERVAL_S and not last:
            return
        self._said_s = now_s
        number = 1 + next(i for i, one in enumerate(self.missing) if one == job)
        left = record["of"] - record["round"] + sum(one.cell.rounds for one in self.missing[number:])
        rest_s = left * (now_s - self._began_s) / self._rounds
        accuracy = record["accuracy"]["micro"]
        well = "" if accuracy is None else f", accuracy {accuracy:.1%}"
        self.say(
            f"run {number}/{len(self.missing)}: {job.name}: round {record['round']}/{record['of']}{well};"
            f" {format_duration(rest_s)} left"
        )


def format_duration(seconds: float) -> str:
    """A duration in rounded units."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(1, minutes)} min"  # noqa: PLR2004 - an hour
