"""A run's folder as a result again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from coordinator.strategies.base import State
from coordinator.strategies.registry import method_name
from edge_client.errors import ConfigError, UsageError
from emulator.api.result import Result
from emulator.bundle_source import is_run_folder, read_centers, read_tree
from emulator.config import make_args, read_table
from emulator.data.fleet import Fleet
from emulator.data.fleet_split import FleetData
from emulator.options import SimulateArgs
from emulator.reports.demo_page import read_events, round_events
from emulator.reports.pictures import records as pictures
from emulator.run.execute import SimulationResult
from emulator.run.load import LoadedFleet, load_fleet
from emulator.run.resolve import ResolvedRun, resolve_run
from emulator.simulation.checkpoint import read_checkpoint

if TYPE_CHECKING:
    from torch import nn

    from coordinator.models.registry import Model
    from coordinator.rounds.round_record import RoundRecord


def load(
    folder: str | Path, *, model: nn.Module | Callable[[], nn.Module] | None = None, fleet: Fleet | None = None
) -> Result:
    """The result of a run that `Result.save`, `simulate(..., out=...)` or the command wrote.

    `model` and `fleet` are those of the run, where it had the user's own: a folder has their names only. Raises
    ConfigError for a folder without a run, and where one of them is missing.

    >>> import fedcenters as fc, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = fc.simulate(fc.FedAvg(local_steps=2), fleet=fc.fleets.digits(devices=3), rounds=1)
    ...     again = fc.load(result.save(f"{folder}/mine"))
    >>> again.accuracy == result.accuracy
    True
    """
    place = Path(folder)
    if not is_run_folder(place):
        raise ConfigError(f"{place} has no simulated run", hint="give the folder that `save` wrote")
    args = replace(make_args(read_table(place / "config.toml")), out=place.parent, name=place.name)
    run = resolve_run(args)
    loaded = _fleet(run, fleet)
    from emulator.api.models import first_model

    prepared = _model(args, loaded.split, model)
    found = _read(place, method_name(run.strategy), prepared)
    return Result(
        method=run.strategy,
        args=loaded.args,
        run=found,
        split=loaded.split,
        start=first_model(prepared),
        attackers=loaded.attackers,
        own_model=prepared,
        seconds=sum(found.real_seconds),
        folder=place,
    )


def _fleet(run: ResolvedRun, fleet: Fleet | None) -> LoadedFleet:
    try:
        return load_fleet(run, fleet)
    except UsageError as unknown:
        if fleet is not None:
            raise
        hint = "give the run's own: fc.load(folder, fleet=...)"
        raise ConfigError(f"the fleet {run.args.data_set} cannot be made again: {unknown.message}", hint=hint) from None


def _model(args: SimulateArgs, split: FleetData, model: nn.Module | Callable[[], nn.Module] | None) -> Model:
    from coordinator.models.registry import build_model
    from emulator.api.models import own_model

    if model is not None:
        return own_model(model, split, loss=None, seed=args.seed)
    try:
        return build_model(args.model, seed=args.seed)
    except UsageError as unknown:
        hint = "give the run's own: fc.load(folder, model=...)"
        raise ConfigError(f"the model {args.model} cannot be made again: {unknown.message}", hint=hint) from None


def _read(place: Path, method: str, model: Model) -> SimulationResult:
    """The rounds, and the state: of the last round's checkpoint, or the centers and what belongs to them."""
    from emulator.api.models import schema_for

    rounds = round_events(read_events(place / "metrics.jsonl"), method)
    schema, folder, last = schema_for(model), place / "centers" / method, rounds[-1]
    kept = read_checkpoint(place)
    if kept is not None and kept[1].round == last["round"]:
        state = kept[1].state
    else:
        centers = np.stack(read_centers(folder, schema))
        state = State(centers=centers, assignment=last["assignment"], extra=read_tree(folder))
    return SimulationResult(
        records=[cast("RoundRecord", {k: v for k, v in record.items() if k != "real_seconds"}) for record in rounds],
        real_seconds=[record.get("real_seconds", 0.0) for record in rounds],
        state=state,
        schema=schema,
        virtual_seconds=sum(record["seconds"] for record in rounds),
        kept=pictures.read_picture_data(place / pictures.PICTURES_FILE),
    )
