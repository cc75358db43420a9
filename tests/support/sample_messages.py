"""One valid message of every kind, and a small schema; the tests of this room change one thing at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.task import Schema, TensorSpec

BLOB = b"blob" * 1000
SHA = manifest_of(BLOB, "model").sha256
MODEL = manifest_of(BLOB, "model").to_json()
OTHER = manifest_of(b"another", "model").to_json()
LINEAR = manifest_of(BLOB, "linear").to_json()
STATS = manifest_of(b"stats", "stats", inline=True).to_json()
PROGRAM = replace(manifest_of(BLOB, "program"), key="0" * 16, sig="0" * 128).to_json()
KEY = {"run": "r1", "round": 2, "exchange": 0}
TASK = {
    **KEY,
    "left_ms": 60_000,
    "program": PROGRAM,
    "container": manifest_of(BLOB, "container").to_json(),
    "schema": "0" * 64,
}

UP: dict[str, dict[str, Any]] = {
    "st": {"s": "on", "bd": 1, "sw": "0.1.0", "caps": {"engine": "onnx", "n": 100, "codecs": ["f32"], "window": 4}},
    "get": {"sha256": SHA, "block": 65_536, "at": [[0, 4], [7, 1]]},
    "rdy": {**KEY, "attempt": 0, "n": 100, "what": "stats", "update": STATS, "seconds": 1.5, "metrics": {"loss": 0.5}},
    "near": {"how": "loss", "stats": STATS, "n": 10},
    "nack": {"re": "c1-1", "code": "no_data", "detail": "fewer samples than a batch", **KEY},
    "served": {"center": 2, "sha256": SHA, "n": 20, "metrics": {"accuracy": 0.9, "loss": 0.3}},
}
FIT: dict[str, Any] = {
    **TASK,
    "job": "fit",
    "start": MODEL,
    "anchor": "start",
    "linear": LINEAR,
    "lr": 0.1,
    "momentum": 0.0,
    "mu": 0.5,
    "steps": 10,
    "batch": 32,
    "seed": 7,
    "rows": "posterior:0",
    "slot": "main",
    "upload": True,
    "center": 1,
    "reply": {"codec": "f32", "base": "start", "max_size": 1 << 20},
}
PROBE: dict[str, Any] = {
    **TASK,
    "job": "probe",
    "models": [MODEL, OTHER, {"own": "main", "init": MODEL}, {"own": "personal"}],
    "want": ["loss", "confusion"],
    "prior": [0.5, 0.5, 0.0, 0.0],
    "split": "test",
    "batch": 32,
    "seed": 7,
    "limit": 100,
    "reply": {"codec": "f32", "base": "zero", "max_size": 1 << 20},
}
DOWN: dict[str, dict[str, Any]] = {
    "coord": {
        "boot": "0123456789abcdef",
        "online": True,
        "proto": [1],
        "spread_ms": 100,
        "block": 65_536,
        "window": 4,
        "src": ["mqtt", "https://models.example/blobs"],
        "state": {"doing": "gather", "newcomers": "now", "here": 1, "needed": 3},
    },
    "cat": {"ver": 1, "catalog": manifest_of(BLOB, "catalog").to_json()},
    "task": FIT,
    "stop": {**KEY, "why": "closed"},
    "rebirth": {},
    "go": {"re": "d1-2", "sha256": SHA, "shard": 0, "window": 4, "have": "CQI="},
    "ack": {**KEY, "attempt": 0, "sha256": SHA, "status": "retry", "retry_ms": 500, "detail": "disk full"},
    "err": {"re": "d1-1", "code": "rate", "retry_ms": 1000},
}
NEAR_ANSWER: dict[str, Any] = {
    "re": "d1-4",
    "center": 1,
    "distance": 0.25,
    "alternatives": [{"center": 0, "distance": 0.5}],
}
ALL: list[tuple[str, dict[str, Any]]] = [
    *UP.items(),
    *((kind, {"epoch": 3, **fields}) for kind, fields in DOWN.items()),
    ("task", {"epoch": 3, **PROBE}),
    ("near", {"epoch": 3, **NEAR_ANSWER}),
]
SCHEMA = Schema(
    (
        TensorSpec(name="conv.weight", role="p", shape=(2, 1, 2, 2)),
        TensorSpec(name="fc.weight", role="p", shape=(3, 2)),
        TensorSpec(name="fc.bias", role="p", shape=(3,)),
        TensorSpec(name="scale", role="p", shape=()),
        TensorSpec(name="bn.running_mean", role="b", shape=(2,)),
    )
)
