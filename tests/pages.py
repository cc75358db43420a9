"""Figures in a page of docs/: a script replaces what stands between two marks, and nothing else."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np

DOCS = Path(__file__).parents[1] / "docs"


def put(page: Path, target: str, text: str) -> None:
    """Replace the figures of `make target`. Raises ValueError for a page without the marks."""
    begin, end = f"<!-- figures: make {target} -->\n", "<!-- end of figures -->\n"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no figures of make {target}")
    page.write_text(f"{before}{begin}{text.rstrip()}\n{end}{after}", encoding="utf-8")


def machine() -> str:
    """What the figures were made with."""
    return f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
