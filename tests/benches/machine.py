"""What the machine is and how busy it is, and the memory of this process."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def described() -> str:
    """Processor, cores, system, Python and torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}, {versions}"


def load() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0]


def reset_peak_memory() -> int:
    """Forget the peak of this process's resident memory; -> the memory that it has now, in bytes. Linux only."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def peak_memory() -> int:
    """The most resident memory since then, in bytes."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1_024 for line in lines if line.startswith(name + ":"))
