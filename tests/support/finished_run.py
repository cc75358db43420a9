"""A finished run made by hand: 4 devices of 2 groups, 3 rounds, one wrong assignment in the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GROUPS = {"device-00": 0, "device-01": 1, "device-02": 0, "device-03": 1}
ASSIGNMENTS = [{**GROUPS, "device-02": 1}, GROUPS, GROUPS]


def round_event(method: str, number: int, accuracy: float, assignment: dict[str, int]) -> dict[str, Any]:
    centers = max(assignment.values()) + 1
    return {
        "event": "round",
        "run": "r1",
        "method": method,
        "round": number,
        "of": 3,
        "accuracy": {"micro": accuracy, "macro": accuracy},
        "f1_of_devices": {"weighted": accuracy, "unweighted": accuracy},
        "f1_pooled": accuracy,
        "per_device": dict.fromkeys(assignment, accuracy),
        "per_center": [accuracy + 0.01 * k for k in range(centers)],
        "assignment": assignment,
        "bytes": {"down": 1000, "up": 100},
        "seconds": 1.5,
    }


def events() -> list[dict[str, Any]]:
    own = [round_event("fesem", t, 0.5 + 0.1 * t, row) for t, row in enumerate(ASSIGNMENTS, 1)]
    common = [round_event("fedavg", t, 0.2 + 0.01 * t, dict.fromkeys(GROUPS, 0)) for t in (1, 2, 3)]
    return [{"event": "start"}, *own, {"event": "run-done", "run": "fesem"}, *common, {"event": "bundle"}]


def summary() -> dict[str, Any]:
    return {
        "result": {
            "method": "fesem",
            "devices": 4,
            "rounds": 3,
            "clusters": 2,
            "ari": 1.0,
            "accuracy": {"centers": 0.8, "global": 0.23},
            "new_devices": {"asked": 1, "right": 1, "accuracy": 0.9},
            "parity": {"onnx": 3e-7, "tflite": 0.0},
            "parity_values": 480,
            "engines": {"onnx": 2, "litert": 1, "torch": 1},
            "bytes": {"down": 6000, "up": 600},
            "seconds": 12.3,
            "run": "runs/x",
        },
        "method": "fesem",
        "baseline": "fedavg",
        "groups": GROUPS,
        "engines": dict(zip(GROUPS, ("onnx", "litert", "onnx", "pt2"), strict=True)),
        "memory_mb": {"onnx": 80.0},
        "new_devices": [{"device": "new-0", "group": 1, "center": 1, "right": True, "format": "onnx", "accuracy": 0.9}],
        "points": {
            "device-00": [1.0, 0.0],
            "device-01": [-1.0, 0.2],
            "device-02": [0.9, 0.1],
            "device-03": [-0.8, -0.1],
        },
        "command": "fedcenters-emulator demo --seed 1 <&>",
        "versions": {"python": "3.11"},
    }


def write_demo_run(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(event) + "\n" for event in events())
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary()), encoding="utf-8")
    return folder
