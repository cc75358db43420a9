"""What a demo achieved, from what was recorded: the JSON object, and how the new devices chose. Reads, never runs.

`events` are the lines of metrics.jsonl. The true groups come from the emulator; the coordinator never saw them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.errors import FedcentersError
from emulator.reports.demo_page import round_events
from emulator.testbed import testbed_files
from export.bundle.bundle_contents import MAX_COMPARED_SAMPLES
from export.bundle.reader import read_bundle

Event = Mapping[str, Any]
PARITY_LIMIT = 1e-4  # largest difference of a logit between an exported file and torch, on real samples
PUBLIC_NAMES = {"onnx": "onnx", "litert": "litert", "pt2": "torch"}


def group_by_center(events: Sequence[Event], method: str, groups: Mapping[str, int]) -> dict[int, int]:
    """The true group that most devices of each center belong to, after the last round; the lower one on a tie."""
    members: dict[int, Counter[int]] = {}
    for device, center in round_events(events, method)[-1]["assignment"].items():
        members.setdefault(center, Counter())[groups[device]] += 1
    return {center: min(count, key=lambda g: (-count[g], g)) for center, count in members.items()}


def judge_choice(
    cid: str, form: str, answer: Mapping[str, Any], *, group: int, group_of: Mapping[int, int]
) -> dict[str, Any]:
    """A new device's answer beside the truth."""
    center = answer["center"]
    return {
        "device": cid,
        "group": group,
        "center": center,
        "right": center is not None and group_of.get(int(center)) == group,
        "format": form,
        "accuracy": answer["accuracy"],
    }


def format_choice(choice: Mapping[str, Any]) -> str:
    """One line about a new device."""
    if choice["center"] is None:
        return f"{choice['device']} found no center that fits (WRONG)"
    chose = f"{choice['device']} chose center {choice['center']} ({'right' if choice['right'] else 'WRONG'})"
    return f"{chose} and runs its {choice['format']} file: accuracy {choice['accuracy']:.1%}"


def check_choices(new: Sequence[Mapping[str, Any]]) -> None:
    """Raise when a new device found no center that fits: then it has downloaded and run nothing."""
    lost = [choice["device"] for choice in new if choice["center"] is None]
    if lost:
        raise FedcentersError(
            f"no center fits {', '.join(lost)}",
            hint="report.html of the run shows how far the training came; add --rounds",
        )


def update_points(folder: Path, run: str) -> dict[str, list[float]]:
    """Where each device's first update lies in the plane: two principal components of the classifier layer."""
    from coordinator.storage.run_reader import device_models, read_program
    from emulator.reports.plots import principal_plane

    schema = read_program(folder).schema
    models = {cid: schema.split(vector) for cid, vector in device_models(folder, run, 1)[1]}
    rows = [np.concatenate([np.ravel(model[name]) for name in schema.classifier]) for model in models.values()]
    plane = principal_plane(np.stack(rows))
    return {cid: [float(x), float(y)] for cid, (x, y) in zip(models, plane, strict=True)}


def max_parity(folder: Path) -> dict[str, float]:
    """Per format the largest difference of a logit from torch, over all centers; raises above PARITY_LIMIT."""
    manifest = json.loads((folder / "bundle" / "manifest.json").read_text(encoding="utf-8"))
    worst: dict[str, float] = {}
    for center in manifest["centers"]:
        for form, file in center["files"].items():
            worst[form] = float(np.maximum(worst.get(form, 0.0), file["parity"]))  # NaN stays NaN
    for form, difference in worst.items():
        if not difference <= PARITY_LIMIT:
            raise FedcentersError(
                f"the {form} files differ from torch by {difference:.1e}, more than {PARITY_LIMIT:.0e}",
                hint=f"fedcenters-export verify {folder / 'bundle'}",
            )
    return worst


def compared_values(folder: Path) -> int:
    """How many logits of each format were compared with torch's when the bundle was written, over all centers."""
    bundle = read_bundle(folder / "bundle")
    reference = bundle.reference_samples()
    if reference is None:
        raise FedcentersError("the bundle has no samples", hint=f"the demo gives some: {testbed_files.REFERENCE_FILE}")
    samples = len(reference.subsample(MAX_COMPARED_SAMPLES))
    return samples * bundle.program.classes * len(bundle.manifest["centers"])


def demo_result(
    folder: Path,
    events: Sequence[Event],
    *,
    groups: Mapping[str, int],
    engines: Mapping[str, str],
    new: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The JSON object of the demo, without `seconds` and `run`."""
    from coordinator.rounds.metrics import ari

    own, common = (
        round_events(events, str(run["method"])) for run in (testbed_files.FESEM_RUN, testbed_files.FEDAVG_RUN)
    )
    if not own or not common:
        raise FedcentersError("the coordinator recorded no round", hint="look at metrics.jsonl in the run folder")
    assignment = own[-1]["assignment"]
    devices = sorted(assignment)
    used = Counter(engines.values())
    reached = [choice["accuracy"] for choice in new if choice["accuracy"] is not None]
    return {
        "method": testbed_files.FESEM_RUN["method"],
        "devices": len(devices),
        "rounds": len(own),
        "clusters": len(own[-1]["per_center"]),
        "ari": round(ari([groups[d] for d in devices], [assignment[d] for d in devices]), 6),
        "accuracy": {"centers": own[-1]["accuracy"]["micro"], "global": common[-1]["accuracy"]["micro"]},
        "new_devices": {
            "asked": len(new),
            "right": sum(bool(choice["right"]) for choice in new),
            "accuracy": float(np.mean(reached)) if reached else None,
        },
        "parity": max_parity(folder),
        "engines": {public: used[engine] for engine, public in PUBLIC_NAMES.items()},
        "bytes": {way: sum(e["bytes"][way] for e in (*own, *common)) for way in ("down", "up")},
    }
