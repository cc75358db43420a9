"""What a device of a drill answers in masked sums: its words are drawn, all else is a device's own code.

The files of a task are read from the coordinator's folder; how they travel is played elsewhere.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.attack_drill.loopback_copy import FEDERATION
from coordinator.attack_drill.plausible_replies import MOVE
from edge_client.protocol import codecs, sum_codec
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.program import Program
from edge_client.protocol.secure import device_stages
from edge_client.protocol.secure.device_sums import DeviceSums
from edge_client.protocol.summed_task import SCORE_LEVELS, SOFT, SummedFit, SummedProbe, Words
from edge_client.protocol.task import Flat

Change = Callable[[Words], Words]


@dataclass(frozen=True, kw_only=True)
class AskedOnce:
    """A stage as a device was asked it: its state before, the coordinator's message, and the task's place."""

    sums: DeviceSums
    message: bytes
    place: device_stages.Place


@dataclass
class PlayedSums:
    """A device's part in masked sums. `asked` has the last task of each stage, `shown` all places of "show"."""

    cid: str
    program: Program
    read: Callable[[str], bytes]  # a blob by its hash
    sums: DeviceSums = field(init=False)
    asked: dict[str, AskedOnce] = field(default_factory=dict)
    shown: list[device_stages.Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sums = DeviceSums(federation=FEDERATION, cid=self.cid)

    def answer(self, task: Mapping[str, Any], change: Change = np.asarray) -> bytes:
        """The answer of an honest device, but for `change` of its words."""
        stage, place = task["stage"], (task["run"], task["round"], task["exchange"])
        message = self.read(Manifest.from_json(task["message"]).sha256) if "message" in task else b""
        self.asked[stage] = AskedOnce(sums=self.sums, message=message, place=place)
        work = sum_codec.read_work(task, self._vector) if "work" in task else None
        data = sum_codec.KEPT
        if stage == "prekeys":
            random = secrets.token_bytes(device_stages.RANDOM_BYTES)
            self.sums, data = device_stages.offer_prekeys(self.sums, random, task.get("after", -1))
        elif stage == "shares":
            self.sums, data = device_stages.deal(self.sums, message, place)
        elif stage == "show":
            self.shown.append(place)
            self.sums, data = device_stages.show(self.sums, message, place)
        elif isinstance(work, SummedFit | SummedProbe):
            words = change(self._words(work))
            if stage == "tell":
                return sum_codec.encode_told(words)
            self.sums, data = device_stages.mask(self.sums, message, place, work.scale, words)
        return data

    def _vector(self, manifest: Manifest) -> Flat:
        data = self.read(manifest.sha256)
        if manifest.kind == "points":
            return sum_codec.decode_points(data)
        return codecs.decode_vector(data, self.program.schema, kind=manifest.kind)

    def _words(self, work: SummedFit | SummedProbe) -> Words:
        """Of a device that moved each parameter of its first center by MOVE, and is right in half of its tests."""
        if isinstance(work, SummedProbe):
            half = SCORE_LEVELS // 2
            return np.array([1, 2, half, half, 1], np.uint32)
        if work.points is not None and work.points_open is not None and work.stage in ("count", "points"):
            return _cluster_words(work.points.shape, work.points_open, stage=work.stage)
        k, first = len(work.centers), work.group or 0
        own = next(i % k for i in range(first, first + k) if i % k in work.open)
        weights = np.isin(np.arange(k), work.open) / k if work.choose in SOFT else np.eye(k)[own]
        if work.stage == "choose":
            return work.scale.modulo(weights > 0)
        counts = np.ones(k) if work.choose == "posterior" else weights
        return np.concatenate([_moved(work, counts[center] * work.share) for center in work.open])


def _moved(work: SummedFit, share: float) -> Words:
    """The block of a center of which the device has this share."""
    size, scale = work.centers.shape[1], work.scale
    if share == 0:
        return np.zeros(size + 2, np.uint32)
    step = min(MOVE, scale.clip / math.sqrt(size)) / scale.clip
    words = scale.to_words(np.append(np.full(size, step), 1.0) * share, np.random.default_rng(0))
    return np.append(words, np.uint32(1))


def _cluster_words(shape: tuple[int, ...], is_open: NDArray[np.bool_], *, stage: str) -> Words:
    """Of a device whose point is the first open centroid of each run."""
    runs, k, width = shape
    words = np.zeros((runs, k, 1 if stage == "count" else width + 2), np.uint32)
    words[np.arange(runs), is_open.argmax(axis=1), -1] = is_open.any(axis=1)
    return words.ravel()
