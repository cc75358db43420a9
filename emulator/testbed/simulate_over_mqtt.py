"""`simulate --broker`: the question of a simulated run, put to real processes: a broker, a coordinator, edge clients.

Nothing is virtual: models travel over MQTT, and time is this machine's. With the same engine the result is that of the
run in one process. All devices are threads of one process, as in the demo; large_fleet.py takes thousands. Leaves the
coordinator's folder, and in it simulate.toml, which asks the same question again, and the true groups.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.storage.run_reader import reading
from coordinator.strategies.base import Strategy
from coordinator.strategies.registry import make, name_of, settings_of
from edge_client.engines.base import ENGINES
from edge_client.errors import UsageError
from emulator.config import FIELDS, GROUPS, QUESTION, SimulateArgs, table_of
from emulator.console import Talk
from emulator.data.fleet_split import Split
from emulator.simulate import Record, fleet_of, reached
from emulator.testbed import monitor, testbed_files
from emulator.testbed.testbed import Scene, played

MOST = 200  # devices with a thread each, and about what the embedded broker is meant for
DEADLINE_S = 3_600.0  # of an exchange: nobody is late but a device that hangs
VIRTUAL = {
    "profiles": "devices are as fast and as reliable as this machine",
    "ray": "all processes are on this machine",
    "workers": "the devices are threads of one process",
    "hostile": "edge clients do not attack",
    "checkpoint-every": "the coordinator stores every round",
}


def simulate_json(args: SimulateArgs, talk: Talk, *, resume: bool = False) -> Record:
    """Play the run to its end; -> the JSON object that the command prints, which has no virtual seconds."""
    began = time.perf_counter()
    _check(args, resume=resume)
    strategy = make(args.method, **args.settings)
    args, split = fleet_of(replace(args, engine="onnx" if args.engine == "auto" else args.engine))
    if len(split.devices) > MOST:
        raise UsageError(
            f"{len(split.devices)} devices, and a thread each: use at most {MOST} over MQTT",
            hint="lower --devices, or see `fedcenters-emulator fleet --help`, which takes thousands",
        )
    federation = _plain(args.folder.name)

    def play(scene: Scene) -> Record:
        last = _rounds(scene, args, strategy, split)
        testbed_files.write_toml(scene.folder / QUESTION, table_of(args, settings_of(strategy)))
        (scene.folder / GROUPS).write_text(json.dumps(split.groups, sort_keys=True), encoding="utf-8")
        told = reached(args, split.groups, last) | {"seconds": round(time.perf_counter() - began, 3)}
        answered = {"answered": _answered(scene.folder, last["round"])}
        return told | answered | {key: last[key] for key in ("privacy",) if key in last} | {"run": str(scene.folder)}

    return played(args.folder, args.broker, talk, play, federation=federation)


def _check(args: SimulateArgs, *, resume: bool) -> None:
    """Refuse what could not be obeyed. Raises UsageError."""
    for key, why in VIRTUAL.items():
        field = FIELDS.get(key, key).replace("-", "_")
        if getattr(args, field) != getattr(SimulateArgs, field):
            raise UsageError(f"{key} says nothing over MQTT: {why}", hint=f"leave {key} out, or --broker")
    if resume:
        raise UsageError("a run over MQTT cannot be resumed", hint="leave --resume out: the run begins anew")
    if args.engine not in ("auto", *ENGINES):
        raise UsageError(
            f"no edge client trains with engine {args.engine!r}",
            hint=f"use one of {', '.join(ENGINES)}, or no --broker",
        )


def _rounds(scene: Scene, args: SimulateArgs, strategy: Strategy, split: Split) -> Mapping[str, Any]:
    """Everything from the first process to the last; -> the record of the last round."""
    settings = settings_of(strategy)
    run = {"method": args.method, "name": _plain(name_of(strategy)), "num-rounds": args.rounds, **settings}
    coordinator = scene.start_coordinator(
        devices=len(split.devices),
        runs=[run],
        seed=args.seed,
        model={"name": args.model, "batch-size": settings["batch-size"], "engines": sorted({args.engine, "pt2"})},
        formats=[],  # `fedcenters-export bundle` makes files of the centers, from the program for pt2
        codec=args.codec,
        evaluate_every=args.evaluate_every,
        fraction_evaluate=args.fraction_evaluate,
        loggers=args.loggers,
        deadline_s=DEADLINE_S,
        start_timeout_s=DEADLINE_S,
        below_quorum="continue",  # everybody is waited for; an answer that is refused ends no simulation
    )
    workers = scene.start_devices(split.devices, lambda _: args.engine)
    tail = monitor.Tail(scene.folder / "metrics.jsonl")
    events = scene.follow(tail, "done", doing="compiling the training program", silence_s=DEADLINE_S)
    scene.children.leave(workers)
    scene.children.leave([coordinator])
    return [event for event in events if event["event"] == "round"][-1]


def _answered(folder: Path, number: int) -> float | None:
    """Which share of a round's tasks has an answer that counted."""
    join = "tasks left join closings c using (run, round, exchange, cid)"
    with reading(folder) as db:
        asked, answered = db.execute(f"select count(*), count(c.cid) from {join} where round = ?", (number,)).fetchone()  # noqa: S608
    return answered / asked if asked else None


def _plain(name: str) -> str:
    """As a federation and a run may be called."""
    return re.sub("[^a-z0-9-]", "-", name.lower())[:32]
