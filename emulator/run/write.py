"""Fourth step of a simulated run: the files of its folder, apart from config.toml (folder.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from coordinator.storage.state_codec import encode_state
from coordinator.strategies.common.center_tree import SplitTree
from edge_client.protocol import codecs
from edge_client.protocol.task import Schema
from emulator.config import FLEET_FILE, STATE_FILE, TREE_FILE
from emulator.data.fleet_split import FleetData, label_counts
from emulator.reports.pictures import records as pictures
from emulator.reports.pictures.image_grid import pick_images
from emulator.run.execute import SimulationResult
from emulator.run.run_parts import KEY, Marks, run_parts
from emulator.run.summary import Record


def write_run(  # noqa: PLR0913 - the parts of a run
    folder: Path, method: str, result: SimulationResult, split: FleetData, marks: Marks, *, state: bool, seconds: float
) -> None:
    """metrics.jsonl, fleet.json, pictures.npz, centers/<method>/center-K.safetensors; replaces earlier ones.

    `state`: also the method's whole state, which else a checkpoint has. `seconds`: what the run took on this machine.
    """
    # before the centers: a run that is killed between them is loaded from its checkpoint, of the same last round
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as metrics:
        for record, real_s in zip(result.records, result.real_seconds, strict=True):
            metrics.write(json.dumps({**record, "real_seconds": real_s}, sort_keys=True) + "\n")
    _write_centers(folder / "centers" / method, result)
    if state:
        (folder / "centers" / method / STATE_FILE).write_bytes(encode_state(result.state))
    images = pick_images(split.devices, result.state.assignment)
    pictures.write_picture_data(folder / pictures.PICTURES_FILE, replace(result.kept, images=images))
    told = {**describe_fleet(split, result.schema, marks), "seconds": seconds}
    (folder / FLEET_FILE).write_text(json.dumps(told, sort_keys=True), encoding="utf-8")


def _write_centers(folder: Path, result: SimulationResult) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("center-*.safetensors"):
        old.unlink()
    for k, center in enumerate(result.state.centers):
        data = codecs.encode_vector(center, result.schema, codec="f32", kind="model")
        (folder / f"center-{k}.safetensors").write_bytes(data)
    tree = SplitTree.from_state(result.state)
    for name in (STATE_FILE, TREE_FILE):
        (folder / name).unlink(missing_ok=True)
    if len(tree.models):
        np.savez(folder / TREE_FILE, edges=tree.edges, models=tree.models.astype(np.float32))


def describe_fleet(split: FleetData, schema: Schema, marks: Marks) -> Record:
    """Each device's true group and what the user calls it, if any, and training samples of each class.

    Then the names of tensors, classes and columns, and the numbers by which `folder.py` knows the run again.
    """
    devices: Record = {}
    for who, local in sorted(split.devices.items()):
        labels = label_counts(local.train.y).tolist()  # of positions, where a sample has several
        devices[who] = {"group": split.groups.get(who), "samples": len(local.train), "labels": labels}
        called = split.called.get(who)
        if isinstance(called := called.item() if isinstance(called, np.generic) else called, (str, int, float)):
            devices[who]["called"] = called
    names = {"classes": list(split.classes), "columns": list(split.columns), "pixels": split.pixels}
    return {
        "classifier": list(schema.classifier),
        "devices": devices,
        KEY: run_parts(split.devices, schema, marks),
        **{key: value for key, value in names.items() if value},
    }
