"""A command as a person starts it: seconds until it ends, the peak memory of all its processes, who is left behind.

Memory is proportional (PSS): a page that several processes share counts once. Linux only.
"""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

EVERY_S = 0.2  # between two looks at memory
GRACE_S = 3.0  # what may still be ending after the command has
LIMIT_S = 600.0
MARK = "FEDCENTERS_BENCH_RUN"


@dataclass(frozen=True, kw_only=True)
class CommandUsage:
    """What a command took: CPU seconds of all processes as last seen, its output, and those alive GRACE_S later.

    `peaks_mb` is the most memory of each process, by its command line.
    """

    wall_s: float
    cpu_s: float
    peak_mb: float
    processes: int
    left: int
    stdout: str
    peaks_mb: Mapping[str, float]


class CommandFailed(Exception):
    """A command that ended with an error, or not at all; says its last line."""


def run_watched(command: Sequence[str], env: Mapping[str, str], *, cwd: Path, scratch: Path) -> CommandUsage:
    """Run to the end, looking at its family meanwhile. Ends what it left behind. Raises CommandFailed."""
    mark = uuid.uuid4().hex
    out, err = scratch / "stdout", scratch / "stderr"
    peak, cpu, seen, began = 0.0, dict[int, float](), dict[int, psutil.Process](), time.perf_counter()
    peaks = dict[str, float]()
    with out.open("w") as stdout, err.open("w") as stderr:
        started = subprocess.Popen(command, stdout=stdout, stderr=stderr, cwd=cwd, env={**env, MARK: mark})
        root = psutil.Process(started.pid)
        while (code := _waited(started, EVERY_S)) is None:
            seen |= {p.pid: p for p in _family(root)}
            held = {pid: _pss(p) for pid, p in seen.items()}
            peak = max(peak, sum(held.values()))
            peaks |= {line: max(peaks.get(line, 0.0), held[pid] / 1e6) for pid, p in seen.items() if (line := _line(p))}
            cpu |= {pid: s for pid, p in seen.items() if (s := _cpu(p)) is not None}
            if time.perf_counter() - began > LIMIT_S:
                started.kill()
                code = started.wait()
                break
    wall = time.perf_counter() - began
    left = _left(mark, seen)
    if code:
        raise CommandFailed(f"exit code {code}: {_last_line(err.read_text(errors='replace'))}")
    return CommandUsage(
        wall_s=wall,
        cpu_s=sum(cpu.values()),
        peak_mb=peak / 1e6,
        processes=len(seen),
        left=left,
        stdout=out.read_text(errors="replace"),
        peaks_mb=peaks,
    )


def _waited(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _family(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def _cpu(process: psutil.Process) -> float | None:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return None
    return float(times.user + times.system)


def _left(mark: str, seen: Mapping[int, psutil.Process]) -> int:
    """How many are alive after the grace; they are ended, being ours."""
    _, alive = psutil.wait_procs([p for p in seen.values() if p.pid != os.getpid()], timeout=GRACE_S)
    known = {p.pid for p in alive}
    alive += [p for p in psutil.process_iter() if p.pid not in known and _mark(p) == mark]
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return len(alive)


def _mark(process: psutil.Process) -> str:
    """What a process inherited from the command that started it all; empty where we may not look."""
    try:
        return str(process.environ().get(MARK, ""))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
