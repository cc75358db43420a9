"""A whole run on one machine and in virtual time: the server's strategies and rounds, the client's training code.

Updates are rounded as the wire's f32 codec rounds them, so that a simulation and a run over MQTT with the same seed,
the same engine and the same data end with the same assignments and the same centers.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.metrics import ari, nmi, purity, round_record
from coordinator.runs import BEGIN, one_round, round_rng
from coordinator.strategies.base import State, Strategy, drive
from coordinator.strategies.registry import METHODS, Setting, make, settings_of
from edge_client.errors import UsageError
from edge_client.protocol import compress
from edge_client.protocol.task import ClientId, Flat, Schema
from emulator import datasets, schemes
from emulator.devices import draw_profiles
from emulator.engines.runtime import Runtime
from emulator.partitions import Split
from emulator.virtual import Devices, VirtualNetwork
from emulator.workers import crew

Record = dict[str, Any]
Progress = Callable[[Record], None]
DEADLINE_S = 600.0  # virtual seconds of an exchange


@dataclass(frozen=True, kw_only=True)
class SimulateArgs:
    """What `fedcenters-emulator simulate` was asked; `settings` are the method's, in kebab-case.

    An empty model or partition, and no number of devices, mean those that suit the data set (datasets.py).
    """

    method: str = "fesem"
    data_set: str = "digits"
    model: str = ""
    partition: str = ""
    devices: int | None = None
    groups: int | None = None  # replaces the partition's, where it has groups
    rounds: int = 10
    seed: int = 0
    engine: str = "onnx"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    data: Path | None = None
    workers: int = 1
    out: Path = Path("runs")
    name: str = ""  # of the folder in `out`; made from the method and the seed when empty


@dataclass(frozen=True, kw_only=True)
class Result:
    """One JSON object per round, the state after the last, how well it found the groups, and the virtual seconds.

    The scores are None for a fleet without true groups.
    """

    records: list[Record]
    state: State
    schema: Schema
    ari: float | None
    nmi: float | None
    purity: float | None
    virtual_seconds: float


def simulate_json(args: SimulateArgs, progress: Progress = lambda _: None) -> Record:
    """Run, write the run's folder, and give the JSON object that the command prints."""
    began = time.perf_counter()
    if args.rounds < 1 or args.workers < 1:
        raise UsageError(f"{args.rounds} rounds, {args.workers} workers", hint="use at least one of each")
    strategy = make(args.method, **args.settings)
    args, split = fleet_of(args)
    batch = int(settings_of(strategy)["batch-size"])
    with opened(args.model, split, seed=args.seed, batch=batch, engine=args.engine, workers=args.workers) as (
        devices,
        start,
    ):
        result = run(
            strategy, start, devices, split.groups, rounds=args.rounds, seed=args.seed, batch=batch, progress=progress
        )
    folder = args.out / (args.name or f"simulate-{args.method}-{args.seed}")
    write_run(folder, args, strategy, result, split)
    last = result.records[-1]
    return {
        "method": args.method,
        "data_set": args.data_set,
        "partition": args.partition,
        "rounds": args.rounds,
        "devices": args.devices,
        "clusters": len(result.state.centers),
        "accuracy": last["accuracy"],
        "f1": last["f1"],
        "ari": result.ari,
        "nmi": result.nmi,
        "purity": result.purity,
        "seconds": round(time.perf_counter() - began, 3),
        "virtual_seconds": round(result.virtual_seconds, 3),
        "run": str(folder),
    }


def fleet_of(args: SimulateArgs) -> tuple[SimulateArgs, Split]:
    """The fleet that was asked for, and the question with every default filled in."""
    entry = datasets.entry(args.data_set)
    model, partition = args.model or entry.model, args.partition or entry.partition
    if not model:
        raise UsageError(f"no model of ours suits {args.data_set}", hint="name yours: --model package.module:Factory")
    scheme = schemes.parse(partition, groups=args.groups)
    devices = entry.devices if args.devices is None else args.devices
    split = scheme.split(datasets.load(args.data_set, args.data, seed=args.seed), devices=devices, seed=args.seed)
    return replace(args, model=model, partition=partition, devices=len(split.devices)), split


@contextmanager
def opened(
    model_name: str, split: Split, *, seed: int, batch: int, engine: str = "onnx", workers: int = 1
) -> Iterator[tuple[Devices, Flat]]:
    """Compile the model for one engine; -> the devices, ready in `workers` processes, and the common first model."""
    from coordinator.models.registry import build
    from export.program import compile_program, vector_of

    model = build(model_name, seed=seed)
    facts: dict[str, Any] = {"name": model.name, "input": model.input, "classes": model.classes, "loss": model.loss}
    compiled = compile_program(model.module, **facts, batch=batch, engines=(engine,))
    program = compiled.program
    start = vector_of(model.module, program.schema)
    with tempfile.TemporaryDirectory(prefix="fedcenters-") as name:
        folder = Path(name)
        for sha256, blob in compiled.files.items():
            (folder / sha256).write_bytes(blob)
        files = {name: folder / container.sha256 for name, container in program.containers[engine].items()}
        recipe = Runtime(engine=engine, program=program, files=files)
        if workers == 1:
            yield Devices(learner=recipe.open(), local=split.devices), start
        else:
            with crew(recipe, split.devices, workers=workers, folder=folder) as devices:
                yield devices, start


def run(  # noqa: PLR0913 - a run has these settings
    strategy: Strategy,
    start: Flat,
    devices: Devices,
    groups: Mapping[ClientId, int],
    *,
    rounds: int,
    seed: int,
    batch: int,
    deadline_s: float = DEADLINE_S,
    progress: Progress = lambda _: None,
) -> Result:
    """Run the strategy from the common model `start` [schema.size] on devices that are ready."""
    schema, fleet, method = devices.program.schema, devices.fleet, _name_of(strategy)
    network = VirtualNetwork(devices, draw_profiles(fleet, seed), deadline_s=deadline_s)
    state = strategy.begin(start, schema, fleet, round_rng(seed, BEGIN))
    records: list[Record] = []
    for number in range(1, rounds + 1):
        network.open_round(number)
        exchanges = one_round(strategy, state, schema, fleet, round_rng(seed, number), batch=batch)
        state, report = drive(exchanges, network.ask)
        records.append(
            round_record(
                report,
                run=method,
                method=method,
                round=number,
                of=rounds,
                bytes_down=network.bytes_down,
                bytes_up=network.bytes_up,
                seconds=network.now_s - network.opened_s,
                local_steps=network.local_steps,
            )
        )
        progress(records[-1])
    known = sorted(set(state.assignment) & set(groups))
    labels = [groups[c] for c in known], [state.assignment[c] for c in known]
    scores = {score.__name__: score(*labels) if known else None for score in (ari, nmi, purity)}
    return Result(records=records, state=state, schema=schema, virtual_seconds=network.now_s, **scores)


def _name_of(strategy: Strategy) -> str:
    """The method's name in the registry; a class of the caller's own goes by its own name."""
    return next((name for name, kind in METHODS.items() if kind is type(strategy)), type(strategy).__name__.lower())


def write_run(folder: Path, args: SimulateArgs, strategy: Strategy, result: Result, split: Split) -> None:
    """metrics.jsonl, config.toml, fleet.json and centers/<method>/center-K.safetensors; earlier files are replaced."""
    import tomli_w

    centers = folder / "centers" / args.method
    centers.mkdir(parents=True, exist_ok=True)
    for old in centers.glob("center-*.safetensors"):
        old.unlink()
    for k, center in enumerate(result.state.centers):
        (centers / f"center-{k}.safetensors").write_bytes(
            compress.encode(center, result.schema, codec="f32", kind="model")
        )
    lines = [json.dumps(record, sort_keys=True) for record in result.records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    unsaid = ("out", "name", "settings", "data", "workers")
    asked = {k.replace("_", "-"): v for k, v in asdict(args).items() if k not in unsaid and v is not None}
    (folder / "config.toml").write_text(tomli_w.dumps({**asked, "settings": settings_of(strategy)}), encoding="utf-8")
    (folder / "fleet.json").write_text(json.dumps(described(split, result.schema), sort_keys=True), encoding="utf-8")


def described(split: Split, schema: Schema) -> Record:
    """For pictures: each device's true group, if any, and training samples of each class; the classifier's names."""
    devices: Record = {}
    for who, local in sorted(split.devices.items()):
        y = local.train.y
        counts = np.bincount(y).tolist() if np.issubdtype(y.dtype, np.integer) else [len(y)]
        devices[who] = {"group": split.groups.get(who), "labels": counts}
    return {"classifier": list(schema.classifier), "devices": devices}
