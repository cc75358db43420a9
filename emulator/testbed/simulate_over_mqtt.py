"""`simulate --broker`: a simulated run with real processes: a broker, a coordinator, edge clients.

Models travel over MQTT in real time. With the same engine the result is that of the run in one process. All devices are
threads of one process, as in the demo; large_fleet.py runs thousands. The run leaves the coordinator's folder, with
simulate.toml, which repeats the run, and the true groups.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.artifacts.signed_program import PROGRAM_FACT, put_program
from coordinator.models.members import check_model_name
from coordinator.rounds.round import EvaluationPlan
from coordinator.rounds.sealed_round import too_few_asked
from coordinator.runtime.exchange.masked_sums import check_masked
from coordinator.storage.run_reader import STORE_FOLDER, open_database
from coordinator.storage.store import Store
from coordinator.strategies.base import Strategy
from coordinator.strategies.common.setting_checks import spare_centers
from coordinator.strategies.registry import (
    batch_size,
    kept_settings,
    make_method,
    method_name,
)
from edge_client.errors import UsageError
from edge_client.printable import counted
from edge_client.protocol.program import ENGINES
from emulator.config import CONFIG_FILE, GROUPS_FILE, resolved_table
from emulator.console import ConsoleProgress
from emulator.data.fleet_split import FleetData
from emulator.options import OPTIONS, SimulateArgs
from emulator.reports import display_names
from emulator.run.load import make_fleet
from emulator.run.summary import Record, result_summary, told_of_record
from emulator.testbed import monitor, testbed_files
from emulator.testbed.testbed import Testbed, run_testbed

if TYPE_CHECKING:
    from coordinator.local_broker import Broker
    from coordinator.models.registry import Model

MAX_DEVICES = 200  # devices with a thread each, and about what the embedded broker is meant for
DEADLINE_S = 3_600.0  # of an exchange: only a device that hangs exceeds it
UNBOUNDED = 1e9  # a device weighs by all of its samples, as in one process: none of them is a stranger's
VIRTUAL_ONLY = {
    "profiles": "devices are as fast and as reliable as this machine",
    "ray": "all processes are on this machine",
    "workers": "the devices are threads of one process",
    "hostile": "edge clients do not attack",
    "concurrency": "this command plays rounds; `concurrency` in coordinator.toml has real devices train without",
    "buffer": "it belongs to concurrency",
    "max-staleness": "it belongs to concurrency",
    "checkpoint-every": "the coordinator stores every round",
}


def simulate_over_mqtt(
    args: SimulateArgs, progress: ConsoleProgress, show: Callable[[Record], None], *, resume: bool = False
) -> None:
    """Run to the end; `show` is called with the JSON object of the command, which has no virtual seconds."""
    began = time.perf_counter()
    if resume:
        raise UsageError("a run over MQTT cannot be resumed", hint="leave --resume out: the run begins anew")
    args = checked_options(args)
    check_model_name(args.model)
    strategy = make_method(args.method, **args.settings)
    with progress.during("reading the data"):
        args, split = make_fleet(args)

    def finish(folder: Path, records: Sequence[Record]) -> None:
        keep_asked(folder, args, strategy, split)
        last = records[-1]
        told = result_summary(args, split.groups, last) | {"seconds": round(time.perf_counter() - began, 3)}
        progress.close()
        show(told | told_of_record(last) | {"run": str(folder)})

    run_over_mqtt(args, strategy, split, progress, finish)


def keep_asked(folder: Path, args: SimulateArgs, strategy: Strategy, split: FleetData) -> None:
    """Write what was asked, and the true groups, into the run's folder: how to repeat it, and its scores."""
    testbed_files.write_toml(folder / CONFIG_FILE, resolved_table(args, strategy))
    (folder / GROUPS_FILE).write_text(json.dumps(split.groups, sort_keys=True), encoding="utf-8")


def run_over_mqtt(  # noqa: PLR0913 - the parts of a run
    args: SimulateArgs,
    strategy: Strategy,
    split: FleetData,
    progress: ConsoleProgress,
    finish: Callable[[Path, Sequence[Record]], None],
    *,
    model: Model | None = None,
    broker: Broker | None = None,
) -> None:
    """Run to the end with `checked_options`; `finish` is called with the run's folder and the records of its rounds.

    `model` is one that has no name: its program is compiled here, and the coordinator finds it in its folder. `broker`
    is one of the caller's, in place of the one that `args` names.
    """
    settings, batch = kept_settings(args.method, strategy), batch_size(strategy)
    run = {"method": args.method, "name": run_name(strategy), "num-rounds": args.rounds, **settings}
    if len(split.devices) > MAX_DEVICES:
        raise UsageError(
            f"{len(split.devices)} devices, and a thread each: use at most {MAX_DEVICES} over MQTT",
            hint="lower --devices, or see `fedcenters-emulator fleet --help`, which takes thousands",
        )

    if spare := spare_centers(strategy, len(split.devices)):
        progress.say(spare)
    evaluation = EvaluationPlan(every=args.evaluate_every, fraction=args.fraction_evaluate)
    if few := too_few_asked(strategy, len(split.devices), tested=evaluation.smallest_share(args.rounds)):
        raise few
    check_masked(strategy, min_devices=len(split.devices))

    def play(testbed: Testbed) -> None:
        if model is not None:
            names = _engines(args)
            what = f"compiling {model.name} for {', '.join(map(display_names.engine_label, names))}"
            with progress.during(what) as now:
                put_own_program(testbed.folder, model, names, batch=batch, tell=lambda part: now(f"{what}: {part}"))
        records = _rounds(testbed, args, run, split)
        finish(testbed.folder, [r | {"answered": _answered(testbed.folder, r["round"])} for r in records])

    run_testbed(args.folder, broker or args.broker, progress, play, federation=federation_name)


def put_own_program(
    folder: Path, model: Model, engines: Sequence[str], *, batch: int, tell: Callable[[str], None]
) -> None:
    """Compile a model that has no name, for a coordinator that will find the program in its folder."""
    from coordinator.models.compiled import compiled_model
    from export.compiler.program import vector_of

    made = compiled_model(model, batch=batch, engines=engines, progress=tell)
    with closing(Store(folder / STORE_FOLDER)) as store:
        first = vector_of(model.module, made.program.schema)
        store.facts.get_or_make(PROGRAM_FACT, lambda: put_program(store, made.program, made.files.values(), first))


def _engines(args: SimulateArgs) -> list[str]:
    """What devices run, and pt2, of which files are made."""
    return sorted({args.engine, "pt2"})


def checked_options(args: SimulateArgs) -> SimulateArgs:
    """The options, with onnx for the engine `auto`. Raises UsageError for those that have no meaning over MQTT."""
    for key, why in VIRTUAL_ONLY.items():
        if getattr(args, OPTIONS[key].name) != OPTIONS[key].default:
            raise UsageError(f"{key} says nothing over MQTT: {why}", hint=f"leave {key} out, or --broker")
    if args.name and args.folder.exists():
        raise UsageError(f"{args.folder} has a run already", hint="choose another --name, or delete that folder")
    if args.engine not in ("auto", *ENGINES):
        raise UsageError(
            f"no edge client trains with engine {args.engine!r}",
            hint=f"use one of {', '.join(ENGINES)}, or no --broker",
        )
    return replace(args, engine="onnx" if args.engine == "auto" else args.engine)


def run_name(strategy: Strategy) -> str:
    """The name of the run in the coordinator's folder."""
    return _plain(method_name(strategy))


def _rounds(testbed: Testbed, args: SimulateArgs, run: Mapping[str, Any], split: FleetData) -> list[Record]:
    """Run the coordinator and the devices; -> the record of each round. `run` is the table of [[runs]]."""
    testbed.start_coordinator(
        devices=len(split.devices),
        runs=[run],
        seed=args.seed,
        model={"name": args.model, "batch-size": run["batch-size"], "engines": _engines(args)},
        formats=[],  # `fedcenters-export bundle` makes files of the centers, from the program for pt2
        codec=args.codec,
        evaluate_every=args.evaluate_every,
        fraction_evaluate=args.fraction_evaluate,
        loggers=args.loggers,
        deadline_s=DEADLINE_S,
        start_timeout_s=DEADLINE_S,
        max_samples_ratio=UNBOUNDED,
        below_quorum="continue",  # every device is waited for; a refused reply ends no simulation
    )
    testbed.progress.say(f"starting the coordinator and {counted(len(split.devices), 'device')}")
    testbed.start_devices(split.devices, lambda _: args.engine)
    tail = monitor.FileTail(testbed.folder / "metrics.jsonl")
    events = testbed.follow(tail, "done", doing="compiling the training program", silence_s=DEADLINE_S)
    return [event for event in events if event["event"] == "round"]


def _answered(folder: Path, number: int) -> float | None:
    """The share of a round's tasks with a reply that counted."""
    join = "tasks left join closings c using (run, round, exchange, cid)"
    with open_database(folder) as db:
        asked, answered = db.execute(f"select count(*), count(c.cid) from {join} where round = ?", (number,)).fetchone()  # noqa: S608
    return answered / asked if asked else None


def federation_name(folder: str) -> str:
    """The federation of a run in this folder, another one for each name: runs may share a broker."""
    plain = _plain(folder)
    digest = hashlib.sha256(folder.encode(errors="surrogatepass")).hexdigest()
    return plain if plain == folder else f"{plain[:23]}-{digest[:8]}"


def _plain(name: str) -> str:
    """The name with the characters that a federation and a run may have."""
    return re.sub("[^a-z0-9-]", "-", name.lower())[:32]
