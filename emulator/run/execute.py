"""A whole run on one machine and in virtual time: the server's strategies and rounds, the client's training code.

Updates are rounded as the wire's f32 codec rounds them, so that a simulation and a run over MQTT with the same seed,
the same engine and the same data end with the same assignments and the same centers.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.rounds.metrics import ari, nmi, purity, round_record
from coordinator.rounds.privacy_accounting import privacy_spent, with_noise_key
from coordinator.rounds.round import EVERY_ROUND, INITIAL_ROUND, EvaluationPlan, round_rng, run_round
from coordinator.rounds.update_validation import MAX_UPDATE_RATIO
from coordinator.storage import experiment_trackers
from coordinator.strategies.base import State, Strategy, drive
from coordinator.strategies.common.center_tree import SplitTree
from coordinator.strategies.common.representation import annotate_representations
from coordinator.strategies.registry import make_method, method_name, method_settings
from edge_client.errors import UsageError
from edge_client.protocol import codecs
from edge_client.protocol.task import ClientId, Flat, Schema
from emulator.config import FINGERPRINT_KEYS, SimulateArgs, resolved_table
from emulator.data import partition_schemes, registry
from emulator.data.fleet_split import FleetData
from emulator.engines.base import Recipe
from emulator.engines.engine_spec import EngineSpec
from emulator.help import HELP
from emulator.parallel.process_pool import open_pool_for_spec, start_forkserver
from emulator.parallel.ray_pool import open_ray_pool
from emulator.reports.pictures import records as pictures
from emulator.reports.pictures.image_grid import pick_images
from emulator.reports.pictures.recorder import DEFAULT_REPRESENTATION, RunRecorder
from emulator.run_folder import TREE_FILE
from emulator.simulation import attacks, checkpoint, profile_files
from emulator.simulation.attacks import Attack, no_attack
from emulator.simulation.checkpoint import Checkpoint, Checkpoints
from emulator.simulation.codec_channel import CodecChannel, protocol_codec
from emulator.simulation.device_profiles import DEVICE_PROFILES, DeviceProfile, draw_profiles
from emulator.simulation.spill import SpilledRecords
from emulator.simulation.virtual_network import EmulatedDevices, VirtualNetwork

Record = dict[str, Any]
Progress = Callable[[Record], None]
DEADLINE_S = 600.0  # virtual seconds of an exchange


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """One JSON object per round, the state after the last, how well it found the groups, and the seconds.

    The scores are None for a fleet without true groups. `real_seconds` are those of each round on this machine; they
    are no part of the records, which are the same whenever and wherever a run is repeated.
    """

    records: Sequence[Record]
    real_seconds: Sequence[float]
    state: State
    schema: Schema
    ari: float | None
    nmi: float | None
    purity: float | None
    virtual_seconds: float
    kept: pictures.PictureData = field(
        default=pictures.PictureData(), repr=False
    )  # what the run's pictures are drawn from


def simulate_json(args: SimulateArgs, progress: Progress = lambda _: None, *, resume: bool = False) -> Record:
    """Run, write the run's folder, and give the JSON object that the command prints.

    `resume`: go on from the folder's checkpoint, if it has one; also to more rounds than were asked for then.
    """
    began = time.perf_counter()
    if args.rounds < 1 or args.workers < 1:
        raise UsageError(f"{args.rounds} rounds, {args.workers} workers", hint="use at least one of each")
    if args.ray and args.workers > 1:
        raise UsageError("--ray and --workers", hint="use one of them: a cluster has its own processes")
    kinds = DEVICE_PROFILES if args.profiles is None else profile_files.read_profiles(args.profiles)
    evaluation = EvaluationPlan(every=args.evaluate_every, fraction=args.fraction_evaluate)
    strategy = make_method(args.method, **args.settings)
    if args.checkpoint_every < 0:
        raise UsageError(f"checkpoint-every is {args.checkpoint_every}", hint="use 0 for no checkpoint")
    if args.workers > 1:
        start_forkserver()  # it imports while the data is read
    args, split = make_fleet(args)
    batch = int(method_settings(strategy)["batch-size"])
    facts = {"seed": args.seed, "batch": batch}
    enemy = attacks.parse_attack(args.hostile)
    liars = enemy.attackers(split.devices, args.seed)
    split = replace(split, devices=enemy.poison_data(split.devices, liars))
    table = resolved_table(args, method_settings(strategy))
    lesson = {key: value for key, value in table.items() if key in FINGERPRINT_KEYS or key not in HELP}
    checkpoints = Checkpoints(folder=args.folder, every=args.checkpoint_every, resume=resume, lesson=lesson)
    with (
        open_devices(args.model, split, **facts, engine=args.engine, workers=args.workers, ray=args.ray) as (
            devices,
            start,
        ),
        experiment_trackers.open_trackers(args.loggers, args.folder, table) as log,
    ):
        _write_config(args.folder, table)

        def tell(record: Record) -> None:
            log(record)
            progress(record)

        result = run_simulation(
            strategy,
            start,
            devices,
            split.groups,
            rounds=args.rounds,
            kinds=kinds,
            evaluation=evaluation,
            progress=tell,
            channel=make_channel(args.codec, devices.program.schema),
            attack=enemy.make_attack(liars, args.seed),
            checkpoints=checkpoints,
            **facts,
        )
    folder = args.folder
    write_run(folder, method_name(strategy), result, split)
    last = result.records[-1]
    return result_summary(args, split.groups, last) | {
        "seconds": round(time.perf_counter() - began, 3),
        "virtual_seconds": round(result.virtual_seconds, 3),
        "answered": last["answered"],
        **({"privacy": last["privacy"]} if "privacy" in last else {}),
        **({"hostile": sorted(liars), "honest_accuracy": attacks.honest_accuracy(last, liars)} if liars else {}),
        "run": str(folder),
    }


def result_summary(args: SimulateArgs, groups: Mapping[ClientId, int], last: Mapping[str, Any]) -> Record:
    """What was asked, and what the record of the last round says of it."""
    return {
        "method": args.method,
        "data_set": args.data_set,
        "partition": args.partition,
        "rounds": args.rounds,
        "devices": args.devices,
        "clusters": len(last["per_center"]),
        "accuracy": last["accuracy"],
        "f1": last["f1"],
        **clustering_scores(groups, last["assignment"]),
    }


def clustering_scores(groups: Mapping[ClientId, int], assignment: Mapping[ClientId, int]) -> dict[str, float | None]:
    """How well an assignment finds the true groups; None for a fleet without them."""
    known = sorted(set(assignment) & set(groups))
    labels = [groups[c] for c in known], [assignment[c] for c in known]
    return {score.__name__: score(*labels) if known else None for score in (ari, nmi, purity)}


def make_channel(codec: str, schema: Schema) -> CodecChannel:
    """How updates travel in this codec. Raises UsageError for one that the protocol does not know."""
    code = protocol_codec(codec)
    return CodecChannel(schema) if codec == "f32" else CodecChannel(schema, code, feedback=codec == "i8")


def make_fleet(args: SimulateArgs) -> tuple[SimulateArgs, FleetData]:
    """The fleet that was asked for, and the question with every default filled in."""
    entry = registry.find_data_set(args.data_set)
    model, partition = args.model or entry.model, args.partition or entry.partition
    if not model:
        raise UsageError(f"no model of ours suits {args.data_set}", hint="name yours: --model package.module:Factory")
    scheme = partition_schemes.parse_scheme(partition, groups=args.groups)
    devices = entry.devices if args.devices is None else args.devices
    split = scheme.split(
        registry.load_data_set(args.data_set, args.data, seed=args.seed), devices=devices, seed=args.seed
    )
    return replace(args, model=model, partition=partition, devices=len(split.devices)), split


@contextmanager
def open_devices(  # noqa: PLR0913 - one per way to run it
    model_name: str, split: FleetData, *, seed: int, batch: int, engine: str = "auto", workers: int = 1, ray: str = ""
) -> Iterator[tuple[EmulatedDevices, Flat]]:
    """Make the model ready for an engine (engines/registry.py); -> the devices and the common first model.

    The devices' work is done in `workers` processes, or by the Ray cluster at the address `ray`; a GPU has one.
    """
    with tempfile.TemporaryDirectory(prefix="fedcenters-") as name:
        spec = EngineSpec(model=model_name, seed=seed, engine=engine, batch=batch, folder=Path(name), processes=workers)
        if workers > 1 and not ray:
            with open_pool_for_spec(spec, split.devices, workers=workers) as ready:
                yield ready
            return
        made = spec.resolve()
        with _devices(made.recipe, split, ray=ray) as devices:
            yield devices, made.initial_model(devices.program)


def _devices(made: Recipe, split: FleetData, *, ray: str) -> AbstractContextManager[EmulatedDevices]:
    if ray:
        return open_ray_pool(made, split.devices, address=ray)
    return nullcontext(EmulatedDevices(learner=made.open(), local=split.devices))


def run_simulation(  # noqa: PLR0913 - a run has these settings
    strategy: Strategy,
    start: Flat,
    devices: EmulatedDevices,
    groups: Mapping[ClientId, int],
    *,
    rounds: int,
    seed: int,
    batch: int,
    deadline_s: float = DEADLINE_S,
    kinds: Sequence[DeviceProfile] = DEVICE_PROFILES,
    evaluation: EvaluationPlan = EVERY_ROUND,
    progress: Progress = lambda _: None,
    channel: CodecChannel | None = None,
    attack: Attack = no_attack,
    max_update_ratio: float = MAX_UPDATE_RATIO,
    checkpoints: Checkpoints | None = None,
) -> SimulationResult:
    """Run the strategy from the common model `start` [schema.size] on devices that are ready."""
    schema, fleet, method = devices.program.schema, devices.fleet, method_name(strategy)
    strategy = with_noise_key(
        strategy, schema, lambda: hashlib.sha256(f"emulated/{seed}".encode()).digest()
    )  # guards nobody
    limits: Record = {"deadline_s": deadline_s, "max_update_ratio": max_update_ratio}
    network = VirtualNetwork(
        devices, draw_profiles(fleet, seed, kinds), seed=seed, channel=channel, attack=attack, **limits
    )
    recorder = RunRecorder(
        fleet, schema, rounds=rounds, kind=getattr(strategy, "representation", DEFAULT_REPRESENTATION)
    )
    records, real_seconds = SpilledRecords(), list[float]()
    if before := checkpoints.latest() if checkpoints else None:
        state, real_seconds = _restore_checkpoint(*before, devices, network, recorder, records)
    else:
        state = strategy.begin(start, schema, fleet, round_rng(seed, INITIAL_ROUND))
    for number in range(len(records) + 1, rounds + 1):
        began = time.perf_counter()
        network.open_round(number)
        rng, which = round_rng(seed, number), {"round": number, "of": rounds}
        exchanges = run_round(strategy, state, schema, fleet, rng, batch=batch, evaluation=evaluation, **which)
        state, report = drive(exchanges, recorder.record_exchanges(network.ask, number, state))
        recorder.record_round_end(number, state)
        record = round_record(
            report,
            run=method,
            method=method,
            bytes_down=network.bytes_down,
            bytes_up=network.bytes_up,
            seconds=network.now_s - network.opened_s,
            local_steps=network.local_steps,
            **which,
        ) | {"answered": network.answered / network.asked if network.asked else None}
        record |= privacy_spent(strategy, state)
        record |= {"refused": dict(sorted(network.refused.items()))} if network.refused else {}
        records.append(record)
        real_seconds.append(round(time.perf_counter() - began, 3))
        progress({**record, "real_seconds": real_seconds[-1]})
        if checkpoints and checkpoints.due(number, rounds):
            _write_checkpoint(checkpoints, number, state, devices, network, recorder, records, real_seconds)
    told: dict[str, Any] = {"real_seconds": real_seconds, "virtual_seconds": network.now_s}
    told |= clustering_scores(groups, state.assignment)
    return SimulationResult(records=records, state=state, schema=schema, kept=recorder.picture_data(), **told)


def _write_checkpoint(  # noqa: PLR0913, PLR0917 - all that a run is made of
    checkpoints: Checkpoints,
    number: int,
    state: State,
    devices: EmulatedDevices,
    network: VirtualNetwork,
    recorder: RunRecorder,
    records: SpilledRecords,
    real_seconds: list[float],
) -> None:
    """A checkpoint after round `number`."""
    lost = checkpoint.begin_checkpoint(checkpoints.folder) / "lost"
    known = network.to_json(lost)
    recorder.keep(lost.with_name("heard"))
    if devices.asks_own:
        devices.keep(lost.with_name("own"))
    done = Checkpoint(round=number, state=state, real_seconds=real_seconds, network=known, lesson=checkpoints.lesson)
    checkpoint.finish_checkpoint(lost.parent, done, records)


def _restore_checkpoint(
    place: Path,
    before: Checkpoint,
    devices: EmulatedDevices,
    network: VirtualNetwork,
    recorder: RunRecorder,
    records: SpilledRecords,
) -> tuple[State, list[float]]:
    """Everything as it was after the checkpoint's round; -> the state and the seconds of each round."""
    for record in checkpoint.checkpoint_records(place):
        records.append(record)
    network.recall(before.network, place / "lost")
    recorder.recall(place / "heard")
    if (place / "own").is_dir():
        devices.recall(place / "own")
        devices.asks_own = True
    else:
        devices.forgotten = True
    return before.state, list(before.real_seconds)


def _write_config(folder: Path, table: Mapping[str, Any]) -> None:
    """The folder and its config.toml, so that a run that is interrupted can be resumed from it."""
    import tomli_w

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(annotate_representations(tomli_w.dumps(table)), encoding="utf-8")
    except OSError as wrong:
        raise UsageError(f"cannot write to {folder}: {wrong.strerror}", hint="choose another --out") from wrong


def write_run(folder: Path, method: str, result: SimulationResult, split: FleetData) -> None:
    """metrics.jsonl, fleet.json, pictures.npz, centers/<method>/center-K.safetensors; replaces earlier ones."""
    centers = folder / "centers" / method
    centers.mkdir(parents=True, exist_ok=True)
    for old in centers.glob("center-*.safetensors"):
        old.unlink()
    for k, center in enumerate(result.state.centers):
        (centers / f"center-{k}.safetensors").write_bytes(
            codecs.encode_vector(center, result.schema, codec="f32", kind="model")
        )
    tree = SplitTree.from_state(result.state)
    (centers / TREE_FILE).unlink(missing_ok=True)
    if len(tree.models):
        np.savez(centers / TREE_FILE, edges=tree.edges, models=tree.models.astype(np.float32))
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as metrics:
        for record, real_s in zip(result.records, result.real_seconds, strict=True):
            metrics.write(json.dumps({**record, "real_seconds": real_s}, sort_keys=True) + "\n")
    pictures.write_picture_data(
        folder / pictures.PICTURES_FILE,
        replace(result.kept, images=pick_images(split.devices, result.state.assignment)),
    )
    (folder / "fleet.json").write_text(
        json.dumps(describe_fleet(split, result.schema), sort_keys=True), encoding="utf-8"
    )


def describe_fleet(split: FleetData, schema: Schema) -> Record:
    """For pictures: each device's true group, if any, and training samples of each class; the classifier's names."""
    devices: Record = {}
    for who, local in sorted(split.devices.items()):
        y = local.train.y
        counts = np.bincount(y).tolist() if np.issubdtype(y.dtype, np.integer) else [len(y)]
        devices[who] = {"group": split.groups.get(who), "labels": counts}
    return {"classifier": list(schema.classifier), "devices": devices}
