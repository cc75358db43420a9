"""One task of each stage of a masked sum, and its canonical message; and messages that a device must refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.sum_codec import SumStage, encode_points, stage_fields
from edge_client.protocol.summed_task import SummedFit, SummedProbe, SumScale
from edge_client.protocol.task import Fit, Flat
from tests.support.sample_messages import TASK

SCALE = SumScale(bits=20, devices=7, clip=2.5)
CENTERS = np.arange(12, dtype=np.float32).reshape(2, 6)
FIT = SummedFit(
    start=CENTERS[0], steps=3, lr=0.5, batch=8, seed=7, upload=False, stage="choose", choose="nearest",
    centers=CENTERS, scale=SCALE, open=(0, 1), share=0.75, compare=((0, 2), (3, 5)), hysteresis=0.25,
)  # fmt: skip
STAGES: dict[str, SumStage] = {
    "prekeys": SumStage(stage="prekeys", after=15),
    "shares": SumStage(stage="shares", message=b"a roster"),
    "add": SumStage(stage="add", message=b"a relay", work=replace(FIT, stage="add", open=(1,))),
    "add, k-means": SumStage(
        stage="add",
        message=b"a relay",
        work=replace(
            FIT, stage="points", dealt=True, points=np.arange(16, dtype=np.float64).reshape(2, 2, 4) / 8,
            points_open=np.array([[True, False], [True, True]]),
        ),
    ),
    "add, evaluation": SumStage(
        stage="add",
        message=b"a relay",
        work=SummedProbe(
            models=list(CENTERS), want=frozenset({"confusion"}), split="test", batch=8, seed=0, served="center",
            usual=1, scale=SCALE,
        ),
    ),
    "show": SumStage(stage="show", message=b"an unmask"),
    "tell": SumStage(stage="tell", work=FIT),
    "keep": SumStage(
        stage="keep", work=Fit(start="own", init=CENTERS[0], steps=3, lr=0.5, batch=8, seed=7, slot="mine")
    ),
}  # fmt: skip


def blob_of(flat: Flat, kind: str) -> bytes:
    """Stands for the blob of a vector; that of centroids is the real one."""
    return encode_points(flat) if kind == "points" else np.asarray(flat, dtype="<f4").tobytes()


def put(flat: Flat, kind: str) -> Manifest:
    return manifest_of(blob_of(flat, kind), kind)


def known_vectors() -> dict[str, Flat]:
    """The centers and the centroids that the tasks name, by the sha256 in their manifests."""
    known: dict[str, Flat] = {put(row, "model").sha256: row for row in CENTERS}
    means = STAGES["add, k-means"].work
    if isinstance(means, SummedFit) and means.points is not None:
        known[put(means.points, "points").sha256] = means.points.ravel()
    return known


def named_vectors() -> dict[str, list[float]]:
    """The same for other languages: the numbers that a device would have read from those blobs."""
    return {name: vector.tolist() for name, vector in known_vectors().items()}


def get(manifest: Manifest) -> Flat:
    """What a device would have fetched. Raises Malformed for anything else."""
    known = known_vectors()
    if manifest.sha256 not in known:
        raise Malformed("unreachable", "no such blob")
    return known[manifest.sha256]


def put_message(data: bytes) -> Manifest:
    return manifest_of(data, "sum", inline=True)


def job(name: str) -> dict[str, Any]:
    """The job fields of one of STAGES."""
    return stage_fields(STAGES[name], put, put_message)


def task_message(fields: dict[str, Any]) -> bytes:
    reply = {"codec": "f32", "base": "zero", "max_size": 65_536}
    return messages.write_message("task", ident="c1-7", t_ms=1_700_000_000_000, epoch=1, **TASK, reply=reply, **fields)


def refused() -> dict[str, dict[str, Any]]:
    """Job fields that contradict each other."""
    add, means = job("add"), job("add, k-means")
    open_twice = {**add, "work": {**add["work"], "sum": {**add["work"]["sum"], "open": [1, 1]}}}
    open_unknown = {**add, "work": {**add["work"], "sum": {**add["work"]["sum"], "open": [2]}}}
    without = {k: v for k, v in means["work"]["sum"].items() if k != "points_open"}
    uncompared = {k: v for k, v in add["work"]["sum"].items() if k != "compare"}
    served = job("add, evaluation")["work"]
    return {
        "no message": {k: v for k, v in add.items() if k != "message"},
        "no work": {k: v for k, v in add.items() if k != "work"},
        "work among keys": {**job("shares"), "work": job("keep")["work"]},
        "a number beside a roster": {**job("shares"), "after": 3},
        "words of a kept fit": {**job("keep"), "work": add["work"]},
        "nothing to add": {**add, "work": job("keep")["work"]},
        "a center twice": open_twice,
        "an unknown center": open_unknown,
        "no open centroids": {**means, "work": {**means["work"], "sum": without}},
        "no columns to compare": {**add, "work": {**add["work"], "sum": uncompared}},
        "columns that end before they start": {
            **add,
            "work": {**add["work"], "sum": uncompared | {"compare": [[0, 2], [5, 3]]}},
        },
        "columns that end where they start": {
            **add,
            "work": {**add["work"], "sum": uncompared | {"compare": [[0, 2], [5, 5]]}},
        },
        "unneeded columns that end before they start": {
            **add,
            "work": {**add["work"], "sum": uncompared | {"choose": "loss", "compare": [[5, 3]]}},
        },
        "an unknown model to serve": {**add, "work": {**served, "sum": served["sum"] | {"usual": 2}}},
    }
