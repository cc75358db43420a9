"""A run's folder as a result again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from coordinator.artifacts.bundle_source import is_run_folder as is_coordinators_folder
from coordinator.storage.state_codec import decode_state
from coordinator.strategies.base import State, Strategy
from coordinator.strategies.registry import make_method, method_name, method_path, method_settings, summed_members
from edge_client.data.dataset import DeviceData
from edge_client.errors import ConfigError, Malformed, UsageError
from edge_client.protocol.task import ClientId, Flat, Schema
from emulator.api.kept_model import check_module, read_facts, read_guide, read_kept_model
from emulator.api.result import Result
from emulator.bundle_source import is_run_folder, read_centers, read_tree
from emulator.config import FLEET_FILE, STATE_FILE, make_args, read_table
from emulator.data.fleet import Fleet, is_named_fleet
from emulator.data.fleet_split import FleetData, SamplesMissing, label_counts
from emulator.options import SimulateArgs
from emulator.reports.demo_page import read_events, round_events
from emulator.reports.pictures import records as pictures
from emulator.run.execute import SimulationResult
from emulator.run.load import load_fleet
from emulator.run.resolve import ResolvedRun, resolve_run
from emulator.run.run_parts import MARKED, kept_parts, same_samples, samples_checksums
from emulator.simulation.checkpoint import read_checkpoint
from export.compiler.losses.sample_losses import loss_name

if TYPE_CHECKING:
    from torch import nn

    from coordinator.models.registry import Model
    from coordinator.rounds.round_record import RoundRecord
    from export.compiler.losses.sample_losses import LossFunction

log = logging.getLogger(__name__)


def load(
    folder: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    fleet: Fleet | None = None,
    method: Strategy | None = None,
    loss: LossFunction | None = None,
) -> Result:
    """The result of a run that `Result.save`, `simulate(..., out=...)` or the command wrote.

    History, assignments, `predict`, `nearest` and `export` need nothing else: the folder has a traced copy of the
    user's own module, and what the devices taught `nearest`. `model`, `fleet`, `method` and `loss` are those of the
    run, where it had the user's own: `fleet` for the samples, on which `export` then compares its files, and which
    its quantization "int8-static" needs; `model` and `fleet` for `predict` by a device of a run with batch-norm
    batch; `method` for a class that cannot be imported, as of `__main__`; `loss` for the program of an export,
    which has the usual one without it, as a warning says. Raises ConfigError for a folder without a run, and for a
    part that is not the run's or is missing.

    >>> import fedcenters as fc, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = fc.simulate(fc.FedAvg(local_steps=2), fleet=fc.fleets.digits(devices=3), rounds=1)
    ...     again = fc.load(result.save(f"{folder}/mine"))
    >>> again.accuracy == result.accuracy
    True
    """
    place = Path(folder)
    if not is_run_folder(place):
        if is_coordinators_folder(place):
            told = f"{place} is a coordinator's folder, which has no device's samples and no traced model"
            hint = "`save` the result of `home.run(...)`, and load that; `fedcenters-export bundle` reads this one"
            raise ConfigError(told, hint=hint)
        if (kept := read_checkpoint(place)) is not None:
            told = f"{place} has a run that was interrupted after round {kept[1].round}"
            hint = f'go on: fc.simulate(..., out="{place.parent}", name="{place.name}", resume=True)'
            raise ConfigError(told, hint=hint)
        raise ConfigError(f"{place} has no simulated run", hint="give the folder that `save` wrote")
    place = place.absolute()  # parts of it are read later
    table = read_table(place / "config.toml")
    strategy = _method(table, method)
    args = replace(make_args(table, strategy=strategy), out=place.parent, name=place.name)
    run = resolve_run(args, strategy=strategy)
    split = _kept_split(place, run)
    if fleet is not None:
        loaded = load_fleet(run, fleet)
        _check_fleet(loaded.split, split, place)
        args, split = loaded.args, loaded.split
    prepared, schema, start, traced = _model(place, args, split, model, loss)
    found = _read(place, method_name(run.strategy), schema)
    return Result(
        method=run.strategy,
        args=args,
        run=found,
        split=split,
        start=start,
        attackers=run.attack.attackers(split.devices, args.seed),
        own_model=prepared,
        seconds=float(_fleet_facts(place).get("seconds", sum(found.real_seconds))),  # an older version kept the rounds'
        folder=place,
        taught=read_guide(place, traced=traced, own_loss=loss is not None) if fleet is None else None,
        marks={key: value for key, value in kept_parts(place).items() if key in MARKED},
    )


def _method(table: Mapping[str, Any], given: Strategy | None) -> Strategy:
    """The run's method. Raises ConfigError for one that cannot be imported, or that is not the run's."""
    name = str(table.get("method", SimulateArgs.method))
    if given is None:
        try:
            make_method(name)
        except UsageError as unknown:
            told = f"the method {name} cannot be made again: {unknown.message}"
            hint = f"give the run's own: fc.load(folder, method={name.rpartition(':')[2]}(...))"
            raise ConfigError(told, hint=hint) from None
        return make_method(name, **make_args(table).settings)
    if method_path(given).rpartition(":")[2] != name.rpartition(":")[2]:
        raise ConfigError(f"the run's method is {name}, not {method_path(given)}", hint="leave out method=, or give it")
    for key, value in method_settings(given).items():
        if table.get(key, value) != value:
            told = f"the run's {name} has {key} = {table[key]}, this one has {value}"
            raise ConfigError(told, hint="give the method with the settings of the run")
    return given


@dataclass(frozen=True)
class KeptDevices(Mapping[ClientId, DeviceData]):
    """The devices of a run's folder by name; `read` makes their samples again when the first is asked for."""

    names: Sequence[ClientId]
    read: Callable[[], Mapping[ClientId, DeviceData]] = field(repr=False)

    @cached_property
    def _samples(self) -> Mapping[ClientId, DeviceData]:
        return self.read()

    def __getitem__(self, name: ClientId) -> DeviceData:
        if name not in self.names:
            raise KeyError(name)
        return self._samples[name]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names


def _kept_split(place: Path, run: ResolvedRun) -> FleetData:
    """Names, groups, classes and columns from fleet.json; the samples when they are needed."""
    told = _fleet_facts(place)
    groups = {who: facts["group"] for who, facts in told["devices"].items() if facts["group"] is not None}
    return FleetData(
        devices=KeptDevices(sorted(told["devices"]), partial(_read_samples, place, run)),
        groups=groups,
        classes=tuple(told.get("classes", ())),
        columns=tuple(told.get("columns", ())),
        pixels=bool(told.get("pixels")),
        called={who: facts["called"] for who, facts in told["devices"].items() if "called" in facts},
        kept=told["devices"],
    )


def _read_samples(place: Path, run: ResolvedRun) -> Mapping[ClientId, DeviceData]:
    """A function by name, so that a loaded result can be pickled."""
    hint = f'give the run\'s own: fc.load("{place}", fleet=...)'
    if not is_named_fleet(run.args.data_set, run.args.partition):
        raise SamplesMissing(f"{place} does not hold the samples of {run.args.data_set!r}", hint=hint)
    made = load_fleet(run).split
    _check_fleet(made, _kept_split(place, run), place)
    return made.devices


def _fleet_facts(place: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((place / FLEET_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise ConfigError(f"{place / FLEET_FILE} cannot be read: {wrong}", hint="save the run again") from wrong
    return told


def _check_fleet(mine: FleetData, kept: FleetData, place: Path) -> None:
    """Raise ConfigError for another fleet than that of the folder, with the first difference."""
    hint = "give the run's own fleet, with the data and the seed that it had"
    for here, there in ((mine, kept), (kept, mine)):
        if strange := sorted(here.devices.keys() - there.devices.keys()):
            told = f"has {strange[0]!r}, which the run had not" if here is mine else f"has no {strange[0]!r}"
            other = sorted(kept.devices.keys() - mine.devices.keys())
            beside = f"; the run had {other[0]!r}" if other and here is mine else ""
            raise ConfigError(f"this fleet {told}{beside}", hint=hint)
    for name in ("columns", "classes"):
        values, theirs = ([str(v) for v in getattr(each, name)] for each in (mine, kept))
        if values != theirs and theirs:
            raise ConfigError(f"this fleet has the {name} {', '.join(values)}, the run {', '.join(theirs)}", hint=hint)
    for who, facts in _fleet_facts(place)["devices"].items():
        train = mine.devices[who].train
        if (samples := facts.get("samples", len(train))) != len(train):  # an older version tells of labels alone
            raise ConfigError(f"{who!r} has {len(train)} training samples, in the run {samples}", hint=hint)
        if label_counts(train.y).tolist() != facts["labels"]:
            raise ConfigError(f"{who!r} has other numbers of samples of each class than in the run", hint=hint)
    samples = kept_parts(place).get("samples")  # None: of an older version
    if samples is not None and not same_samples(samples_checksums(mine.devices), samples):
        raise ConfigError("this fleet has other samples than the run, as many of each class", hint=hint)


def _model(
    place: Path,
    args: SimulateArgs,
    split: FleetData,
    given: nn.Module | Callable[[], nn.Module] | None,
    loss: LossFunction | None,
) -> tuple[Model | None, Schema, Flat, bool]:
    """-> the user's own model, the tensors of a center, the first weights, and whether the model is a traced one."""
    from coordinator.models.registry import Model, build_model
    from coordinator.models.sums import with_members
    from emulator.api.models import first_model, make_module, own_model, schema_for
    from export.compiler.signatures.packed_inputs import pack_module

    facts = read_facts(place)
    if facts is None:  # one of ours, or a folder that an older version wrote
        if not given:
            _own_loss(place, None, loss, instead="its model's usual loss")
        try:
            model = (
                own_model(given, split, loss=loss, seed=args.seed, members=summed_members(args.method))
                if given
                else build_model(args.model, seed=args.seed)
            )
        except UsageError as unknown:
            hint = "give the run's own: fc.load(folder, model=...)"
            raise ConfigError(f"the model {args.model} cannot be made again: {unknown.message}", hint=hint) from None
        return model, schema_for(model), first_model(model), False
    fields_, schema, called = facts
    fields_["own_loss"] = _own_loss(place, called, loss, instead=fields_["loss"])
    kept = read_kept_model(place, fields_, schema)
    start = np.zeros(schema.size, np.float32) if kept is None else first_model(kept)
    if given is None:
        return kept, schema, start, True
    module = with_members(make_module(given, args.seed), summed_members(args.method))
    check_module(module, schema, None if kept is None else kept.module)
    module = pack_module(module, fields_["parts"]) if fields_["parts"] else module
    return Model(module=module, **fields_), schema, start, False


def _own_loss(place: Path, called: str | None, given: LossFunction | None, *, instead: str) -> LossFunction | None:
    """The loss that the run had, which no folder has. Raises ConfigError for one that a run without had not."""
    if given is not None and called is None:
        raise ConfigError(f"the run trained on {instead}, and no loss of your own", hint="leave out loss=")
    if given is not None and loss_name(given) != called:
        raise ConfigError(f"the run's loss is {called}, not {loss_name(given)}", hint="leave out loss=, or give it")
    if given is None and called is not None:
        log.warning(
            "the run's own loss %s is not in %s: an exported program has %s in its place, also for personal steps. "
            "Give it: fc.load(folder, loss=...)",
            called,
            place,
            instead,
        )
    return given


def _read(place: Path, method: str, schema: Schema) -> SimulationResult:
    """The rounds, and the state after the last: of its checkpoint, of a file, or the centers and their tree alone."""
    rounds = round_events(read_events(place / "metrics.jsonl"), method)
    folder, last = place / "centers" / method, rounds[-1]
    kept, whole = read_checkpoint(place), True
    if kept is not None and kept[1].round == last["round"]:
        state = kept[1].state
    elif (folder / STATE_FILE).is_file():
        state = _read_state(folder / STATE_FILE)
    else:
        state, whole = State(centers=np.stack(read_centers(folder, schema)), extra=read_tree(folder)), False
    if state.centers.shape[1] != schema.size:
        told = f"the centers have {state.centers.shape[1]} numbers, this module {schema.size}"
        raise ConfigError(told, hint="give the run's own module: fc.load(folder, model=...)")
    state = replace(state, assignment=state.assignment or last["assignment"])
    return SimulationResult(
        records=[cast("RoundRecord", {k: v for k, v in record.items() if k != "real_seconds"}) for record in rounds],
        real_seconds=[record.get("real_seconds", 0.0) for record in rounds],
        state=state,
        schema=schema,
        virtual_seconds=sum(record["seconds"] for record in rounds),
        kept=_read_pictures(place / pictures.PICTURES_FILE),
        whole=whole,
    )


def _read_pictures(file: Path) -> pictures.PictureData:
    try:
        return pictures.read_picture_data(file)
    except (OSError, ValueError) as wrong:
        hint = "save the run again, or delete that file, and the run has no pictures"
        raise ConfigError(f"{file} cannot be read: {wrong}", hint=hint) from wrong


def _read_state(file: Path) -> State:
    try:
        return decode_state(file.read_bytes())
    except (OSError, Malformed) as wrong:
        raise ConfigError(f"{file} cannot be read: {wrong}", hint="save the run again") from wrong
