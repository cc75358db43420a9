"""`python -m tests.figures.papers --data DIR --write docs/papers-figures.md`: the figures of three papers, drawn again.

Draws into the folder `papers` beside the page, as .svg, and writes what they show in numbers between the page's
markers. Curves over many rounds are those of kept cells in docs/results; the rest is run here, some minutes on one
core. `--paper` draws those of one paper.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from emulator.experiments.table import replace_section
from tests.figures.papers import fedsoft, fesem, wecfl
from tests.figures.papers.runs import Drawn, write_picture

PAPERS = {"fesem": fesem.draw, "wecfl": wecfl.draw, "fedsoft": fedsoft.draw}


def facts_table(drawn: Drawn) -> str:
    """What the pictures show in numbers, in Markdown."""
    rows = [f"| {name} | {value} |" for name, value in drawn.facts.items()]
    return "\n".join(["| in the pictures above | ours |", "| --- | --- |", *rows])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("FEDCENTERS_DATA"))
    parser.add_argument("--paper", choices=PAPERS)
    parser.add_argument("--write", type=Path, required=True)
    asked = parser.parse_args()
    folder = asked.write.parent / "papers"
    folder.mkdir(parents=True, exist_ok=True)
    for paper in [asked.paper] if asked.paper else PAPERS:
        began_s = time.process_time()
        drawn = PAPERS[paper](asked.data)
        for name, figure in drawn.pictures.items():
            write_picture(figure, folder / f"{name}.svg")
        replace_section(asked.write, f"{paper}-figures", facts_table(drawn))
        sys.stderr.write(f"{paper}: {len(drawn.pictures)} pictures, {time.process_time() - began_s:.0f} CPU seconds\n")


if __name__ == "__main__":
    main()
