"""Second step of a simulated run: samples from disk -> a fleet of devices that are ready to train."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.models.members import summed_name
from coordinator.rounds.asynchronous.options import buffer_of_all
from coordinator.strategies.common.setting_checks import spare_centers
from coordinator.strategies.registry import summed_members
from edge_client.data.dataset import describe_misfit
from edge_client.errors import UsageError
from edge_client.protocol.program import Program
from edge_client.protocol.task import ClientId, Flat
from edge_client.rare_collection import rare_collection
from emulator.data.fleet import Fleet, named_fleet
from emulator.data.fleet_split import FleetData
from emulator.engines.engine_spec import EngineSpec
from emulator.options import SimulateArgs
from emulator.parallel.process_pool import open_pool
from emulator.parallel.ray_pool import connect_to_ray, make_ray_pool
from emulator.run.resolve import ResolvedRun
from emulator.simulation.emulated_devices import EmulatedDevices

if TYPE_CHECKING:
    from coordinator.models.registry import Model

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedFleet:
    """Every device's samples, poisoned where the device attacks; `args` have the data set's defaults filled in."""

    args: SimulateArgs
    split: FleetData
    attackers: frozenset[ClientId]


def load_fleet(run: ResolvedRun, fleet: Fleet | None = None) -> LoadedFleet:
    """Cut the fleet, or the one that the run's options describe. Raises UsageError, ConfigError."""
    args, split = make_fleet(run.args, fleet)
    if spare := spare_centers(run.strategy, len(split.devices)):
        log.warning("%s", spare)
    options = run.settings.asynchronous
    if options and (waits := buffer_of_all(options.buffer, len(split.devices))):
        log.warning("%s", waits)
    attackers = run.attack.attackers(split.devices, args.seed)
    split = replace(split, devices=run.attack.poison_data(split.devices, attackers))
    return LoadedFleet(args=args, split=split, attackers=attackers)


def make_fleet(args: SimulateArgs, fleet: Fleet | None = None) -> tuple[SimulateArgs, FleetData]:
    """-> the options with the fleet's filled in, and its devices; None is the fleet that the options describe."""
    if fleet is None:
        fleet = named_fleet(
            args.data_set,
            devices=args.devices,
            partition=args.partition,
            groups=args.groups,
            data=args.data,
            seed=args.data_seed,
        )
    model = args.model or fleet.model
    if not model:
        fleet.cut()  # then the message has the shape of a sample
        raise UsageError(
            f"no model of ours suits {fleet.options['data_set']}: {fleet!r}",
            hint="name yours: --model package.module:Factory; in Python model=MyModule, or the name of one of ours",
        )
    split = fleet.cut_for_run(args.seed)
    model = summed_name(model, summed_members(args.method))
    found: dict[str, Any] = {**fleet.options, "model": model, "devices": len(split.devices)}
    return replace(args, **found), split


def check_samples(program: Program, split: FleetData) -> None:
    """Raises UsageError for samples that the model does not take: every device would refuse to train."""
    for who, local in split.devices.items():
        for data in (local.train, local.test):
            if data is not None and len(data) and (misfit := describe_misfit(program, data)):
                hint = "give a model for these samples and targets; whole y are classes, float y are not: y.astype(int)"
                raise UsageError(f"device {who} cannot train {program.model}: {misfit}", hint=hint)


@contextmanager
def open_devices(  # noqa: PLR0913 - an engine has these settings
    model: str | Model,
    split: FleetData,
    *,
    seed: int,
    batch: int,
    engine: str = "auto",
    workers: int = 1,
    ray: str = "",
) -> Iterator[tuple[EmulatedDevices, Flat]]:
    """Prepare the model, ours by name or one's own, for an engine; -> the devices and the common first model.

    `workers` processes share the devices' work, or the Ray cluster at the address `ray` does it. A GPU has one process.
    """
    with tempfile.TemporaryDirectory(prefix="fedcenters-") as name:
        spec = EngineSpec(model=model, seed=seed, engine=engine, batch=batch, folder=Path(name), processes=workers)
        if workers > 1 and not ray:
            with open_pool(spec, split.devices, workers=workers) as ready:
                yield ready
            return
        with connect_to_ray(ray) if ray else nullcontext():  # before the model is prepared
            with rare_collection():  # imports torch
                engine_parts = spec.resolve()
            recipe, local = engine_parts.recipe, split.devices
            devices = make_ray_pool(recipe, local) if ray else EmulatedDevices(learner=recipe.open(), local=local)
            yield devices, engine_parts.initial_model(devices.program)
