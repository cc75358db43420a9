"""What a device answers that has not trained: values of the right form and a usual size, from a stream of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edge_client.protocol import codecs
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, Flat, Reply

MOVE = 0.1  # of each parameter
TEST_SAMPLES = 10


def is_update(task: Mapping[str, Any]) -> bool:
    """Whether the task is answered by a trained model."""
    return task["job"] == "fit" and bool(task.get("upload", True))


def is_test(task: Mapping[str, Any]) -> bool:
    """Whether the task is answered on held-out samples."""
    return task["job"] == "probe" and task.get("split") == "test"


def plausible_delta(task: Mapping[str, Any], cid: str, program: Program) -> Flat:
    """[schema.size]: every parameter moves by MOVE; buffers stay, or are one where the base is zero."""
    schema = program.schema
    delta = np.full(schema.size, 1.0 if task["reply"]["base"] == "zero" else 0.0, np.float32)
    delta[: schema.n_params] = _stream(cid).choice([-MOVE, MOVE], schema.n_params)
    return delta


def plausible_statistics(task: Mapping[str, Any], cid: str, program: Program, n: int) -> Reply:
    """The statistics that the task wants, over `n` samples. Raises KeyError for one that is not known here."""
    rng, classes = _stream(cid), program.classes
    models = len(task.get("models", [None]))
    losses = rng.uniform(1.0, 2.0, models)  # drawn first, so that no count changes them
    rows = 1 if "prior" in task else models
    make: dict[str, Callable[[], dict[str, Any]]] = {
        "loss": lambda: {"losses": losses},
        "votes": lambda: {"votes": rng.multinomial(n, np.full(models, 1 / models))},
        "posterior": lambda: {"posterior": np.full(models, 1 / models)},
        "confusion": lambda: {"confusion": _matrices(rng, rows, classes, n)},
        "errors": lambda: {"errors": np.tile([0.5, 0.5, 1.0], (rows, 1))},
        "positions": lambda: {"positions": np.tile([n, n // 2, float(n)], (rows, 1))},
        "labels": lambda: {"labels": rng.multinomial(n, np.full(classes, 1 / classes)).astype(np.float64)},
        "grad": lambda: {"grad": rng.choice([-MOVE, MOVE], program.schema.n_params).astype(np.float32)},
    }
    fields: dict[str, Any] = {}
    for want in sorted(task["want"]) if task["job"] == "probe" else ["loss"]:
        fields |= make[want]()
    return Reply(n=n, **fields)


def all_wrong(said: Reply) -> Reply:
    """The same, every sample of the first class and taken for the last one."""
    if said.confusion is None:
        return said
    confusion = np.zeros_like(said.confusion)
    confusion[:, 0, -1] = said.n
    return replace(said, confusion=confusion)


def encoded_delta(task: Mapping[str, Any], delta: Flat, program: Program) -> bytes:
    """The file of an update, in the codec and from the base that the task names."""
    asked = task["reply"]
    base = "zero" if asked["base"] == "zero" else task[asked["base"]]["sha256"]
    return codecs.encode_vector(delta, program.schema, codec=asked["codec"], kind="delta", base=base)


def _stream(cid: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(cid.encode()))


def _matrices(rng: np.random.Generator, rows: int, classes: int, n: int) -> Array:
    counts: Array = rng.multinomial(n, np.full(classes**2, 1 / classes**2), size=rows)
    return counts.reshape(rows, classes, classes)
