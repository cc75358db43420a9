"""What survives a power cut: the last result until it is acknowledged, own models, a probe's posterior, residuals.

    state/lock           one `join` at a time uses the folder
    state/birth          counts connections
    state/state.json     everything small, replaced as a whole; it names the blobs that belong to it
    state/kept/<sha256>  the last update, own models, residuals, responsibilities; written before state.json names them
    state/cache/         programs and models that came from the coordinator; may be deleted

A crash between two writes leaves the earlier state, and blobs that it does not name; these are removed later. Only the
owner reads kept/ and state.json, which has the keys of masked sums.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.durable_files import read_disk
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol import codecs, tensors
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.secure.device_state import MAX_STATE_BYTES as MAX_SUMS_BYTES
from edge_client.protocol.secure.device_state import read_state, write_state
from edge_client.protocol.secure.device_sums import DeviceSums
from edge_client.protocol.task import F64, MAX_SLOTS, TOO_MANY_SLOTS, Array, Flat, Schema
from edge_client.runtime.progress import TAKEN
from edge_client.training.summed import TrainedChoice
from edge_client.transport.blobs import BlobFolder, write_atomically
from edge_client.transport.folder_lock import refuse_unwritable

log = logging.getLogger(__name__)

VERSION = 1
MAX_STATE_BYTES = (1 << 20) + 2 * MAX_SUMS_BYTES  # of state.json; sums are a text in it, with its quotes escaped
U32_RANGE = 2**32


@dataclass(frozen=True, kw_only=True, order=True)
class TaskKey:
    """The identity of a task, unique on one device."""

    run: str
    round: int
    exchange: int

    @staticmethod
    def of(message: Mapping[str, Any]) -> TaskKey:
        return TaskKey(run=message["run"], round=message["round"], exchange=message["exchange"])


@dataclass(frozen=True, kw_only=True)
class StoredResult:
    """A finished task: what `rdy` says about it, and what its acknowledgement changes."""

    key: TaskKey
    n: int
    what: str  # "delta", "stats" or "masked"
    update: Manifest  # its bytes are kept
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    attempt: int = 0
    residual: str | None = None  # name of the residual that an "ok" commits ...
    residual_sha256: str | None = None  # ... and its blob
    status: str | None = None  # the acknowledgement, once it came
    epoch: int = 0  # of the task; at most that of a signed record
    told: bool = False  # whether it names, without a mask, the center that this device chose

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self) | {"key": asdict(self.key), "update": self.update.to_json()}
        del fields["epoch"], fields["told"]
        return fields

    @staticmethod
    def from_json(raw: dict[str, Any], *, epoch: int, told: bool) -> StoredResult:
        fields = raw | {"key": TaskKey(**raw["key"]), "update": Manifest.from_json(raw["update"])}
        return StoredResult(**fields, epoch=epoch, told=told)


@dataclass(frozen=True, kw_only=True)
class SumProgress:
    """What a stage of a sum changes on the device: its sums, its choice [K], what it trained in this round and slot."""

    sums: DeviceSums
    choice: F64 | None = None
    trained: tuple[str, TrainedChoice] | None = None


class DeviceState:
    """The durable state of one device. Only `next_birth` is thread-safe.

    Methods are durable when they return. On a disk that takes nothing, an epoch and an acknowledgement stay in memory
    until the next change: after a crash the coordinator says them again. `trusted_keys` are the ids of the keys whose
    records count; an epoch that another one signed, before a federation that began anew, counts no more.
    """

    def __init__(
        self, folder: Path, *, federation: str, device_id: str, trusted_keys: Collection[str] | None = None
    ) -> None:
        self._file, self._births = folder / "state.json", folder / "birth"
        self._owner = {"federation": federation, "device": device_id}
        self.pending_result = _open_folder(folder / "kept")
        self._lock = threading.Lock()
        raw, self.result = self._load()
        self.epoch: int = raw.get("signed_epoch", 0)  # the highest of a signed record
        self._epoch_key: str = raw.get("epoch_key", "")  # which key signed it; "": an earlier version did not note it
        if self._epoch_key and trusted_keys is not None and self._epoch_key not in trusted_keys:
            self.epoch, self._epoch_key = 0, ""
        self._own: dict[str, list[str]] = raw.get("own", {})  # run/slot -> [sha256, schema]
        self._residuals: dict[str, list[Any]] = raw.get("residuals", {})  # run/center/schema -> [sha256, round]
        self._posterior: list[Any] | None = raw.get("posterior")  # [sha256, run, round]
        self._trained: list[Any] | None = raw.get("trained")  # [sha256, run, round, slot]
        self._choice: list[Any] | None = raw.get("choice")  # [run, weights]
        self.sums = self._read_sums(raw.get("sums"))
        self.birth = self._read_birth()
        self._sweep()

    def next_birth(self) -> int:
        """The number of the next connection (u32)."""
        with self._lock:
            self.birth = (self.birth + 1) % U32_RANGE
            with refuse_unwritable():
                write_atomically(self._births, str(self.birth).encode())
            return self.birth

    def see_epoch(self, epoch: int, key: str) -> bool:
        """Note the epoch of a coordinator's record that `key` signed; False when a later one has spoken already."""
        if epoch > self.epoch or (epoch == self.epoch and key != self._epoch_key):
            self.epoch, self._epoch_key = epoch, key
            self._try_to_save()
        return epoch == self.epoch

    def own_model(self, run: str, slot: str, schema: Schema) -> Flat | None:
        """The model [schema.size] that this device last trained in this run and slot."""
        return self._vector(self._own.get(f"{run}/{slot}"), schema)

    def residual(self, key: TaskKey, center: int | None, schema: Schema) -> Flat | None:
        """What earlier updates lost to compression [schema.size], halved for each round that the device sat out."""
        found = self._residuals.get(residual_name(key.run, center, schema))
        vector = self._vector([found[0], schema.sha256] if found else None, schema)
        if found is None or vector is None:
            return None
        return vector * np.float32(0.5 ** max(0, key.round - found[1] - 1))

    def posterior(self, key: TaskKey) -> Array | None:
        """The responsibilities [M, n] that the last probe for them left, if it was of the same run and round."""
        if self._posterior is None or self._posterior[1:] != [key.run, key.round]:
            return None
        try:
            return tensors.unpack_tensors(self.pending_result.read(self._posterior[0]))[0]["posterior"]
        except (Malformed, KeyError) as wrong:
            log.warning("lost the responsibilities of a probe: %s", wrong)
            return None

    def choice(self, run: str) -> F64 | None:
        """The weights [K] in the centers that this device chose last in this run."""
        return np.array(self._choice[1]) if self._choice is not None and self._choice[0] == run else None

    def trained(self, key: TaskKey, slot: str) -> TrainedChoice | None:
        """What this device trained for sums in this round and slot."""
        if self._trained is None or self._trained[1:] != [key.run, key.round, slot]:
            return None
        try:
            kept = tensors.unpack_tensors(self.pending_result.read(self._trained[0]))[0]
            order = kept["order"].astype(np.int64) if "order" in kept else None
            return TrainedChoice(models=kept["models"], weights=kept["weights"], order=order)
        except (Malformed, KeyError) as wrong:
            log.warning("lost what was trained for a sum: %s", wrong)
            return None

    def store_result(
        self,
        result: StoredResult,
        update: bytes,
        schema: Schema,
        *,
        own: tuple[str, Flat] | None,
        posterior: Array | None = None,
        progress: SumProgress | None = None,
    ) -> StoredResult:
        """Store a finished task, its model and its responsibilities durably; the result may be announced afterwards.

        A stage of a sum and its answer are on disk both or not at all. What could not be written (OSError,
        Malformed) has not happened: it is never announced.
        """
        result = replace(result, epoch=min(result.epoch, self.epoch))
        before = dict(vars(self))
        del before["birth"]  # another thread counts them
        try:
            self._keep(result, update, schema, own, posterior, progress)
        except (OSError, Malformed) as wrong:
            vars(self).update(before)
            if getattr(wrong, "errno", 0) != errno.EIO:  # nothing on disk names what was put there
                self._sweep()
            raise
        self._sweep()
        return result

    def _keep(
        self,
        result: StoredResult,
        update: bytes,
        schema: Schema,
        own: tuple[str, Flat] | None,
        posterior: Array | None,
        progress: SumProgress | None,
    ) -> None:
        self.pending_result.put(update)
        if progress is not None:
            self._note(progress, result.key, schema)
        if posterior is not None:
            rows = {"posterior": posterior}
            sha256 = self.pending_result.put(
                tensors.pack_tensors(rows, kind="stats", codec="f32", schema=schema.sha256)
            )
            self._posterior = [sha256, result.key.run, result.key.round]
        if own is not None:
            slot, vector = own
            of_this_run = {name: kept for name, kept in self._own.items() if name.split("/")[0] == result.key.run}
            if len(of_this_run.keys() | {name := f"{result.key.run}/{slot}"}) > MAX_SLOTS:
                raise Malformed("bad_task", TOO_MANY_SLOTS)
            sha256 = self.pending_result.put(codecs.encode_vector(vector, schema, codec="f32", kind="model"))
            self._own = of_this_run | {name: [sha256, schema.sha256]}
        self.result = result
        self._save()

    def _note(self, progress: SumProgress, key: TaskKey, schema: Schema) -> None:
        self.sums = progress.sums
        if progress.choice is not None:
            self._choice = [key.run, progress.choice.tolist()]
        if progress.trained is not None:
            slot, mine = progress.trained
            rows = {"models": mine.models, "weights": mine.weights}
            rows |= {} if mine.order is None else {"order": mine.order}
            blob = tensors.pack_tensors(rows, kind="stats", codec="f32", schema=schema.sha256)
            self._trained = [self.pending_result.put(blob), key.run, key.round, slot]

    def is_over(self, key: TaskKey, epoch: int) -> bool:
        """Whether a task comes too late, its run being further here.

        A later epoch that asks for it is that of a coordinator which was restored from a backup.
        """
        done = self.result
        return done is not None and done.key.run == key.run and key < done.key and epoch <= done.epoch

    def keep_residual(self, residual: Flat, schema: Schema) -> str:
        """Store a residual that no acknowledgement has committed yet; returns its sha256 for `StoredResult`."""
        return self.pending_result.put(codecs.encode_vector(residual, schema, codec="f32", kind="model"))

    @property
    def owes_answer(self) -> bool:
        """Whether the residual of the next update depends on an answer that has not come."""
        return self.result is not None and self.result.status is None and self.result.residual is not None

    def commit_acknowledgement(self, status: str) -> None:
        """Record the coordinator's answer: commit the residual if it took the update, else keep the earlier one.

        An update that was refused may be announced again, to a later try of its exchange, and be taken then.
        """
        result = self.result
        if result is None or result.status in (status, *TAKEN):
            return
        if status in TAKEN and result.residual is not None:
            run = result.residual.split("/")[0]
            others = [name for name in self._residuals if name.split("/")[0] == run and name != result.residual]
            newest = sorted(others, key=lambda name: self._residuals[name][1])[1 - MAX_SLOTS :]
            kept = {name: self._residuals[name] for name in newest}
            self._residuals = kept | {result.residual: [result.residual_sha256, result.key.round]}
        self.result = replace(result, status=status)
        if self._try_to_save():
            self._sweep()

    def forget_result(self) -> None:
        """Never announce the last result again, and delete it."""
        self.result = None
        if self._try_to_save():
            self._sweep()

    def _vector(self, named: list[str] | None, schema: Schema) -> Flat | None:
        if named is None or named[1] != schema.sha256:
            return None
        try:
            return codecs.decode_vector(self.pending_result.read(named[0]), schema, kind="model")
        except Malformed as wrong:  # a damaged disk: go on without stored state
            log.warning("lost a kept model: %s", wrong.message)
            return None

    def _load(self) -> tuple[dict[str, Any], StoredResult | None]:
        try:
            raw = parse_json(read_disk(self._file.read_bytes), MAX_STATE_BYTES)
            owner = {name: raw[name] for name in self._owner}
            epoch, told = raw.get("result_epoch", 0), raw.get("result_told", False)
            result = None if raw["result"] is None else StoredResult.from_json(raw["result"], epoch=epoch, told=told)
        except FileNotFoundError:
            return {}, None
        except (Malformed, KeyError, TypeError) as wrong:
            log.warning("%s is damaged (%s); starting afresh", self._file, wrong)
            return {}, None
        if owner != self._owner:
            raise ConfigError(
                f"{self._file.parent} belongs to device {owner['device']} of federation {owner['federation']}",
                hint="give each device a state folder of its own, or delete this one",
            )
        return raw, result

    def _read_sums(self, text: str | None) -> DeviceSums:
        """The stored sums. Damaged ones are given up: without their keys they can tell nothing any more."""
        fresh = DeviceSums(federation=self._owner["federation"], cid=self._owner["device"])
        try:
            return fresh if text is None else read_state(text.encode())
        except Malformed as wrong:
            log.warning("lost the keys of masked sums (%s); new ones are made", wrong)
            return fresh

    def _try_to_save(self) -> bool:
        try:
            self._save()
        except OSError as wrong:
            log.warning("cannot write to the state folder: %s; the next change is written with this one", wrong)
            return False
        return True

    def _save(self) -> None:
        result = self.result.to_json() if self.result else None
        raw: dict[str, Any] = {
            "signed_epoch": self.epoch,
            "epoch_key": self._epoch_key,
            "result": result,
            "result_epoch": 0 if self.result is None else self.result.epoch,  # earlier versions read "result" strictly
            "result_told": self.result is not None and self.result.told,
            "own": self._own,
            "residuals": self._residuals,
        }
        kept = {"posterior": self._posterior, "trained": self._trained, "choice": self._choice}
        raw |= {"sums": write_state(self.sums).decode()} if self.sums.next_number else {}
        write_atomically(self._file, canonical_json({"v": VERSION} | kept | self._owner | raw), private=True)

    def _sweep(self) -> None:
        named = {sha256 for sha256, _ in (*self._own.values(), *self._residuals.values())}
        for kept in (self._posterior, self._trained):
            if kept is not None:
                named.add(kept[0])
        if self.result is not None:
            named.add(self.result.update.sha256)
            named.add(self.result.residual_sha256 or "")
        self.pending_result.keep_only(named)

    def _read_birth(self) -> int:
        try:
            return int(read_disk(self._births.read_bytes)) % U32_RANGE
        except (FileNotFoundError, ValueError):
            return 0


def _open_folder(path: Path) -> BlobFolder:
    """The folder of what this device trained, for its owner alone."""
    with refuse_unwritable():
        folder = BlobFolder(path)
    try:
        path.chmod(0o700)
    except OSError as wrong:  # a card with a file system that knows no modes
        log.warning("other users of this machine may read %s: %s", path, wrong)
    return folder


def residual_name(run: str, center: int | None, schema: Schema) -> str:
    """Residuals are kept per run, center and schema."""
    return f"{run}/{'-' if center is None else center}/{schema.sha256}"
