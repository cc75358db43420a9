"""What a running table says: which run, which round, how well, and how long the rest takes.

Only this module reads the clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from emulator.console import Repeater
from emulator.experiments.cells import CellRun
from emulator.run.summary import Record

if TYPE_CHECKING:
    from typing_extensions import Self

SILENCE_S = 10.0  # the longest one
POLL_S = 1.0
SHOWN_IN_MINUTES_S = 90
Report = Callable[[str], None]


class ProgressReporter:
    """A line when the first run begins, then one at least every SILENCE_S, also within a round; one when a run ends.

    Between `with` and its end a thread says what goes on, as a round, or reading the data, may be one long call. How
    long the rest takes is said when a whole round was measured after the first one, which has the preparations.
    """

    def __init__(self, missing: Sequence[CellRun], say: Report, clock: Callable[[], float] = time.perf_counter) -> None:
        self._missing, self._say, self._clock = missing, say, clock
        self._lock, self._repeater = threading.Lock(), Repeater(POLL_S, self.watch)
        self._said_s = self._since_s = clock()
        self._first_s = 0.0  # when the first round of all ended
        self._rounds = 0  # finished in this process
        self._doing = self._reached = ""

    def __enter__(self) -> Self:
        self._repeater.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._repeater.stop()

    def begin(self, job: CellRun, what: str) -> None:
        """A part of a run begins, as "reading digits". Those of the first run are lines of their own."""
        with self._lock:
            self._doing, self._reached, self._since_s = f"{self._place(job)}: {what}", "", self._clock()
            if not self._rounds:
                self._tell(self._doing)

    def __call__(self, job: CellRun, record: Record) -> None:
        """A round of a run has ended."""
        with self._lock:
            now_s, number, of = self._clock(), record["round"], record["of"]
            if not self._rounds:
                self._first_s = now_s
            self._rounds += 1
            accuracy = record["accuracy"]["micro"]
            left = self._left(job, of - number)
            self._reached = f"{'' if accuracy is None else f', accuracy {accuracy:.1%}'}{left}"
            now = f"round {number + 1}/{of} is running" if number < of else "measuring the centers"
            self._doing, self._since_s = f"{self._place(job)}: {now}", now_s
            if number == of or now_s - self._said_s >= SILENCE_S - POLL_S:
                self._tell(f"{self._place(job)}: round {number}/{of}{self._reached}")

    def watch(self) -> None:
        """Say what goes on, if nothing was said for SILENCE_S less the time to the next look."""
        with self._lock:
            now_s = self._clock()
            if self._doing and now_s - self._said_s >= SILENCE_S - POLL_S:
                what, runs, _ = self._doing.partition(" is running")
                self._tell(
                    f"{what}{' has been running' if runs else ''} for {now_s - self._since_s:.0f} s{self._reached}"
                )

    def _tell(self, text: str) -> None:
        self._said_s = self._clock()
        self._say(text)

    def _number(self, job: CellRun) -> int:
        return 1 + next(i for i, one in enumerate(self._missing) if one == job)

    def _place(self, job: CellRun) -> str:
        return f"run {self._number(job)}/{len(self._missing)}: {job.name}"

    def _left(self, job: CellRun, rounds: int) -> str:
        rounds += sum(one.cell.rounds for one in self._missing[self._number(job) :])
        if self._rounds < 2 or not rounds:  # noqa: PLR2004 - the first round is no measure of the others
            return ""
        return f"; about {format_duration(rounds * (self._clock() - self._first_s) / (self._rounds - 1))} left"


def format_duration(seconds: float) -> str:
    """A duration in rounded units; below a minute and a half in tens of seconds."""
    if seconds < SHOWN_IN_MINUTES_S:
        return f"{max(1, round(seconds / 10)) * 10} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"  # noqa: PLR2004 - an hour
