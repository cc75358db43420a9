"""`python -m tests.figures.nearest_tables FILE...`: the lines of tests/figures/nearest.py as a table and a picture.

Means over seeds. The table goes to stdout; `--picture` draws the share that finds its center.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (1, 5, 20, 100)
WAYS = ("labelled", "loss", "votes", "round", "unlabelled", "sketch", "entropy", "norms")
DRAWN = {"labelled": "#1b6ca8", "round": "#6a51a3", "unlabelled": "#c2571a", "entropy": "#999999"}
Rows = Mapping[tuple[str, str, int], Sequence[Mapping[str, Any]]]


def read(paths: Sequence[Path]) -> Rows:
    """Setting, way, samples -> a row for each seed."""
    rows: dict[tuple[str, str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[row["setting"], row["way"], row["n"]].append(row)
    return rows


def table(rows: Rows) -> str:
    """Markdown: a line for each setting and way, its four numbers of samples side by side."""
    head = (
        "| fleet | way | right %: 1 | 5 | 20 | 100 | points below the oracle: 1 | 5 | 20 | 100 | probability's error, "
        "20 | kB down, 20 | seeds |"
    )
    known = [(s, w) for s in dict.fromkeys(key[0] for key in rows) for w in WAYS if (s, w, SIZES[-1]) in rows]
    lines = [head, "| --- | --- |" + " ---: |" * 11, *(_line(rows, setting, way) for setting, way in known)]
    return "\n".join(lines)


def _line(rows: Rows, setting: str, way: str) -> str:
    def of(name: str, n: int) -> float:
        return float(np.mean([row[name] for row in rows[setting, way, n]]))

    right = [f"{100 * of('right', n):.0f}" if (setting, way, n) in rows else "" for n in SIZES]
    lost = [f"{100 * (of('oracle', n) - of('accuracy', n)):.1f}" if (setting, way, n) in rows else "" for n in SIZES]
    cells = [setting, way, *right, *lost, f"{of('ece', 20):.2f}", f"{of('bytes', 20) / 1e3:.0f}"]
    return "| " + " | ".join([*cells, str(len(rows[setting, way, 20]))]) + " |"


def picture(rows: Rows, path: Path) -> None:
    """A panel for each setting: share right against samples, a line for each of a few ways."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "nearest", "font.size": 9})
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(key[0] for key in rows))
    figure, panels = plt.subplots(1, len(names), figsize=(2.5 * len(names), 2.9), sharey=True, layout="constrained")
    for panel, name in zip(np.atleast_1d(panels), names, strict=True):
        for way, colour in DRAWN.items():
            known = [n for n in SIZES if (name, way, n) in rows]
            share = [100 * np.mean([row["right"] for row in rows[name, way, n]]) for n in known]
            panel.plot([SIZES.index(n) for n in known], share, color=colour, marker="o", markersize=4, label=way)
        panel.set_xticks(range(len(SIZES)), [str(n) for n in SIZES])
        panel.set_title(name, fontsize=9)
        panel.set_ylim(0, 104)
        panel.grid(axis="y", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    np.atleast_1d(panels)[0].set_ylabel("% that find the right center")
    figure.supxlabel("samples on the new device", fontsize=9)
    handles, labels = np.atleast_1d(panels)[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(DRAWN), frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    rows = read(asked.files)
    sys.stdout.write(table(rows) + "\n")
    if asked.picture is not None:
        picture(rows, asked.picture)


if __name__ == "__main__":
    main()
