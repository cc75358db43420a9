"""The result of a choice: the center, the reasons, how it fits, and the predictions of the center's file.

The file is in the cache already, under its hash; it is kept beside as state/center-K.FORMAT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.engines.center_file import run_file
from edge_client.engines.targets import accuracy_of, classes_last
from edge_client.errors import ProgramRefused
from edge_client.nearest.choose_center import UNSURE, Selection
from edge_client.printable import printable_line
from edge_client.protocol.program import IGNORED, Program
from edge_client.protocol.task import Array
from edge_client.training.learner import log_softmax
from edge_client.transport.blobs import write_atomically

MAX_SHOWN_CLASSES = 10  # classes in words


@dataclass(frozen=True, kw_only=True)
class NearestAnswer:
    """What a visit found. `center` is None when none is taken; `losses`: mean losses by center looked at."""

    device: str
    center: int | None
    losses: Mapping[int, float]
    n: int  # samples that the file was run on, behind `accuracy`, `loss` and `predicted`; 0 where none is taken
    samples: int = 0  # behind the choice
    accuracy: float | None = None
    loss: float | None = None  # cross-entropy of the file's logits, or its squared error
    format: str | None = None
    file: str | None = None  # where the center's file is now
    sha256: str | None = None
    bytes: int | None = None  # of the file
    way: str = "loss"
    fit: str | None = None  # "well", "badly" or "none"; None where it is not known
    limit_devices: int | None = None  # on how many devices the limits of the fit rest; None where there are none
    ranking: tuple[Mapping[str, Any], ...] = ()  # {"center", "probability"}, best first; among the centers, sum 1
    mixture: Mapping[int, float] = field(default_factory=dict)  # share of the samples that each center explains best
    why: tuple[str, ...] = ()
    predicted: Mapping[int, int] = field(default_factory=dict)  # class -> how many of the n samples
    class_names: tuple[str, ...] = ()  # of the classes 0, 1, ..., by the device's schema.toml, else by the fleet
    fetched: int = 0  # bytes of this visit
    signed_by: str | None = None  # the federation whose signature was checked
    personal: Mapping[str, Any] | None = None  # {"steps", "file", "model", "before", "loss_before", "accuracy", "loss"}

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {
            name: {str(k): v for k, v in getattr(self, name).items()} for name in ("losses", "mixture", "predicted")
        }

    def in_words(self) -> str:
        """A few plain lines."""
        lines = [f"{self.device}: {self._headline()}"]
        lines += [f"  {line}" for line in self.why]
        if self.signed_by is not None:
            lines.append(f"  signed by {self.signed_by}")
        if self.file is not None:
            lines.append(f"  file {self.file} ({self.format}, {self.bytes:,} bytes), {self.fetched:,} bytes fetched")
        if self.predicted:
            most = sorted(self.predicted.items(), key=lambda item: (-item[1], item[0]))[:MAX_SHOWN_CLASSES]
            labels = sum(self.predicted.values())  # of a text more than samples
            of = f"{labels} labels of {self.n} samples" if labels > self.n else f"{self.n} samples"
            lines.append(f"  of {of} it says " + ", ".join(f"{self._class(k)}: {n}" for k, n in most))
        if self.accuracy is not None:
            lines.append(f"  accuracy {self.accuracy:.1%} on {self.n} samples")
        elif self.loss is not None:
            what = "cross-entropy" if self.predicted else "mean squared error"
            lines.append(f"  {what} {self.loss:.4g} on {self.n} samples")
        if self.personal is not None:
            kept = " and ".join(filter(None, (self.personal["file"], self.personal["model"])))
            lines.append(f"  {self.personal['steps']} local steps{self._gain()}; kept in {kept}")
        return "\n".join(lines)

    def _gain(self) -> str:
        """What local steps have changed; nothing without held-out samples."""
        had = self.personal or {}
        if had.get("accuracy") is not None:
            return f": accuracy {had['before']:.1%} before, {had['accuracy']:.1%} after"
        return "" if had.get("loss") is None else f": loss {had['loss_before']:.4g} before, {had['loss']:.4g} after"

    def _headline(self) -> str:
        if self.center is not None:
            fits = "whether it fits is not known" if self.fit is None else f"fits {self.fit}"
            return f"center {self.center} (by {self.way}){self._lead()}: {fits}"
        if self.fit is None:
            return "it is not known whether a center fits this data, so none is taken"
        return "no center fits this data"

    def _class(self, k: int) -> str:
        return printable_line(self.class_names[k]) if k < len(self.class_names) else f"class {k}"

    def _lead(self) -> str:
        """Nothing, unless the samples hardly tell this center from the next."""
        if len(self.ranking) < 2 or (self.ranking[0]["probability"] or 1.0) >= UNSURE:  # noqa: PLR2004 - it and the next
            return ""
        return f", hardly ahead of center {self.ranking[1]['center']}"


def no_center_answer(device: str, chosen: Selection, *, fetched: int, signed_by: str | None) -> NearestAnswer:
    """The answer of a device that takes nothing home."""
    return NearestAnswer(
        device=device,
        center=None,
        losses=dict(chosen.distances.get("loss", {})),
        n=0,
        samples=chosen.samples,
        way=chosen.way,
        fit=chosen.fit,
        limit_devices=chosen.limit_devices,
        ranking=_ranked(chosen),
        mixture=chosen.mixture,
        why=chosen.reasons,
        fetched=fetched,
        signed_by=signed_by,
    )


def evaluate_center(  # noqa: PLR0913 - the parts of an answer
    device: str,
    chosen: Selection,
    path: Path,
    local: DeviceData,
    *,
    program: Program,
    state: Path,
    file_format: str,
    sha256: str,
    labels: bool,
    threads: int,
    fetched: int,
    signed_by: str | None,
) -> NearestAnswer:
    """Run the center's file on held-out samples where there are some, and say all there is to say.

    The file gets a name in the folder `state`, from which the cache does not remove it.
    """
    content = path.read_bytes()
    data = (local.test or local.train) if labels else local.train
    logits = run_file(file_format, content, data.x, threads=threads)
    if np.isnan(logits).any():
        raise ProgramRefused(f"the {file_format} file of center {chosen.center} gives NaN", hint="try another --format")
    scored = labels and (program.has_classes or not program.own_loss)  # the file has no loss of the user's own
    accuracy, loss = score(logits, data, soft=program.has_classes) if scored else (None, None)
    kept = state / f"center-{chosen.center}.{file_format}"
    write_atomically(kept, content)
    missing = no_center_answer(device, chosen, fetched=fetched, signed_by=signed_by)
    return replace(
        missing,
        center=chosen.center,
        n=len(data),
        accuracy=accuracy,
        loss=loss,
        format=file_format,
        file=str(kept),
        sha256=sha256,
        bytes=len(content),
        predicted=_counted(logits, program),
    )


def score(logits: Array, data: Dataset, *, soft: bool = False) -> tuple[float | None, float | None]:
    """Outputs [n, ...] and what is true -> (accuracy or None for targets that are no classes, mean loss).

    `soft`: targets are probabilities. Both are None where no label counts.
    """
    if not np.issubdtype(data.y.dtype, np.integer):
        if soft:
            return None, float(-(data.y * log_softmax(logits)).sum(axis=-1).mean())
        return None, float(np.square(logits - data.y).mean())
    counted = data.y != IGNORED
    if not counted.any():
        return None, None
    truth, scores = data.y[counted], log_softmax(classes_last(logits, data.y))[counted]
    return accuracy_of(logits, data.y), float(-scores[np.arange(len(truth)), truth].mean())


def _counted(logits: Array, program: Program) -> dict[int, int]:
    if not program.has_classes:
        return {}
    counts = np.bincount(logits.argmax(axis=1 + program.class_axis).ravel())
    return {int(k): int(counts[k]) for k in np.flatnonzero(counts)}


def _ranked(chosen: Selection) -> tuple[Mapping[str, Any], ...]:
    return tuple({"center": k, "probability": chosen.probabilities.get(k)} for k in chosen.ranking)
