"""A running table is never silent, and tells what is left when a round was measured."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from emulator.experiments.cells import CellRun
from emulator.experiments.plan import parse_plan
from emulator.experiments.progress import ProgressReporter, format_duration
from tests.emulator.experiments.test_cells import TOML

JOBS = [CellRun(cell=cell, seed=0) for cell in parse_plan("t", TOML, rounds=9).cells]
HERE = "run 1/2: FedAvg (K=1), digits, seed 0"


class TimedReporter:
    """A reporter whose time is set by the test, and what it said."""

    def __init__(self, jobs: Sequence[CellRun] = JOBS) -> None:
        self.now_s, self.lines = 0.0, list[str]()
        self.reporter = ProgressReporter(jobs, self.lines.append, lambda: self.now_s)

    def at(self, now_s: float) -> ProgressReporter:
        self.now_s = now_s
        return self.reporter


def record(number: int, accuracy: float | None = None) -> dict[str, object]:
    return {"round": number, "of": 9, "accuracy": {"micro": accuracy}}


def test_the_first_run_says_at_once_what_begins() -> None:
    told = TimedReporter()
    told.at(0).begin(JOBS[0], "reading digits")
    told.at(1).begin(JOBS[0], "the first round is running")
    assert told.lines == [f"{HERE}: reading digits", f"{HERE}: the first round is running"]


def test_a_long_round_is_not_silent_and_a_short_silence_is_kept() -> None:
    told = TimedReporter()
    told.at(0).begin(JOBS[0], "the first round is running")
    told.at(8).watch()
    assert len(told.lines) == 1
    told.at(9).watch()
    told.at(12).watch()
    told.at(18).watch()
    assert told.lines[1:] == [f"{HERE}: the first round has been running for {s} s" for s in (9, 18)]
    told.at(20)(JOBS[0], record(1, 0.5))
    told.at(27).watch()
    assert told.lines[3:] == [f"{HERE}: round 2/9 has been running for 7 s, accuracy 50.0%"]


def test_what_is_left_is_rough_and_measured_without_the_first_round() -> None:
    told = TimedReporter()
    told.at(1000)(JOBS[0], record(1))
    told.at(1060)(JOBS[0], record(2, 0.25))
    told.at(1120)(JOBS[0], record(3, 0.5))
    assert told.lines == [
        f"{HERE}: round 1/9",
        f"{HERE}: round 2/9, accuracy 25.0%; about 16 min left",
        f"{HERE}: round 3/9, accuracy 50.0%; about 15 min left",
    ]


def test_the_end_of_a_run_is_a_line_and_nothing_is_left_after_the_last() -> None:
    told = TimedReporter(JOBS[:1])
    told.at(0)(JOBS[0], record(8))
    told.at(1)(JOBS[0], record(9, 0.75))
    assert told.lines == ["run 1/1: FedAvg (K=1), digits, seed 0: round 9/9, accuracy 75.0%"]


@pytest.mark.parametrize(
    ("seconds", "said"), [(3_661, "1 h 1 min"), (600, "10 min"), (91, "2 min"), (44, "40 s"), (3, "10 s")]
)
def test_a_duration_is_in_hours_and_minutes_and_a_short_one_in_seconds(seconds: float, said: str) -> None:
    assert format_duration(seconds) == said
