"""`fedcenters-emulator simulate`: one run on this machine and in virtual time, in the four steps of emulator/run/."""

from __future__ import annotations

import time
from dataclasses import replace

from coordinator.storage.experiment_trackers import open_trackers
from coordinator.strategies.registry import method_name, method_settings
from edge_client.errors import ConfigError
from emulator.config import fingerprint, resolved_table
from emulator.options import SimulateArgs
from emulator.parallel.process_pool import start_forkserver
from emulator.run.execute import Progress, SimulationResult, run_simulation
from emulator.run.folder import Say, open_run_folder
from emulator.run.load import LoadedFleet, load_fleet, open_devices
from emulator.run.resolve import ResolvedRun, resolve_run
from emulator.run.summary import Record, result_summary
from emulator.run.write import write_run
from emulator.simulation.attacks import honest_accuracy
from emulator.simulation.checkpoint import Checkpoints


def simulate_json(
    args: SimulateArgs, progress: Progress = lambda _: None, *, resume: bool = False, say: Say = lambda _: None
) -> Record:
    """Run, write the run's folder, and give the JSON object that the command prints.

    `resume`: start from the folder's checkpoint, where the run may have more rounds than before; ConfigError when there
    is none. `say` is told of a run that was there before.
    """
    began = time.perf_counter()
    run = resolve_run(args)
    if args.workers > 1:
        start_forkserver()  # it imports while the data is read
    fleet = load_fleet(run)
    table = resolved_table(fleet.args, method_settings(run.strategy))
    with open_run_folder(args, table, resume=resume, say=say) as folder:
        every, lesson = fleet.args.checkpoint_every, fingerprint(table)
        checkpoints = Checkpoints(folder=folder, every=every, resume=resume, lesson=lesson)
        if resume:
            _tell_where_it_goes_on(checkpoints, say)
        result = _execute(run, fleet, progress, table, checkpoints)
        write_run(folder, method_name(run.strategy), result, fleet.split)
    last, attackers = result.records[-1], fleet.attackers
    attacked = {"hostile": sorted(attackers), "honest_accuracy": honest_accuracy(last, attackers)} if attackers else {}
    return {
        **result_summary(fleet.args, fleet.split.groups, last),
        "seconds": round(time.perf_counter() - began, 3),
        "virtual_seconds": round(result.virtual_seconds, 3),
        "answered": last["answered"],
        **({"privacy": last["privacy"]} if "privacy" in last else {}),
        **attacked,
        "run": str(folder),
    }


def _execute(
    run: ResolvedRun, fleet: LoadedFleet, progress: Progress, table: Record, checkpoints: Checkpoints
) -> SimulationResult:
    """Open the devices and the trackers, and run every round."""
    args, settings = fleet.args, replace(run.settings, attack=run.attack.make_attack(fleet.attackers, fleet.args.seed))
    with (
        open_devices(
            args.model,
            fleet.split,
            seed=args.seed,
            batch=settings.batch,
            engine=args.engine,
            workers=args.workers,
            ray=args.ray,
        ) as (devices, start),
        open_trackers(args.loggers, checkpoints.folder, table) as track,
    ):

        def report(record: Record) -> None:
            track(record)
            progress(record)

        return run_simulation(run.strategy, start, devices, settings, progress=report, checkpoints=checkpoints)


def _tell_where_it_goes_on(checkpoints: Checkpoints, say: Say) -> None:
    found = checkpoints.latest()
    if found is None:
        hint = "leave out --resume; `checkpoint-every` says after how many rounds a run writes one"
        raise ConfigError(f"{checkpoints.folder} has no checkpoint to resume from", hint=hint)
    say(f"going on after round {found[1].round}")
