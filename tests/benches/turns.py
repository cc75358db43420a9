"""Contestants that take turns, so that what slows the machine slows all of them. Seconds of CPU and of the wall.

A contestant is a function that does its work once and says what it took; it may run here or in another process.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one repeat took: CPU seconds of all threads of its processes, and seconds of the wall."""

    cpu_s: float
    wall_s: float


Contestant = Callable[[], Turn]


def timed(work: Callable[[], object]) -> Contestant:
    """A contestant of this process; other threads of the process must rest meanwhile."""

    def turn() -> Turn:
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        return Turn(cpu_s=time.process_time() - cpu, wall_s=time.perf_counter() - wall)

    return turn


def with_workers(work: Callable[[], object]) -> Contestant:
    """A contestant of this process and the workers that it started; theirs are counted in ticks of 10 ms."""

    def turn() -> Turn:
        before, wall = _workers_s(), time.perf_counter()
        took = timed(work)()
        return Turn(cpu_s=took.cpu_s + _workers_s() - before, wall_s=time.perf_counter() - wall)

    return turn


def _workers_s() -> float:
    import psutil

    times = [psutil.Process(child.pid).cpu_times() for child in multiprocessing.active_children()]
    return float(sum(t.user + t.system for t in times))


def interleaved(contestants: Mapping[str, Contestant], repeats: int) -> dict[str, Turn]:
    """Name -> the medians of `repeats` turns, after one turn each that does not count; every other pass goes back."""
    for turn in contestants.values():
        turn()
    seen: dict[str, list[Turn]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        names = list(contestants)
        for name in names if repeat % 2 == 0 else reversed(names):
            seen[name].append(contestants[name]())
    return {name: median(turns) for name, turns in seen.items()}


def median(turns: list[Turn]) -> Turn:
    """CPU and wall, each by itself."""
    return Turn(cpu_s=statistics.median(t.cpu_s for t in turns), wall_s=statistics.median(t.wall_s for t in turns))
