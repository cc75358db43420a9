"""The progress of a running coordinator: the lines of metrics.jsonl as they appear, as text.

Reads the growing file without waiting; the caller decides when to read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.dashboard.endpoint import LINK_FILE
from coordinator.rounds.round_record import center_sizes, no_sums_in_words, reached_in_words
from coordinator.storage.status import STATUS_FILE
from emulator.reports import display_names


class FileTail:
    """The lines of a JSON-lines file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def read_new(self) -> list[dict[str, Any]]:
        """Complete lines since the last call; a line that is still being written waits for the next."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


def dashboard_url(folder: Path) -> str:
    """The link to the page that shows the run, while the coordinator serves it; else nothing."""
    try:
        return (folder / LINK_FILE).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_paused(folder: Path) -> bool:
    """Whether the coordinator is paused."""
    return _status(folder).get("phase") == "paused"


def part_in_work(folder: Path) -> str:
    """What the coordinator compiles or exports now, such as "model digits-mlp for onnx"; "" when it does neither."""
    return str(_status(folder).get("working_on", ""))


def _status(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def format_milestone(event: Mapping[str, Any]) -> str:
    """One line about an event; "" for what a person need not see."""
    kind = event["event"]
    if kind == "round":
        name = display_names.method_label(event["method"])
        line = f"{name} round {event['round']}/{event['of']}: {reached_in_words(event) or 'not evaluated'}"
        line += no_sums_in_words(event)
        sizes = center_sizes(event["assignment"], len(event["per_center"]))
        return f"{line}, devices per center {sizes}" if len(sizes) > 1 and any(sizes) else line  # none: not told
    if kind == "program":
        return f"the training program is compiled for {_listed(map(display_names.engine_label, event['parity']))}"
    if kind == "bundle" and event.get("formats"):
        formats = _listed(map(display_names.format_label, event["formats"]))
        return f"every center is exported to {formats} and checked against torch"
    return ""


def format_stability(assignments: Sequence[Mapping[str, int]]) -> str:
    """From which round on no device changed its center, in words; "" before the second round."""
    if len(assignments) < 2:  # noqa: PLR2004 - one round has nothing to compare with
        return ""
    since = len(assignments)
    while since > 1 and assignments[since - 2] == assignments[-1]:
        since -= 1
    if since == len(assignments):
        return "devices still changed centers in the last round"
    return f"no device has changed its center since round {since}"


def describe_next_step(events: Sequence[Mapping[str, Any]]) -> str:
    """What the coordinator does after the last of these events; "" when nothing new begins."""
    event, kind = events[-1], events[-1]["event"]
    if kind == "program":
        return "waiting for the devices"
    if kind == "round":
        name = display_names.method_label(event["method"])
        left = event["of"] - event["round"]
        return f"{name} round {event['round'] + 1}/{event['of']}" if left else "closing the run"
    if kind == "run-done":
        planned: Iterable[str] = next((one["rounds"] for one in events if one["event"] == "start"), ())
        done = {one["run"] for one in events if one["event"] == "run-done"}
        coming = next((run for run in planned if run not in done), None)
        return "exporting the centers" if coming is None else f"beginning {display_names.method_label(coming)}"
    return {"bundle": "handing out centers"}.get(kind, "")


def _listed(words: Iterable[str]) -> str:
    """["a", "b", "c"] -> a, b and c."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
