"""The checkpoint of a simulated run in folder/checkpoint/, from which another process resumes it.

`state.safetensors` has the method's state, `run.json` the round and the state of the virtual network, `records.jsonl`
the rounds so far, `heard/` the data of the pictures, `own/` the devices' own models where the method uses them, `lost/`
the residuals of the codec. A resumed run ends with the same bits as a run without an interruption.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from coordinator.rounds.round_record import RoundRecord, upgraded_record
from coordinator.storage import state_codec
from coordinator.strategies.base import State
from coordinator.strategies.registry import make_method, method_settings
from edge_client.data.readers import reading_arrays
from edge_client.durable_files import sync_files, sync_folder
from edge_client.errors import ConfigError, Malformed, UsageError
from edge_client.protocol.task import ClientId, Flat

CHECKPOINT_FOLDER = "checkpoint"
COST = 1 / 20  # of the time, at most, where no number of rounds is given
FINGERPRINT_KEY = "lesson"  # in run.json, as earlier versions wrote it
OLD_BY = "by-user:least=2"  # what `fc.fleet(..., by=...)` was told as
Slot = tuple[ClientId, str]


class DamagedCheckpoint(ConfigError):
    """A file of a checkpoint is damaged or missing."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A run after round `round`. `network` is the virtual network; `fingerprint` has the options that decide results.

    `marks` tell the user's own loss and model from others (run_parts.py).
    """

    round: int
    state: State
    real_seconds: list[float]
    network: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    marks: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Writes a checkpoint after every `every` rounds and after the last (0: never); `resume` starts from the latest.

    None: after the first round, then as often as takes at most COST of the time. What is kept then depends on this
    machine; the numbers of the run, also of one that goes on, do not. Where they are not `needed`, a run is whole
    without the one that its disk has no room for.
    """

    folder: Path
    every: int | None
    resume: bool
    fingerprint: Mapping[str, Any]
    marks: Mapping[str, Any] = field(default_factory=dict)
    needed: bool = True

    def due(self, number: int, rounds: int, *, cheap: bool) -> bool:
        """Whether round `number` of `rounds` ends with a checkpoint; `cheap`: it takes at most COST of the time."""
        if self.every == 0:
            return False
        return number == rounds or (cheap if self.every is None else number % self.every == 0)

    def latest(self) -> tuple[Path, Checkpoint] | None:
        """The checkpoint to resume from and its folder. Raises ConfigError for a checkpoint of another run."""
        found = read_checkpoint(self.folder) if self.resume else None
        key = other_setting(self.fingerprint, found[1].fingerprint) if found else None
        if found and key:
            theirs, mine = found[1].fingerprint.get(key), self.fingerprint.get(key)
            raise ConfigError(
                f"the checkpoint in {self.folder} was made with {key} = {theirs!r}, not {mine!r}",
                hint="set it as it was, give the run another name, or leave out --resume",
            )
        return found


def other_setting(now: Mapping[str, Any], before: Mapping[str, Any]) -> str | None:
    """The first setting that a run of before did not have so; None where all agree.

    Where an earlier version wrote it, it lacks the settings that came later: these have the method's defaults. Earlier
    versions told a partition by a column without the column.
    """
    later = _default_settings(str(now.get("method", "")))
    for key in sorted({*now, *before}):
        mine = now.get(key)
        by_column = key == "partition" and str(mine).startswith("by=") and before.get(key) == OLD_BY
        came_later = key not in before and key in later and mine == later[key]
        if mine != before.get(key) and not by_column and not came_later:
            return key
    return None


def _default_settings(method: str) -> Mapping[str, Any]:
    try:
        return method_settings(make_method(method))
    except (UsageError, ConfigError, TypeError):  # a class without an import path, or that needs settings
        return {}


def begin_checkpoint(folder: Path) -> Path:
    """Make an empty folder beside the last checkpoint; `finish_checkpoint` makes it the checkpoint."""
    new = folder / f"{CHECKPOINT_FOLDER}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    return new


def finish_checkpoint(new: Path, checkpoint: Checkpoint, records: Iterable[RoundRecord]) -> None:
    """Replace the last checkpoint. A process that ends at any moment, or a power cut, leaves a whole checkpoint."""
    (new / "state.safetensors").write_bytes(state_codec.encode_state(checkpoint.state))
    told = {name: getattr(checkpoint, name) for name in ("round", "real_seconds", "network", "marks")}
    told[FINGERPRINT_KEY] = checkpoint.fingerprint
    (new / "run.json").write_text(json.dumps(told), encoding="utf-8")
    with (new / "records.jsonl").open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)
    sync_files(new)
    now, old = new.with_name(CHECKPOINT_FOLDER), new.with_name(f"{CHECKPOINT_FOLDER}.old")
    if now.exists():  # else the process ended between the two names, and the old one is the last
        shutil.rmtree(old, ignore_errors=True)
        now.rename(old)
    new.rename(now)
    sync_folder(new.parent)
    shutil.rmtree(old, ignore_errors=True)


def copy_checkpoint(run: Path, folder: Path) -> bool:
    """Copy a run's checkpoint, if it has one. The copy may be written, also of a run that is protected from writes."""
    if not (run / CHECKPOINT_FOLDER).is_dir():
        return False
    copy = shutil.copytree(run / CHECKPOINT_FOLDER, folder / CHECKPOINT_FOLDER, copy_function=shutil.copyfile)
    for place, *_ in os.walk(copy):
        Path(place).chmod(Path(place).stat().st_mode | stat.S_IRWXU)
    return True


def checkpoint_records(place: Path) -> Iterator[RoundRecord]:
    """The records of a checkpoint, one at a time."""
    with (place / "records.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield cast("RoundRecord", upgraded_record(json.loads(line)))


def read_checkpoint(folder: Path) -> tuple[Path, Checkpoint] | None:
    """The latest whole checkpoint and where it lies; None where there is none. Raises DamagedCheckpoint."""
    place = next((p for p in (folder / CHECKPOINT_FOLDER, folder / f"{CHECKPOINT_FOLDER}.old") if p.is_dir()), None)
    if place is None:
        return None
    with reading_checkpoint(place):
        told = json.loads((place / "run.json").read_text(encoding="utf-8"))
        state = state_codec.decode_state((place / "state.safetensors").read_bytes())
        return place, Checkpoint(state=state, fingerprint=told.pop(FINGERPRINT_KEY), **told)


@contextmanager
def reading_checkpoint(place: Path) -> Iterator[None]:
    """Raise DamagedCheckpoint where a file of the checkpoint is damaged or missing."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, Malformed) as wrong:
        told = f"{place} cannot be read: {wrong or type(wrong).__name__}"
        hint = "delete that folder; then the run begins anew, or, if it was finished, its centers alone are loaded"
        raise DamagedCheckpoint(told, hint=hint) from wrong


def save_models(folder: Path, name: str, models: Mapping[Slot, Flat]) -> None:
    """Vectors by device and slot -> folder/name.npz, one at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}.npz", "w") as archive:
        for (who, slot), vector in models.items():
            with archive.open(f"{slot}/{who}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(vector), allow_pickle=False)


def load_models(folder: Path, who: Collection[ClientId], into: MutableMapping[Slot, Flat]) -> None:
    """The vectors of these devices from every file of `folder`, one at a time. Raises NoArrays for a damaged one."""
    for path in sorted(folder.glob("*.npz")):
        with _open_archive(path) as arrays:
            for device, slot, name in _names(arrays.files):
                if device in who:
                    into[device, slot] = arrays[name]


def stored_slots(folder: Path) -> list[Slot]:
    """The device and the slot of each vector in `folder`. Raises NoArrays for a damaged file."""
    found: list[Slot] = []
    for path in sorted(folder.glob("*.npz")):
        with _open_archive(path) as arrays:
            found += [(device, slot) for device, slot, _ in _names(arrays.files)]
    return found


@contextmanager
def _open_archive(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    # opened here: numpy leaves a damaged one open
    with reading_arrays(), path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        yield arrays


def _names(files: Collection[str]) -> Iterator[tuple[ClientId, str, str]]:
    for name in files:
        slot, _, device = name.rpartition("/")
        yield device, slot, name
