"""docs/coming-from.md: our program runs as it stands, and the page counts the lines of all three."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.benches.same_task import PAGE, SIDES, lines_of, programs

KIND = "python"  # of every block of "coming-from.md"
ROOT = PAGE.parents[1]


def test_our_program_runs_as_it_stands_but_for_fewer_rounds(tmp_path: Path) -> None:
    for name, text in programs().items():
        (tmp_path / name).write_text(text.replace("rounds=10", "rounds=1"), encoding="utf-8")
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "ours.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("accuracy 0.")


def test_the_table_has_each_programs_lines_and_ours_are_fewest() -> None:
    text, files = PAGE.read_text(encoding="utf-8"), programs()
    counted = {side: lines_of(files[name]) for side, name in SIDES.items()}
    assert min(counted, key=counted.__getitem__) == "fedcenters"
    for side, n in counted.items():
        assert f"| {side} | {n} | 1 |" in text
