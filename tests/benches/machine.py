"""What the machine is and how busy it is."""

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
