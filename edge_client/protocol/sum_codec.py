"""The stages of a masked sum as tasks: `SumStage` to the job fields of a `task` message, and back on the device.

A sum over the network is a chain of exchanges, one per stage. The messages of sum_messages.py travel as signed blobs of
kind "sum", and a device's answer is a blob of kind "masked" with these bytes:

    stage    the task brings                       the answer
    prekeys  nothing                               PrekeyBatch
    shares   SumRoster                             DealtShares
    add      RelayedShares, and what to compute    the masked words, `write_upload`
    show     UnmaskRequest                         RevealedShares
    tell     what to compute                       the words in the clear, u32 [K]: the device's choice of a center
    keep     a fit whose model stays               one zero byte
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import task_codec
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.summed_task import EVALUATION_WORDS, SummedFit, SummedProbe, SumScale, Words
from edge_client.protocol.task import F64, Array, Flat, Probe, Task

KEPT = b"\0"  # the answer to a fit of which nothing is told
_PLAIN = ("choose", "share", "group", "dealt", "hysteresis", "sigma", "refresh", "repeats", "move")


@dataclass(frozen=True, kw_only=True)
class SumStage:
    """What one device is asked in one stage of a sum; `message` is empty where the stage has none."""

    stage: str
    message: bytes = b""
    after: int = -1  # prekeys have higher numbers
    work: Task | None = None  # a SummedFit or SummedProbe, but for stage "keep"


def stage_fields(task: SumStage, put: task_codec.PutVector, put_message: Callable[[bytes], Manifest]) -> dict[str, Any]:
    """The job fields of a `task` message. The same stage gives the same fields, so that a replay can be compared."""
    found: dict[str, Any] = {"job": "sum", "stage": task.stage}
    if task.after >= 0:
        found["after"] = task.after
    if task.message:
        found["message"] = put_message(task.message).to_json()
    if task.work is not None:
        found["work"] = _work_fields(task.work, put)
    return found


def _work_fields(work: Task, put: task_codec.PutVector) -> dict[str, Any]:
    found = task_codec.task_fields(work, put)
    if isinstance(work, SummedFit):
        found["sum"] = _fit_fields(work, put)
    elif isinstance(work, SummedProbe):
        found["sum"] = {"served": work.served, "usual": int(work.usual), "scale": _scale_fields(work.scale)}
    return found


def _fit_fields(work: SummedFit, put: task_codec.PutVector) -> dict[str, Any]:
    usual = {f.name: f.default for f in fields(SummedFit)}
    found = {name: getattr(work, name) for name in _PLAIN if getattr(work, name) != usual[name]}
    found |= {
        "part": work.stage,
        "choose": work.choose,
        "share": float(work.share),
        "centers": [put(center, "model").to_json() for center in work.centers],
        "open": [int(k) for k in work.open],
        "scale": _scale_fields(work.scale),
    }
    if work.compare:
        found["compare"] = [[int(start), int(end)] for start, end in work.compare]
    if work.points is not None:
        found["points"] = put(work.points, "points").to_json()
    if work.points_open is not None:
        found["points_open"] = [int(one) for one in work.points_open.ravel()]
    return found


def _scale_fields(scale: SumScale) -> dict[str, float]:
    return {name: value for name, value in vars(scale).items() if name != "noise" or value}


def read_work(message: Mapping[str, Any], get: task_codec.GetVector) -> Task:
    """The work of a `task` message of job "sum" (read by messages.read). Raises Malformed."""
    work, vectors = message["work"], dict[str, Flat]()

    def once(manifest: Manifest) -> Flat:
        if manifest.sha256 not in vectors:
            vectors[manifest.sha256] = get(manifest)
        return vectors[manifest.sha256]

    plain = task_codec.read_task(work, once)
    added = work.get("sum")
    if added is None:
        return plain
    given = {f.name: getattr(plain, f.name) for f in fields(type(plain))}
    scale = SumScale(**added["scale"])
    try:
        if isinstance(plain, Probe):
            return SummedProbe(**given, served=added["served"], usual=added["usual"], scale=scale)
        centers = np.stack([once(Manifest.from_json(center)) for center in added["centers"]])
        how: dict[str, Any] = {name: added[name] for name in _PLAIN if name in added}
        how["compare"] = tuple((start, end) for start, end in added.get("compare", ()))
        if (columns := sum(end - start for start, end in how["compare"])) > (size := centers.shape[1]):
            raise Malformed("bad_task", f"{columns} columns of a model of {size} are compared")
        if "points" in added:
            how["points"] = _points(once(Manifest.from_json(added["points"])), centers, how["compare"])
        if "points_open" in added:
            how["points_open"] = np.array(added["points_open"], dtype=np.bool_).reshape(-1, len(centers))
            if how["points_open"].shape != how["points"].shape[:2]:
                raise Malformed("bad_task", "points_open has another shape than the centroids")
        return SummedFit(**given, stage=added["part"], centers=centers, scale=scale, open=tuple(added["open"]), **how)
    except (KeyError, TypeError, ValueError) as wrong:
        raise Malformed("bad_task", str(wrong)) from wrong


def _points(values: Flat, centers: Flat, compare: tuple[tuple[int, int], ...]) -> F64:
    """[restarts, K, columns]; the columns are those that `compare` names in a center."""
    width = sum(len(range(*slice(start, end).indices(centers.shape[1]))) for start, end in compare)
    if not width or values.size % (len(centers) * width):
        raise Malformed("bad_task", f"{values.size} values for centroids of {width} columns")
    return values.astype(np.float64).reshape(-1, len(centers), width)


def encode_points(points: Array) -> bytes:
    """A blob of kind "points": float64, little-endian."""
    return np.ascontiguousarray(points, dtype="<f8").tobytes()


def decode_points(data: bytes) -> F64:
    """Read what `encode_points` wrote, as one row. Raises Malformed."""
    if len(data) % 8:
        raise Malformed("bad_schema", f"points of {len(data)} bytes")
    values: F64 = np.frombuffer(data, dtype="<f8")
    if not np.isfinite(values).all():
        raise Malformed("not_finite", "points are not finite")
    return values


def encode_told(words: Words) -> bytes:
    """The answer of stage "tell"."""
    return words.astype("<u4").tobytes()


def decode_told(data: bytes, centers: int) -> Words:
    """[centers] one 1 and zeros else. Raises Malformed."""
    if len(data) != 4 * centers:
        raise Malformed("bad_schema", f"a choice among {centers} centers in {len(data)} bytes")
    words = np.frombuffer(data, dtype="<u4").astype(np.uint32)
    if words.max() != 1 or words.sum() != 1:
        raise Malformed("rejected", "a device chooses one center")
    return words


def words_of(work: Task) -> int:
    """The number of words that a device adds for this work."""
    if isinstance(work, SummedProbe):
        return EVALUATION_WORDS
    if not isinstance(work, SummedFit):
        raise TypeError(f"{type(work).__name__} adds nothing")
    if work.stage == "choose":
        return len(work.centers)
    if work.stage == "add" or work.points is None:
        return len(work.open) * (int(work.centers.shape[1]) + 2)
    runs, k, width = (int(size) for size in work.points.shape)
    return runs * k if work.stage == "count" else runs * k * (width + 2)
