"""The pictures of one simulated run, as files. Reads what `simulate` left in a folder; figures.py draws the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from edge_client.errors import ConfigError
from edge_client.protocol.task import Array
from emulator import figures, names
from emulator.report import read_events, rounds_of

DPI = 110
Drawing = tuple[float, float, Callable[[Axes], None]]  # width and height in inches, and who paints


def draw(run: Path, out: Path) -> list[Path]:
    """labels.png, curves.png, assignment.png and, of several centers, cosines.png; -> what was written."""
    try:
        events = read_events(run / "metrics.jsonl")
        told = json.loads((run / "fleet.json").read_text(encoding="utf-8"))
        fleet = told["devices"]
        method = str(events[0]["method"])
        centers = _centers(run, told["classifier"])
    except (OSError, ValueError, IndexError, KeyError) as wrong:
        raise ConfigError(
            f"{run} holds no simulated run: {wrong!r}",
            hint="pass a folder that `fedcenters-emulator simulate` wrote",
        ) from wrong
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (width, height, paint) in _drawings(rounds_of(events, method), fleet, centers, method).items():
        written.append(out / f"{name}.png")
        figures.paint(width, height, paint).savefig(written[-1], dpi=DPI)
    return written


def _drawings(rounds: list[Any], fleet: dict[str, Any], centers: Array, method: str) -> dict[str, Drawing]:
    groups = {who: held["group"] for who, held in fleet.items()}
    known = {who: group for who, group in groups.items() if group is not None}
    labels = {who: held["labels"] for who, held in fleet.items()}
    curves = {
        f"{word}, {kind}": [event[quantity][kind] for event in rounds]
        for quantity, word in (("accuracy", "accuracy"), ("f1", "F1"))
        for kind in ("micro", "macro")
    }
    history = [event["assignment"] for event in rounds]
    rows = min(len(fleet), 120)
    found: dict[str, Drawing] = {
        "labels": (11.0, 3.8, lambda axes: figures.draw_labels(axes, labels, groups)),
        "curves": (
            7.0,
            4.0,
            lambda axes: figures.draw_curves(axes, curves, title=f"{names.method(method)} on held-out samples"),
        ),
        "assignment": (7.0, max(4.0, 0.17 * rows), lambda axes: figures.draw_assignment(axes, history, known)),
    }
    if len(centers) > 1:
        title = "Cosine of the centers' last layers"
        found["cosines"] = (5.6, 4.8, lambda axes: figures.draw_cosines(axes, centers, title=title))
    return found


def _centers(run: Path, classifier: list[str]) -> Array:
    """[K, d]: the last layer of every center, which tells label skew best; all parameters where none is named."""
    from safetensors.numpy import load

    rows = []
    for path in sorted(run.glob("centers/*/center-*.safetensors"), key=lambda p: int(p.stem.rpartition("-")[2])):
        tensors = load(path.read_bytes())
        rows.append(np.concatenate([np.ravel(tensors[name]) for name in classifier or sorted(tensors)]))
    if not rows:
        raise ValueError("no centers")
    return np.stack(rows)
