"""What BENCHMARKS.md says of a million devices is what is kept, so that a picture drawn of it shows the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.benches.million import KEPT

PAGE = Path(__file__).parents[2] / "BENCHMARKS.md"
SECTION = "## What does a round of a simulated fleet cost"
LINE = re.compile(r"^\| (\w+), ([\d,]+) \| ([\d,]+) \| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| (\d+) \|$", re.MULTILINE)


def test_the_tables_are_the_kept_figures_rounded() -> None:
    kept = [row for row in json.loads(KEPT.read_text()) if row["what"] in ("devices", "parameters")]
    told = LINE.findall(PAGE.read_text(encoding="utf-8").split(SECTION)[1].split("\n## ")[0])
    assert sorted(told) == sorted(
        (
            row["data"],
            f"{row['n']:,}",
            f"{row['parameters']:,}",
            row["method"],
            f"{row['wall_s']:.1f}",
            f"{row['cpu_s']:.1f}",
            f"{row['mb']:.0f}",
        )
        for row in kept
    )
