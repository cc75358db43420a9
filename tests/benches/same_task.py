"""`make bench-task`: the programs of docs/coming-from.md, each in its own environment, and their table in that page.

    python -m tests.benches.same_task [--repeats 3]

Lines are those of the user's program without blank lines; the network and the arrays are the same file for all.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benches.peer import PeerMissing, environment, python_of
from tests.benches.processes import CommandFailed, CommandUsage, run_watched
from tests.support.doc_pages import DOCS, blocks, machine, put

PAGE = DOCS / "coming-from.md"
ROOT = DOCS.parent
SIDES = {"fedcenters": "ours.py", "Flower": "with_flower.py", "fluke": "with_fluke.py"}


def programs() -> dict[str, str]:
    """The page's files by name."""
    found = [block.text.partition("\n") for block in blocks(PAGE) if block.kind == "python"]
    return {name.removeprefix("# "): text for name, _, text in found}


def lines_of(text: str) -> int:
    """Lines of code."""
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


def command(side: str) -> list[str]:
    """How the program of a side is started. Raises PeerMissing."""
    if side == "fedcenters":
        return [sys.executable, SIDES[side]]
    if side == "Flower":
        return [str(python_of("flower")), SIDES[side]]
    return [str(python_of("fluke")), str(ROOT / "tests/benches/peers/fluke_script.py"), SIDES[side]]


def run(side: str, folder: Path, seen: list[CommandUsage], missing: list[str]) -> None:
    """Once more; why not, where it cannot."""
    try:
        seen.append(run_watched(command(side), environment(), cwd=folder, scratch=folder))
    except (PeerMissing, CommandFailed) as why:
        missing.append(f"{side}: {why}")


def row(side: str, text: str, seen: Sequence[CommandUsage]) -> str:
    """A line of the table; medians."""
    values = [statistics.median(getattr(ended, name) for ended in seen) for name in ("wall_s", "cpu_s", "peak_mb")]
    accuracy = re.findall(r"accuracy (\S+) (\S+)", seen[-1].stdout)[-1]
    told = " | ".join(f"{value:.0f}" for value in values)
    return f"| {side} | {lines_of(text)} | 1 | {told} | {accuracy[0]} | {accuracy[1]} |"


def main() -> None:
    """Run the sides in turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    files = programs()
    seen: dict[str, list[CommandUsage]] = {side: [] for side in SIDES}
    missing: list[str] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="fedcenters-") as name:
        folder = Path(name)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        for side in [*SIDES] * repeats:
            run(side, folder, seen[side], missing)
    table = [
        "| | lines | files | seconds | CPU seconds | memory, MB | accuracy of FedAvg | clustered, or nearest |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *(row(side, files[SIDES[side]], ended) for side, ended in seen.items() if ended),
        "",
        f"Medians of {repeats}, one thread in each process; {machine()}; load {load:.1f} at the start.",
        *(f"Not measured: {why}." for why in missing),
    ]
    put(PAGE, "bench-task", "\n".join(table))
    sys.stdout.write("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
