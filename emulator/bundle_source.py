"""What a bundle of a simulated run is made of (export/bundle/bundle_contents.py; entry point `fedcenters.runs`).

config.toml says how the fleet was made, so its devices' samples are made again from the data sets; the model's program
is compiled again. Nothing is trained.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.rounds.round_record import upgraded_record
from coordinator.strategies.base import State
from coordinator.strategies.common.center_tree import SplitTree
from edge_client.errors import ConfigError, Malformed, ProgramRefused, UsageError
from edge_client.protocol import codecs
from edge_client.protocol.nearest.router import NEED_LABELS
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, ClientId, Flat, Schema
from edge_client.toml_files import read_toml
from emulator import config
from emulator.data.fleet_split import FleetData, SamplesMissing, label_counts
from emulator.run.replaced_files import finish_replaced_run
from emulator.run.run_parts import USUAL_LOSS, kept_parts
from emulator.run_centers import RunCenters
from export.bundle.bundle_contents import BundleNames, BundleSource, LabelledSamples, NewcomerData

if TYPE_CHECKING:
    from coordinator.models.registry import Model
    from export.compiler.program import CompilerOutput

log = logging.getLogger(__name__)
IN_PYTHON = "do it there: fc.load(folder).export(bundle)"
ANY = "any"  # batch size of a program's files
MAX_CALIBRATION_SAMPLES = 512  # training samples, every device's share alike


def is_run_folder(run: Path) -> bool:
    """Whether `fedcenters-emulator simulate` wrote this folder. What a save that was killed left is finished first."""
    finish_replaced_run(run)
    return all((run / name).is_file() for name in ("config.toml", config.FLEET_FILE, "metrics.jsonl"))


def bundle_source(run: Path, *, method: str, engines: Sequence[str], data: Path | None) -> BundleSource:
    """The centers of the run, a program for `engines`, and every device's samples."""
    asked, last = _asked(run), _last(run)
    if method not in ("", asked["method"]):
        raise ConfigError(f"run {run} has no centers of {method}", hint=f"it has {asked['method']}")
    centers = read_run_centers(run, asked, last, data=data)
    return source_of_centers(centers, last, method=asked["method"], batch=int(asked["batch-size"]), engines=engines)


def source_of_centers(
    run: RunCenters, last: Mapping[str, Any], *, method: str, batch: int, engines: Sequence[str]
) -> BundleSource:
    """The source for centers of this process; `last` is the record of the last round.

    Without the samples of the run it has neither reference nor calibration. Raises UsageError for a method that trains
    no center.
    """
    run.check_trained()
    split = run.data
    made = _compiled(run.get_model(), batch, engines)
    run = _taught_with(made.program, run)
    reference, calibration, router = None, None, run.taught
    try:
        reference = _samples(split, last["assignment"], "test", run.centers)
        calibration, router = _few_training(split, last), run.router
    except SamplesMissing as missing:
        log.warning("%s: the files are compared on random inputs. %s", missing.message, missing.hint)
    return BundleSource(
        program=made.program,
        files=made.files,
        centers=run.models(range(run.centers)),
        cards=_cards(method, last, split, run.centers, measured=run.measured(last)),
        reference=reference,
        names=BundleNames(
            classes=split.classes,
            columns=split.columns,
            devices={c: k for c, k in sorted(_center_of(split, last["assignment"], run.centers).items()) if k >= 0},
        ),
        calibration=calibration,
        newcomers=NewcomerData(
            router=router,
            start=None if router is None else run.first.astype(np.float32),
            tree=run.tree,
            splits=list(run.split_tree.models) if run.tree is not None else [],
        ),
    )


def _compiled(model: Model, batch: int, engines: Sequence[str]) -> CompilerOutput:
    """The program of the run's own loss; where no program can have that, of what stands for it, with a warning.

    A loss that gives a batch's mean is asked for one sample at a time, as it was in training.
    """
    from coordinator.models.compiled import compiled_model
    from emulator.engines.cpu.own_losses import asked_alone

    compiled = partial(compiled_model, batch=batch, engines=engines)
    if model.own_loss is None:
        return compiled(model)
    try:
        return compiled(model)
    except ProgramRefused as wrong:
        refused = wrong
    with suppress(ProgramRefused):
        made = compiled(replace(model, own_loss=asked_alone(model.own_loss)))
        if all(size == ANY for size in made.program.batch.values()):
            return made
    made = compiled(replace(model, own_loss=None))
    said = "%s. The bundle's program has %s in its place, also for personal steps. To have your own: %s"
    log.warning(said, refused.message, model.loss, refused.hint)
    return made


def _taught_with(program: Program, run: RunCenters) -> RunCenters:
    """The run, whose devices teach newcomers by the loss that the program has, which newcomers measure.

    Of a loaded run they have taught already; where that was by another loss, what it says of losses is left out.
    """
    model = run.get_model()
    if program.own_loss == (model.own_loss is not None):
        return run
    taught = None if run.taught is None else run.taught.without(NEED_LABELS)
    return replace(run, get_model=lambda: replace(model, own_loss=None), taught=taught)


def read_run_centers(run: Path, asked: Mapping[str, Any], last: Mapping[str, Any], *, data: Path | None) -> RunCenters:
    """The centers in a run's folder, and the samples of its devices, which are made again."""
    from coordinator.models.registry import build_model
    from coordinator.strategies.registry import make_method
    from export.compiler.program import schema_of, vector_of

    hint = f'make the bundle in Python: fc.load("{run}").export(folder)'
    try:
        model, split = build_model(asked["model"], seed=asked["seed"]), _split(asked, data, hint=hint)
    except UsageError as unknown:
        raise ConfigError(f"{run} has a module that only its user has: {unknown.message}", hint=hint) from None
    if own_loss := kept_parts(run).get("loss", USUAL_LOSS)[0]:
        log.warning(
            "the run's own loss %s is not in %s: the bundle's program has %s in its place, also for personal steps. "
            "In Python: fc.load(folder, loss=...).export(bundle)",
            own_loss,
            run,
            model.loss,
        )
    schema, folder = schema_of(model.module), run / "centers" / last["method"]
    centers = read_centers(folder, schema)
    return RunCenters(
        method=make_method(asked["method"], **config.make_args(asked).settings),
        state=State(centers=np.stack(centers), assignment=last["assignment"], extra=read_tree(folder)),
        first=vector_of(model.module, schema),
        data=split,
        seed=asked["seed"],
        get_model=lambda: model,
    )


def read_centers(folder: Path, schema: Schema) -> list[Flat]:
    """The centers [schema.size] in a folder, in order. Raises ConfigError for none, and for files of another model."""
    paths = sorted(folder.glob("center-*.safetensors"), key=lambda p: int(p.stem.rpartition("-")[2]))
    if not paths:
        hint = "go on with the run, which writes them: --resume (in Python: resume=True)"
        raise ConfigError(f"{folder} has no centers: a run was ended while it wrote them", hint=hint)
    try:
        return [codecs.decode_vector(path.read_bytes(), schema, kind="model") for path in paths]
    except Malformed as wrong:
        raise ConfigError(f"the centers in {folder} are of another model: {wrong}", hint="give the run's own") from None


def read_tree(folder: Path) -> dict[str, Array]:
    """The tree of a run whose method splits centers, as `State.extra` has it; empty for other methods."""
    path = folder / config.TREE_FILE
    if not path.is_file():
        return {}
    with np.load(path, allow_pickle=False) as kept:
        return SplitTree(models=kept["models"], edges=kept["edges"], directions=np.empty((0, 0))).to_extra()


def held_out(run: Path, *, data: Path | None) -> LabelledSamples | None:
    """Every test sample of every device."""
    last = _last(run)
    return _samples(_split(_asked(run), data), last["assignment"], "test", len(last["per_center"]))


def calibration(run: Path, *, data: Path | None) -> LabelledSamples | None:
    """Training samples, every device's share alike."""
    return _few_training(_split(_asked(run), data), _last(run))


def _few_training(split: FleetData, last: Mapping[str, Any]) -> LabelledSamples | None:
    found = _samples(split, last["assignment"], "train", len(last["per_center"]))
    return None if found is None else found.subsample(MAX_CALIBRATION_SAMPLES)


def _cards(
    method: str, last: Mapping[str, Any], split: FleetData, centers: int, *, measured: bool
) -> list[dict[str, Any]]:
    from export.bundle.model_cards import center_facts

    samples, labels = _training_counts(split)
    # None stands for the accuracies of what devices are served.
    alone: list[dict[str, Any]] | None = None if measured else [{}] * centers
    at = _center_of(split, last["assignment"], centers)
    known = bool(last["assignment"]) or centers == 1
    return [
        center_facts(
            k,
            [c for c in sorted(at) if at[c] == k] if known else None,
            method=method,
            rounds=last["round"],  # those that were done: a run may be stopped before its last
            samples=samples,
            served=last["per_device"],
            centers=last["centers"]["per_device"] if "centers" in last else alone,
            labels=labels,
            labels_of="training samples",
        )
        for k in range(centers)
    ]


def _training_counts(split: FleetData) -> tuple[dict[ClientId, int], dict[ClientId, list[int]]]:
    """-> the training samples of each device, and how many of each class; the second is empty where there is none."""
    try:
        train = {c: local.train for c, local in split.devices.items()}
    except SamplesMissing:
        known: dict[ClientId, list[int]] = {c: one["labels"] for c, one in split.kept.items()}
        classes = max(map(len, known.values()))
        padded = {c: [*counts, *[0] * (classes - len(counts))] for c, counts in known.items() if classes > 1}
        return {c: one.get("samples", sum(one["labels"])) for c, one in split.kept.items()}, padded
    classes = max((int(d.y.max()) + 1 for d in train.values() if np.issubdtype(d.y.dtype, np.integer)), default=0)
    counts = {c: label_counts(d.y, classes).tolist() for c, d in train.items() if classes}
    return {c: len(d) for c, d in train.items()}, counts


def _center_of(split: FleetData, assignment: Mapping[ClientId, int], centers: int) -> dict[ClientId, int]:
    """Each device's center; if a method assigns none, 0 for a single center and -1 for several."""
    return {c: assignment.get(c, 0 if centers == 1 else -1) for c in split.devices}


def _samples(split: FleetData, assignment: Mapping[ClientId, int], part: str, centers: int) -> LabelledSamples | None:
    """Those of every device's `part`, "train" or "test"; None where no device has any."""
    at = _center_of(split, assignment, centers)
    found = {c: getattr(local, part) for c, local in sorted(split.devices.items())}
    found = {c: d for c, d in found.items() if d is not None and len(d)}
    if not found:
        return None
    lengths = [len(d) for d in found.values()]
    return LabelledSamples(
        x=np.concatenate([d.x for d in found.values()]),
        y=np.concatenate([d.y for d in found.values()]),
        device=np.repeat(np.array(list(found)), lengths),
        center=np.repeat(np.array([at[c] for c in found], np.int64), lengths),
    )


def _split(asked: Mapping[str, Any], data: Path | None, *, hint: str = IN_PYTHON) -> FleetData:
    from emulator.data.fleet import is_named_fleet
    from emulator.run.load import make_fleet

    if not is_named_fleet(asked["data-set"], asked.get("partition", "")):
        told = f"the samples {asked['data-set']!r} were given in Python, and the run's folder does not hold them"
        raise ConfigError(told, hint=hint)
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
