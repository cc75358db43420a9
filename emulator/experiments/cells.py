"""Run the cells of a plan; each finished cell is a small JSON file, so that a stopped run continues there.

A cell that was stopped between rounds continues from its own checkpoint, which is deleted at its end. A cell that was
run with other settings, because the default of a method has changed, is run again from its beginning. A cell that
cannot be run, because its data or its method are missing or another process runs it, leaves the reason and is tried
again the next time.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.models.members import summed_name
from coordinator.strategies.base import Strategy
from coordinator.strategies.registry import batch_size, make_method, method_settings, summed_members
from edge_client.errors import ConfigError, FedcentersError, UsageError
from edge_client.transport.blobs import write_atomically
from emulator.config import made_with
from emulator.data import registry
from emulator.data.loaders.samples import DataSet
from emulator.data.partition_schemes import parse_scheme
from emulator.experiments.measures import MEASURES, FinishedRun
from emulator.experiments.plan import TableCell
from emulator.run.execute import run_simulation
from emulator.run.holding import FolderInUse, hold_folder
from emulator.run.load import open_devices
from emulator.run.settings import RunSettings
from emulator.run.summary import Record, refusal_reasons
from emulator.simulation.checkpoint import Checkpoints, DamagedCheckpoint, other_setting, read_checkpoint

DEADLINE_S = math.inf  # no device is late: the papers have no deadlines
CHECKPOINT_EVERY = 5  # rounds: what a stopped run loses at most
CellResult = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CellStorage:
    """Where data are read and finished cells kept, and how many processes share the work."""

    data: Path | None
    out: Path
    workers: int = 1
    engine: str = "auto"


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """One cell with one seed."""

    cell: TableCell
    seed: int

    @property
    def name(self) -> str:
        """For the reader: row, number of centers, column and seed."""
        return f"{self.cell.name}, seed {self.seed}"

    def path(self, place: CellStorage) -> Path:
        return place.out / f"{self.cell.key(self.seed)}.json"

    def started(self, place: CellStorage) -> Path:
        """The folder of its checkpoint until then."""
        return self.path(place).with_suffix(".started")


ProgressHandler = Callable[[CellRun, Record], None]  # a round has ended
PartHandler = Callable[[CellRun, str], None]  # a part of a run begins, in words


def _no_parts(_: CellRun, what: str) -> None: ...


def cell_runs(cells: Iterable[TableCell], seeds: int) -> list[CellRun]:
    """Every cell with the first seed, then with the second, so that a stopped run has the whole table early."""
    chosen = list(cells)
    return [CellRun(cell=cell, seed=seed) for seed in range(seeds) for cell in chosen]


def read_finished(job: CellRun, place: CellStorage) -> CellResult | None:
    """What the cell's file says; None when it is not finished, or was with other settings than it would have now.

    A new setting at its default is no difference: the method behaves as before.
    """
    try:
        found: CellResult = json.loads(job.path(place).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for kept in (found["values"], found["curves"]):  # of an older version
        if "f1" in kept:
            kept["f1-of-devices"] = kept.pop("f1")
    then, now = found["settings"], method_settings(make_method(job.cell.row.method, **job.cell.settings))
    return found if all(then[name] == now[name] for name in then.keys() & now.keys()) else None


def run_cells(
    todo: Iterable[CellRun],
    place: CellStorage,
    metrics: Iterable[str],
    told: ProgressHandler,
    begin: PartHandler = _no_parts,
) -> dict[str, str]:
    """Run what is not finished; -> for each column or cell that could not be run, the reason."""
    asked = tuple(metrics)
    reasons: dict[str, str] = {}
    loaded: dict[tuple[str, int], DataSet] = {}
    for job in todo:
        column, name = job.cell.column, job.cell.name
        if read_finished(job, place) is not None or {column.name, name} & reasons.keys():
            continue
        try:
            key = (column.data_set, job.seed)
            if key not in loaded:
                begin(job, f"reading {column.data_set}")
                # one at a time: they are big
                loaded = {key: registry.load_data_set(column.data_set, place.data, seed=job.seed)}
        except (ConfigError, UsageError) as missing:
            reasons[column.name] = missing.message
            continue
        try:
            with _hold_cell(job, place):
                if read_finished(job, place) is None:  # another process may have ended it since
                    measure = partial(measure_cell, job, place, loaded[key], asked, told, begin)
                    try:
                        found = measure()
                    except DamagedCheckpoint:
                        found = measure(resume=False)
                    _keep(job.path(place), found)
                shutil.rmtree(job.started(place), ignore_errors=True)
        except FolderInUse as wrong:
            reasons[job.name] = wrong.message  # its other seeds may be run here
        except FedcentersError as wrong:
            reasons[name] = wrong.message
    ended = {job.name for job in todo if read_finished(job, place) is not None}  # here, or by another process
    return {what: why for what, why in reasons.items() if what not in ended}


@contextmanager
def _hold_cell(job: CellRun, place: CellStorage) -> Iterator[None]:
    """Raises FolderInUse for a cell that another process runs; the cells beside it may be run here."""
    started = job.started(place)
    started.mkdir(parents=True, exist_ok=True)
    with hold_folder(started, hint="run other cells here, with --only"):
        try:
            yield
        finally:
            with suppress(OSError):
                started.rmdir()  # nothing is kept in it


def measure_cell(  # noqa: PLR0913 - what a run of a cell is made of
    job: CellRun,
    place: CellStorage,
    data: DataSet,
    metrics: Iterable[str],
    told: ProgressHandler,
    begin: PartHandler = _no_parts,
    *,
    resume: bool = True,
) -> CellResult:
    """Run one cell to its end, from its checkpoint if it has one and `resume` is set, and measure it."""
    cell, column = job.cell, job.cell.column
    begin(job, "preparing the devices and the model")
    strategy = make_method(cell.row.method, **cell.settings)
    split = parse_scheme(column.partition).split(data, devices=column.devices, seed=job.seed)
    batch = batch_size(strategy)
    checkpoints = _checkpoints(job, place, strategy)
    model = summed_name(column.model, summed_members(cell.row.method))
    with open_devices(model, split, seed=job.seed, batch=batch, engine=place.engine, workers=place.workers) as (
        devices,
        start,
    ):
        begin(job, "the first round is running")
        result = run_simulation(
            strategy,
            start,
            devices,
            RunSettings(rounds=cell.rounds, seed=job.seed, batch=batch, deadline_s=DEADLINE_S),
            progress=lambda record: told(job, record),
            checkpoints=checkpoints if resume else replace(checkpoints, resume=False),
        )
        over = FinishedRun(strategy=strategy, result=result, devices=devices, split=split)
        values = {name: MEASURES[name].values(over) for name in metrics}
        matrix = over.holdouts[0].tolist() if split.holdouts else None
    return {
        "column": column.name,
        "row": cell.row.name,
        "k": cell.row.k,
        "method": cell.row.method,
        "settings": method_settings(strategy),
        "partition": column.partition,
        "model": model,
        "devices": len(split.devices),
        "rounds": cell.rounds,
        "seed": job.seed,
        "versions": made_with(),
        "values": values,
        "centers": len(result.state.centers),
        "scores": result.scores(split.groups),
        "holdout_loss": matrix,
        "curves": {
            "accuracy": [r["accuracy"]["micro"] for r in result.records],
            "f1-of-devices": [r["f1_of_devices"]["weighted"] for r in result.records],
            "f1-pooled": [r["f1_pooled"] for r in result.records],
        },
        "bytes": {way: sum(r["bytes"][way] for r in result.records) for way in ("down", "up")},
        "local_steps": sum(r["local_steps"] for r in result.records),
        "refused": refusal_reasons(result.records),
        "seconds": round(sum(result.real_seconds), 1),
        "note": data.note,
    }


def kept_round(job: CellRun, place: CellStorage) -> int:
    """After which round an unfinished cell goes on; 0 where it begins. Raises FedcentersError for unknown methods."""
    if not job.started(place).is_dir():
        return 0
    found = _checkpoints(job, place, make_method(job.cell.row.method, **job.cell.settings)).latest()
    return found[1].round if found else 0


def _checkpoints(job: CellRun, place: CellStorage, strategy: Strategy) -> Checkpoints:
    """Where the cell goes on; at its beginning when the checkpoint is of another run, or cannot be read.

    Settings that came after the version of the checkpoint are no difference at their defaults, as in `--resume`.
    """
    settings = method_settings(strategy)
    fingerprint = {"cell": job.cell.key(job.seed), "engine": place.engine, "settings": settings}
    checkpoints = Checkpoints(folder=job.started(place), every=CHECKPOINT_EVERY, resume=True, fingerprint=fingerprint)
    try:
        found = read_checkpoint(checkpoints.folder)
    except DamagedCheckpoint:
        return replace(checkpoints, resume=False)
    if found is None:
        return checkpoints
    method, before = {"method": job.cell.row.method}, found[1].fingerprint
    if other_setting(method | settings, method | before.get("settings", {})) is None:
        fingerprint["settings"] = before.get("settings", {})
    return replace(checkpoints, fingerprint=fingerprint, resume=other_setting(fingerprint, before) is None)


def _keep(path: Path, found: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(found, sort_keys=True).encode())  # before the cell's checkpoint is removed
