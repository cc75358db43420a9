"""A whole run in one process and in virtual time: the server's strategies and rounds, the client's training code.

Updates are rounded as the wire's f32 codec rounds them, so that a simulation and a run over MQTT with the same seed,
the same engine and the same data end with the same assignments and the same centers.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coordinator.metrics import ari, round_record
from coordinator.runs import BEGIN, one_round, round_rng
from coordinator.strategies.base import State, Strategy, drive
from coordinator.strategies.registry import Setting, make, settings_of
from edge_client.engines.base import open_engine
from edge_client.errors import UsageError
from edge_client.protocol import compress
from edge_client.protocol.task import ClientId, Flat, Schema
from emulator.devices import draw_profiles
from emulator.partitions import Split, digits_fleet
from emulator.virtual import Devices, VirtualNetwork

Record = dict[str, Any]
Progress = Callable[[Record], None]


@dataclass(frozen=True, kw_only=True)
class SimulateArgs:
    """What `fedcenters-emulator simulate` was asked; `settings` are the method's, in kebab-case."""

    method: str = "fesem"
    data_set: str = "digits"
    model: str = "digits-mlp"
    devices: int = 12
    groups: int = 3
    rounds: int = 10
    seed: int = 0
    engine: str = "onnx"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    out: Path = Path("runs")
    name: str = ""  # of the folder in `out`; made from the method and the seed when empty


@dataclass(frozen=True, kw_only=True)
class Result:
    """One JSON object per round, the state after the last, how well it found the groups, and the virtual seconds."""

    records: list[Record]
    state: State
    schema: Schema
    ari: float
    virtual_seconds: float


def simulate_json(args: SimulateArgs, progress: Progress = lambda _: None) -> Record:
    """Run, write the run's folder, and give the JSON object that the command prints."""
    began = time.perf_counter()
    if args.data_set != "digits":
        raise UsageError(f"no partition for data set {args.data_set!r}", hint="use digits")
    if args.rounds < 1:
        raise UsageError(f"{args.rounds} rounds", hint="use at least one")
    strategy = make(args.method, **args.settings)
    split = digits_fleet(args.devices, groups=args.groups, seed=args.seed)
    batch = int(settings_of(strategy)["batch-size"])
    result = simulate(
        strategy,
        args.model,
        split,
        rounds=args.rounds,
        seed=args.seed,
        engine=args.engine,
        batch=batch,
        progress=progress,
    )
    folder = args.out / (args.name or f"simulate-{args.method}-{args.seed}")
    write_run(folder, args, strategy, result)
    last = result.records[-1]
    return {
        "method": args.method,
        "rounds": args.rounds,
        "devices": args.devices,
        "clusters": len(result.state.centers),
        "accuracy": last["accuracy"],
        "f1": last["f1"],
        "ari": result.ari,
        "seconds": round(time.perf_counter() - began, 3),
        "virtual_seconds": round(result.virtual_seconds, 3),
        "run": str(folder),
    }


def simulate(  # noqa: PLR0913 - a run has these settings
    strategy: Strategy,
    model_name: str,
    split: Split,
    *,
    rounds: int,
    seed: int,
    batch: int,
    engine: str = "onnx",
    progress: Progress = lambda _: None,
) -> Result:
    """Compile the model for one engine and run `rounds` rounds; `batch` is the strategy's batch size."""
    from coordinator.models.registry import build
    from export.program import compile_program, vector_of

    model = build(model_name, seed=seed)
    facts: dict[str, Any] = {"name": model.name, "input": model.input, "classes": model.classes, "loss": model.loss}
    compiled = compile_program(model.module, **facts, batch=batch, engines=(engine,))
    program = compiled.program
    with tempfile.TemporaryDirectory(prefix="fedcenters-") as folder:
        for sha256, blob in compiled.files.items():
            (Path(folder) / sha256).write_bytes(blob)
        files = {name: Path(folder) / container.sha256 for name, container in program.containers[engine].items()}
        devices = Devices(engine=open_engine(engine, program, files), program=program, local=split.devices)
        start = vector_of(model.module, program.schema)
        return run(strategy, start, devices, split.groups, rounds=rounds, seed=seed, batch=batch, progress=progress)


def run(  # noqa: PLR0913 - a run has these settings
    strategy: Strategy,
    start: Flat,
    devices: Devices,
    groups: Mapping[ClientId, int],
    *,
    rounds: int,
    seed: int,
    batch: int,
    progress: Progress = lambda _: None,
) -> Result:
    """Run the strategy from the common model `start` [schema.size] on devices that are ready."""
    schema, fleet, method = devices.program.schema, devices.fleet, type(strategy).__name__.lower()
    network = VirtualNetwork(devices, draw_profiles(fleet, seed))
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
            )
        )
        progress(records[-1])
    known = sorted(state.assignment)
    score = ari([groups[c] for c in known], [state.assignment[c] for c in known])
    return Result(records=records, state=state, schema=schema, ari=score, virtual_seconds=network.now_s)


def write_run(folder: Path, args: SimulateArgs, strategy: Strategy, result: Result) -> None:
    """metrics.jsonl, config.toml and centers/<method>/center-K.safetensors; files of an earlier run are replaced."""
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
    asked = {k.replace("_", "-"): v for k, v in asdict(args).items() if k not in ("out", "name", "settings")}
    (folder / "config.toml").write_text(tomli_w.dumps({**asked, "settings": settings_of(strategy)}), encoding="utf-8")
