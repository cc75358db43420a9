"""The rounds of one run as the page shows them: a short record of each, and the center of every device. Pure, bounded.

The view gives each device an index. A round keeps its devices' centers as int16 and their accuracies as float32, so
that MAX_CELLS of them are 24 MB. Older rounds are dropped here; metrics.jsonl has them all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.rounds.round_record import RoundRecord

MAX_ROUNDS = 1_000  # that are kept of a run, at most
MAX_CELLS = 4_000_000  # devices times rounds
NO_CENTER = -1
MAX_GRID_ROWS, MAX_GRID_ROUNDS = 200, 300  # of the grid of assignments
CENTER_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"  # a center in the grid; "." is none
COPIED_FIELDS = (
    "round",
    "accuracy",
    "f1_of_devices",
    "f1_pooled",
    "secure",
    "per_center",
    "loss",
    "loss_per_center",
    "bytes",
    "seconds",
)

Centers = NDArray[np.int16]


class RunHistory:
    """One run. `lines` are its rounds' short records, oldest first; `sent` counts the bytes of all its rounds.

    `updates` counts those of a run without rounds; None for one with rounds. `best` is the highest accuracy of all its
    rounds, `at` its round, or after how many updates it was tested; None before a test.
    """

    def __init__(self, name: str, method: str, of: int) -> None:
        self.name, self.method, self.of = name, method, of
        self.lines: deque[dict[str, Any]] = deque()
        self.sent = {"down": 0, "up": 0}
        self.updates: int | None = None
        self.best: dict[str, Any] | None = None
        self._centers: deque[Centers] = deque()
        self._accuracies: deque[NDArray[np.float32]] = deque()
        unknown = np.empty(0)
        self._tested = {"accuracy": unknown, "loss": unknown}  # by device, of its newest test; NaN without one

    def add(self, event: RoundRecord, numbers: Mapping[str, int]) -> dict[str, Any]:
        """A `round` event -> its line. `numbers` has every device that the event names."""
        centers = np.full(len(numbers), NO_CENTER, np.int16)
        for cid, center in event["assignment"].items():
            centers[numbers[cid]] = center
        accuracies = np.full(len(numbers), np.nan, np.float32)
        for cid, accuracy in event["per_device"].items():
            accuracies[numbers[cid]] = accuracy
        for name, told in (("accuracy", event["per_device"]), ("loss", event.get("loss_per_device", {}))):
            self._tested[name] = _with_newest(self._tested[name], numbers, told)
        line: dict[str, Any] = {key: value for key, value in event.items() if key in COPIED_FIELDS}
        if (centers_alone := event.get("centers")) is not None:
            line["centers"] = {key: centers_alone[key] for key in ("accuracy", "per_center")}
        if metrics := event.get("metrics"):
            line["metrics"] = {name: value["micro"] for name, value in metrics.items()}
        line["sizes"] = np.bincount(centers[centers >= 0], minlength=len(event["per_center"])).tolist()
        line["moved"] = self._moved(centers)
        line |= self._count(event)
        line["refused"] = len(event.get("refused", {}))
        micro = event["accuracy"]["micro"]
        if micro is not None and (self.best is None or micro > self.best["accuracy"]):
            self.best = {"at": line.get("tested", line["round"]), "accuracy": micro}
        self.lines.append(line)
        self.sent = {"down": self.sent["down"] + event["bytes"]["down"], "up": self.sent["up"] + event["bytes"]["up"]}
        self._centers.append(centers)
        self._accuracies.append(accuracies)
        while len(self.lines) > min(MAX_ROUNDS, max(1, MAX_CELLS // max(1, len(numbers)))):
            for kept in (self.lines, self._centers, self._accuracies):
                kept.popleft()
        return line

    def _count(self, event: RoundRecord) -> dict[str, Any]:
        """Of a run without rounds: its updates so far, the versions, and after how many updates a test began."""
        if "asynchronous" not in event:
            return {}
        told = event["asynchronous"]
        self.updates = (self.updates or 0) + told["counted"]
        tested = self.updates
        if "tested" in told and (began := told["tested"]["round"]) != event["round"]:
            tested = next((line["updates"] for line in reversed(self.lines) if line["round"] == began), 0)
        return {"updates": self.updates, "tested": tested, "versions": list(told["versions"])}

    def _moved(self, centers: Centers) -> int:
        """The number of devices whose center differs from the one in the round before."""
        if not self._centers:
            return 0
        before = self._centers[-1]
        both = min(len(before), len(centers))
        return int(np.count_nonzero((before[:both] != centers[:both]) & (before[:both] >= 0) & (centers[:both] >= 0)))

    def centers(self, count: int) -> list[int]:
        """The newest center of each of `count` devices; NO_CENTER without one."""
        newest = self._centers[-1].tolist() if self._centers else []
        return [*newest, *[NO_CENTER] * (count - len(newest))]

    def newest(self, count: int) -> dict[str, Any]:
        """The newest center, accuracy and loss of each of `count` devices, None for what is not known; and `sent`."""
        tested = {name: _shown(known, count) for name, known in self._tested.items()}
        return {"centers": self.centers(count), "sent": dict(self.sent), **tested}

    def of_device(self, number: int) -> list[dict[str, Any]]:
        """The center and the accuracy of a device in each round; None where it had none."""
        found = []
        for line, centers, accuracies in zip(self.lines, self._centers, self._accuracies, strict=True):
            center = int(centers[number]) if number < len(centers) else NO_CENTER
            accuracy = float(accuracies[number]) if number < len(accuracies) else float("nan")
            found.append(
                {
                    "round": line["round"],
                    "center": None if center == NO_CENTER else center,
                    "accuracy": None if np.isnan(accuracy) else round(accuracy, 6),
                }
            )
        return found

    def grid(self, names: Sequence[str]) -> dict[str, Any]:
        """At most MAX_GRID_ROWS devices, sorted by newest center and name, times the newest rounds, as CENTER_MARKS."""
        newest = self.centers(len(names))
        order = sorted(range(len(names)), key=lambda i: (newest[i] == NO_CENTER, newest[i], names[i]))
        if len(order) > MAX_GRID_ROWS:
            order = [order[int(i)] for i in np.linspace(0, len(order) - 1, MAX_GRID_ROWS).round()]
        past = list(self._centers)[-MAX_GRID_ROUNDS:]
        rows = ["".join(_mark(centers, i) for centers in past) for i in order]
        first = self.lines[-len(past)]["round"] if past else 1
        return {"first": first, "devices": [names[i] for i in order], "rows": rows, "of": len(names)}


def _with_newest(
    known: NDArray[np.float64], numbers: Mapping[str, int], told: Mapping[str, float]
) -> NDArray[np.float64]:
    """`known` [m] with what a round tells of some devices, [len(numbers)]."""
    found = np.full(len(numbers), np.nan)
    found[: len(known)] = known
    here = [(numbers[cid], value) for cid, value in told.items() if cid in numbers]
    if here:
        which, values = zip(*here, strict=True)
        found[list(which)] = values
    return found


def _shown(known: NDArray[np.float64], count: int) -> list[float | None]:
    """Four digits for each of `count` devices; None where nothing is known."""
    found = [None if value != value else value for value in np.round(known, 4).tolist()]  # noqa: PLR0124 - NaN
    return [*found, *[None] * (count - len(found))]


def _mark(centers: Centers, number: int) -> str:
    center = int(centers[number]) if number < len(centers) else NO_CENTER
    return "." if center == NO_CENTER else CENTER_MARKS[center % len(CENTER_MARKS)]
