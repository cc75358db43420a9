"""A simulated run's folder as the source of a bundle (export/bundle/run_source.py; entry point `fedcenters.runs`).

config.toml says how the fleet was made, so its devices' samples are made again from the data sets; the model's program
is compiled again. Nothing is trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.rounds.round_record import upgraded_record
from edge_client.errors import ConfigError
from edge_client.protocol import codecs
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.task import Array, ClientId
from edge_client.toml_files import read_toml
from emulator import config
from export.bundle.run_source import BundleSource, LabelledSamples, NewcomerData

if TYPE_CHECKING:
    from emulator.data.fleet_split import FleetData

MAX_CALIBRATION_SAMPLES = 512  # training samples, every device's share alike


def is_run_folder(run: Path) -> bool:
    """Whether `fedcenters-emulator simulate` wrote this folder."""
    return all((run / name).is_file() for name in ("config.toml", "fleet.json", "metrics.jsonl"))


def bundle_source(run: Path, *, method: str, engines: Sequence[str], data: Path | None) -> BundleSource:
    """The centers of the run, a program for `engines`, and every device's samples."""
    from coordinator.models.registry import build_model
    from export.compiler.program import compile_program

    asked, last = _asked(run), _last(run)
    if method not in ("", asked["method"]):
        raise ConfigError(f"run {run} has no centers of {method}", hint=f"it has {asked['method']}")
    model = build_model(asked["model"], seed=asked["seed"])
    facts: dict[str, Any] = {"name": model.name, "input": model.input, "target": model.output, "loss": model.loss}
    made = compile_program(model.module, **facts, batch=int(asked["batch-size"]), engines=engines)
    folder = run / "centers" / last["method"]
    paths = sorted(folder.glob("center-*.safetensors"), key=lambda p: int(p.stem.rpartition("-")[2]))
    centers = [codecs.decode_vector(path.read_bytes(), made.program.schema, kind="model") for path in paths]
    split = _split(asked, data)
    return BundleSource(
        program=made.program,
        files=made.files,
        centers=centers,
        cards=_cards(asked, last, split, len(centers)),
        reference=_samples(split, last["assignment"], "test", len(centers)),
        calibration=_few_training(split, last),
        newcomers=_newcomers(asked, last, split, centers, read_tree(folder, len(centers))),
    )


def read_tree(folder: Path, centers: int) -> tuple[CenterTree | None, list[Array]]:
    """The tree of a run whose method splits centers, and the model of each split."""
    path = folder / config.TREE_FILE
    if not path.is_file():
        return None, []
    with np.load(path, allow_pickle=False) as kept:
        return CenterTree(tuple((int(a), int(b)) for a, b in kept["edges"]), centers), list(kept["models"])


def _newcomers(
    asked: Mapping[str, Any],
    last: Mapping[str, Any],
    split: FleetData,
    centers: Sequence[Array],
    walked: tuple[CenterTree | None, list[Array]],
) -> NewcomerData:
    """What the run's devices teach those that come later, where each of them has a center and a test part."""
    from coordinator.strategies.common.local_sgd import LocalSgd
    from coordinator.strategies.registry import make_method
    from emulator.router_training import FinishedTraining, fit_router
    from emulator.run.load import open_devices

    assignment = last["assignment"] or (dict.fromkeys(split.devices, 0) if len(centers) == 1 else {})
    tree, splits = walked
    method = make_method(asked["method"], **config.make_args(asked).settings)
    if not assignment or not isinstance(method, LocalSgd) or any(d.test is None for d in split.devices.values()):
        return NewcomerData(tree=tree, splits=splits)
    with open_devices(asked["model"], split, seed=asked["seed"], batch=int(asked["batch-size"])) as (devices, start):
        run = FinishedTraining(
            learner=devices.learner,
            method=method,
            start=start,
            centers=centers,
            assignment=assignment,
            devices=split.devices,
        )
        guide = fit_router(run, seed=asked["seed"])
    return NewcomerData(router=guide, start=start.astype(np.float32), tree=tree, splits=splits)


def held_out(run: Path, *, data: Path | None) -> LabelledSamples | None:
    """Every test sample of every device."""
    last = _last(run)
    return _samples(_split(_asked(run), data), last["assignment"], "test", len(last["per_center"]))


def calibration(run: Path, *, data: Path | None) -> LabelledSamples | None:
    """Training samples, every device's share alike."""
    return _few_training(_split(_asked(run), data), _last(run))


def _few_training(split: FleetData, last: Mapping[str, Any]) -> LabelledSamples:
    return _samples(split, last["assignment"], "train", len(last["per_center"])).subsample(MAX_CALIBRATION_SAMPLES)


def _cards(asked: Mapping[str, Any], last: Mapping[str, Any], split: FleetData, centers: int) -> list[dict[str, Any]]:
    from export.bundle.model_cards import center_facts

    train = {c: local.train for c, local in split.devices.items()}
    classes = max((int(d.y.max()) + 1 for d in train.values() if np.issubdtype(d.y.dtype, np.integer)), default=0)
    told: dict[str, Any] = {
        "method": asked["method"],
        "rounds": last["of"],
        "samples": {c: len(d) for c, d in train.items()},
        "served": last["per_device"],
        "centers": last["centers"]["per_device"] if "centers" in last else None,
        "labels": {c: np.bincount(d.y, minlength=classes) for c, d in train.items()} if classes else {},
        "labels_of": "training samples",
    }
    at = _center_of(split, last["assignment"], centers)
    return [center_facts(k, [c for c in sorted(at) if at[c] == k], **told) for k in range(centers)]


def _center_of(split: FleetData, assignment: Mapping[ClientId, int], centers: int) -> dict[ClientId, int]:
    """Each device's center; if a method assigns none, 0 for a single center and -1 for several."""
    return {c: assignment.get(c, 0 if centers == 1 else -1) for c in split.devices}


def _samples(split: FleetData, assignment: Mapping[ClientId, int], part: str, centers: int) -> LabelledSamples:
    at = _center_of(split, assignment, centers)
    found = {c: getattr(local, part) for c, local in sorted(split.devices.items())}
    found = {c: d for c, d in found.items() if d is not None and len(d)}
    lengths = [len(d) for d in found.values()]

    def joined(arrays: Sequence[Array]) -> Array:
        return np.concatenate(arrays)

    return LabelledSamples(
        x=joined([d.x for d in found.values()]),
        y=joined([d.y for d in found.values()]),
        device=np.repeat(np.array(list(found)), lengths),
        center=np.repeat(np.array([at[c] for c in found], np.int64), lengths),
    )


def _split(asked: Mapping[str, Any], data: Path | None) -> FleetData:
    from emulator.run.load import make_fleet

    return make_fleet(replace(config.make_args(asked), data=data))[1]


def _asked(run: Path) -> dict[str, Any]:
    return read_toml(run / "config.toml", hint="simulate again")


def _last(run: Path) -> dict[str, Any]:
    """The last round, which tested every device."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return upgraded_record(json.loads(lines[-1]))
    except (OSError, ValueError, IndexError) as wrong:
        raise ConfigError(f"{run}/metrics.jsonl: {wrong!r}", hint="simulate again") from wrong
