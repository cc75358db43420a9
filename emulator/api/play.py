"""The steps of emulator/run/ for one run, as a generator of results: below Python's `simulate` and the command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coordinator.models.members import check_model_name
from coordinator.storage.experiment_trackers import EventHandler, open_trackers
from edge_client.errors import UsageError
from edge_client.printable import counted
from edge_client.protocol.program import Program
from edge_client.protocol.task import ClientId, Flat
from emulator.api.result import Result, TemporaryPlace
from emulator.config import GUIDE_FILE, fingerprint, resolved_table
from emulator.data.fleet import Fleet, is_named_fleet
from emulator.data.fleet_split import FleetData
from emulator.options import SimulateArgs
from emulator.parallel.process_pool import start_forkserver
from emulator.run.execute import begin_run, live_result, open_run, run_rounds, with_emulated_key
from emulator.run.folder import NothingToResume, Say, open_run_folder, write_settings
from emulator.run.live_run import LiveRun
from emulator.run.load import check_samples, load_fleet, make_fleet, open_devices
from emulator.run.resolve import ResolvedRun
from emulator.run.run_parts import USUAL_LOSS, Marks, RunParts, run_parts
from emulator.simulation.checkpoint import Checkpoints
from emulator.simulation.emulated_devices import EmulatedDevices, fleet_of

if TYPE_CHECKING:
    from coordinator.models.registry import Model


WRITING = "writing the run's folder"
TEACHING = f"{WRITING}, with what its devices teach `nearest`"  # each trains several times, which may take long


def play(  # noqa: PLR0913 - the parts of a run
    run: ResolvedRun,
    *,
    fleet: Fleet | None = None,
    model: Model | str | None = None,
    resume: bool = False,
    say: Say = lambda _: None,
    busy: Say = lambda _: None,
    keep: bool = True,
) -> Generator[Result, bool | None, Result]:
    """Yield the result after each round, and return that of the run; sending True ends the run early.

    `fleet` and `model` replace those that the options name. `keep`: the run has a folder, which is written at its end,
    also when the caller stops. Without it only a checkpoint is kept, as long as a result of the run lives. `say` is
    told of a run that was there before, `busy` what is prepared, and that the folder is written. The results' `args`
    have the rounds that were played.
    """
    began = time.perf_counter()
    if run.args.workers > 1:
        start_forkserver()  # it imports while the data is read
    run = _with_model(run, model)
    busy("reading the data")
    loaded = load_fleet(run, fleet)
    busy(f"preparing the model for {len(loaded.split.devices)} devices")
    args = loaded.args
    table = resolved_table(args, run.strategy)
    settings = replace(run.settings, attack=run.attack.make_attack(loaded.attackers, args.seed))
    marks = _marks(model, loaded.split)
    running = ExitStack()
    ready = partial(
        open_devices,
        args.model if model is None or isinstance(model, str) else model,
        loaded.split,
        seed=args.seed,
        batch=settings.batch,
        engine=args.engine,
        workers=args.workers,
        ray=args.ray,
    )
    opened = cache(lambda: running.enter_context(ready()))  # a worker loads torch for it, and not this process
    parts = partial(_parts, lambda: opened()[0], marks)
    with running, _folder(args, table, parts, keep=keep, resume=resume, say=say) as (folder, temporary):
        checkpoints = Checkpoints(
            folder=folder,
            every=args.checkpoint_every if keep or args.checkpoint_every == 0 else args.rounds,
            fingerprint=fingerprint(table),
            resume=resume,
            marks=marks,
            needed=keep,
        )
        if resume:
            _tell_where_it_goes_on(checkpoints, args.out / folder.name, args.rounds, say)
        with running, open_trackers(args.loggers, folder, table) as track:  # the devices end before the folder does
            devices, start = opened()
            check_samples(devices.program, loaded.split)
            live = open_run(run.strategy, start, devices, settings, checkpoints=checkpoints)
            if resume:
                write_settings(folder, table)
            began -= sum(live.real_seconds)  # of the rounds before it was resumed
            is_done = len(live.records) == args.rounds and _is_written(folder, args.rounds)

            def result() -> Result:
                return Result(
                    method=run.strategy,
                    args=replace(args, rounds=len(live.records) or args.rounds),
                    run=live_result(live),
                    split=loaded.split,
                    attackers=loaded.attackers,
                    own_model=model if not isinstance(model, str) else None,
                    start=start,
                    seconds=time.perf_counter() - began,
                    folder=folder if keep else None,
                    temporary=temporary,
                    marks=marks,
                )

            def write(found: Result) -> None:
                if keep and not is_done:
                    busy(_writing(args))
                    found.write(folder)

            busy(f"round {len(live.records) + 1}/{args.rounds} is running")
            try:
                yield from _each_round(live, run_rounds(live, settings, checkpoints=checkpoints), track, result)
            except GeneratorExit:
                write(result())
                raise
            found = result()
        write(found)
    return found


def _each_round(
    live: LiveRun, played: Generator[int, bool | None, None], track: EventHandler, result: Callable[[], Result]
) -> Generator[Result, bool | None, None]:
    """Yield the result after each round that is played; a caller that stops still gets the last round's checkpoint."""
    stop = None
    try:
        while True:
            played.send(stop)
            track({**live.records[-1], "real_seconds": live.real_seconds[-1]})
            stop = yield result()
    except StopIteration:
        return
    except GeneratorExit:
        with suppress(StopIteration):
            played.send(True)  # noqa: FBT003 - writes the checkpoint of the last round
        raise


class Start(NamedTuple):
    """What runs of several methods with one model begin with."""

    program: Program
    model: Flat
    devices: Mapping[ClientId, int]


def prepare_start(run: ResolvedRun, *, fleet: Fleet, model: Model | str | None = None) -> Start:
    """Raise what `play` raises for a model or samples that do not suit each other."""
    from coordinator.models.registry import build_model
    from emulator.api.models import first_model
    from emulator.engines.cpu.cpu_engine import cpu_recipe

    args, split = make_fleet(_with_model(run, model).args, fleet)
    made = build_model(args.model, seed=args.seed) if model is None or isinstance(model, str) else model
    program = cpu_recipe(made).program
    check_samples(program, split)
    return Start(program, first_model(made), fleet_of(split.devices))


def check_begins(run: ResolvedRun, start: Start) -> None:
    """Raise what `play` raises before the first round for a model or devices that do not suit the method."""
    strategy = with_emulated_key(run.strategy, start.program.schema, run.args.seed)
    begin_run(strategy, start.model, start.program, start.devices, run.settings)


@contextmanager
def _folder(
    args: SimulateArgs,
    table: dict[str, Any],
    parts: Callable[[], RunParts],
    *,
    keep: bool,
    resume: bool,
    say: Say,
) -> Iterator[tuple[Path, TemporaryPlace | None]]:
    """The run's own folder, or one for its checkpoint that goes with the last result."""
    if keep:
        with open_run_folder(args, table, resume=resume, say=say, parts=parts) as folder:
            yield folder, None
        return
    if resume or args.loggers:
        raise UsageError("there is no folder to go on from, or to log into", hint='give the run a folder: out="runs"')
    temporary = TemporaryPlace()
    yield temporary.path, temporary


def _with_model(run: ResolvedRun, model: Model | str | None) -> ResolvedRun:
    """The run with the name of its model. Raises UsageError for a name that there is not."""
    if model is not None:
        run = replace(run, args=replace(run.args, model=model if isinstance(model, str) else model.name))
    if model is None or isinstance(model, str):
        check_model_name(run.args.model)
    return run


def _marks(model: Model | str | None, split: FleetData) -> Marks:
    """What tells the user's own loss and model from others; those of a model with a name belong to the name."""
    if model is None or isinstance(model, str):
        return {"loss": USUAL_LOSS}
    from emulator.api.models import frozen_checksum, try_loss
    from export.compiler.losses.sample_losses import loss_name

    loss = USUAL_LOSS if model.own_loss is None else (loss_name(model.own_loss), try_loss(model, split))
    return {"loss": loss, "frozen": frozen_checksum(model.module)}


def _parts(opened: Callable[[], EmulatedDevices], marks: Marks) -> RunParts:
    """By what a folder that is there already is known to be of another run."""
    devices = opened()
    return run_parts(devices.local, devices.program.schema, marks)


def _writing(args: SimulateArgs) -> str:
    """What the last step of a run with a folder does: of a fleet that has a name no device teaches `nearest`."""
    return WRITING if is_named_fleet(args.data_set, args.partition) else TEACHING


def _is_written(folder: Path, rounds: int) -> bool:
    """Whether the folder has the files of a run of so many rounds. Its guide is the last one that is written."""
    metrics = folder / "metrics.jsonl"
    return (folder / GUIDE_FILE).is_file() and metrics.is_file() and metrics.read_bytes().count(b"\n") == rounds


def _tell_where_it_goes_on(checkpoints: Checkpoints, folder: Path, rounds: int, say: Say) -> None:
    found = checkpoints.latest()
    if found is None:
        hint = "leave out --resume; `checkpoint-every` says after how many rounds a run writes one"
        raise NothingToResume(f"{folder} has no checkpoint to resume from", hint=hint)
    done = found[1].round
    if done > rounds:
        told = f"{folder} has {counted(done, 'round')} already, and this run shall have {rounds}"
        raise UsageError(told, hint=f"ask for more than {done} --rounds, or leave out --resume")
    say(f"going on after round {done}" if done < rounds else f"{folder} has its {counted(done, 'round')} already")
