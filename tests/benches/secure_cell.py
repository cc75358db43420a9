"""One cell of secure_sums.py: a round of FedAvg, masked or in the clear, between two processes without a network.

    python -m tests.benches.secure_cell DEVICES PARAMETERS SECURE       prints CellCost as JSON

This process is the coordinator, with its store on disk; the other one has all devices and lets one after another work.
A device keeps its state in a file, as a real one does. Nothing trains: a trained model is the center and a normal
deviate. The devices that drop out have dealt their shares. Of a large cohort MASKING devices mask for real, and the
center is compared with the mean of the models where all do. Memory is the peak beyond what the process held before: of
the round for the coordinator, of the first device's steps for a device. Linux only.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.rounds.sealed_round import sealed_round
from coordinator.rounds.update_validation import MAX_UPDATE_RMS, AskedStage, ReplySpec, decode_accepted, decode_reply
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from coordinator.storage.store import Store
from coordinator.strategies.base import Exchange, Replies, StoredReplies, SumByCenter, drive
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.common.server_options import ServerOptions
from edge_client.protocol import codecs
from edge_client.protocol.secure import device_state, device_sums
from edge_client.protocol.secure.device_sums import DeviceSums
from edge_client.protocol.secure.masks import packed_size
from edge_client.protocol.secure.sum_messages import write_upload
from edge_client.protocol.sum_codec import Work
from edge_client.protocol.summed_task import SummedFit, Words
from edge_client.protocol.task import F64, Array, Fit, Flat, Schema, TensorSpec
from edge_client.training.skellam import secret_stream
from edge_client.training.summed import TrainedChoice, contribution
from tests.support.secure_cohort import cids
from tests.support.stored_cohort import FEDERATION, StoredCohort, stage_answer

SAMPLES = 40
DROPPED_PERCENT = 30
MASKING = 50  # devices of a cell that mask for real; the others send random words, whose sum costs the same
FIRST = ExchangeKey("r", 1, 0)
BASE = "ab" * 32  # in place of the center's hash


@dataclass(frozen=True, kw_only=True)
class CellCost:
    """What one round took; bytes and CPU seconds of one device, memory in MB, and how far the center is off."""

    up: float
    down: float
    device_s: float
    device_mb: float
    coordinator_s: float
    coordinator_mb: float
    off: float


@contextmanager
def peak_mb() -> Iterator[list[float]]:
    """The most MB of memory that the block held beyond what there was; the list has it afterwards."""
    Path("/proc/self/clear_refs").write_text("5")
    found, before = list[float](), _status("VmRSS")
    yield found
    found.append(_status("VmHWM") - before)


def _status(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1_024 / 1e6


@dataclass
class DevicesSide:
    """The devices: answers to tasks, with the CPU seconds of each and the memory of the first."""

    folder: Path
    schema: Schema
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    memory: list[float] = field(default_factory=list)
    total: F64 = field(default_factory=lambda: np.zeros(0))
    first: str = ""
    masked: set[str] = field(default_factory=set)

    def answer(self, cid: str, key: ExchangeKey, task: AskedStage | Fit) -> bytes:
        self.first = self.first or cid
        if cid != self.first:
            return self._timed(cid, key, task)
        with peak_mb() as found:
            data = self._timed(cid, key, task)
        self.memory += found
        return data

    def _timed(self, cid: str, key: ExchangeKey, task: AskedStage | Fit) -> bytes:
        work = task.work if isinstance(task, AskedStage) else task
        model = None if work is None else self._trained(cid, work)
        began = time.process_time()
        if isinstance(task, Fit) and model is not None and isinstance(task.start, np.ndarray):
            data = codecs.encode_vector(model - task.start, self.schema, codec="f32", kind="delta", base=BASE)
        elif isinstance(task, AskedStage):
            data = self._stage(cid, key, task, model)
        self.seconds[cid] += time.process_time() - began
        return data

    def _stage(self, cid: str, key: ExchangeKey, task: AskedStage, model: Flat | None) -> bytes:
        file = self.folder / cid
        sums = (
            device_state.read_state(file.read_bytes()) if file.exists() else DeviceSums(federation=FEDERATION, cid=cid)
        )

        def words_of(_: str, work: Work) -> Words:
            if not isinstance(work, SummedFit) or model is None:
                raise TypeError("a fit is played")
            alone = TrainedChoice(models=model[None], weights=np.ones(1), order=np.zeros(1, np.int64))
            words = contribution(work, alone, secret_stream()).words
            if words is None:
                raise TypeError("no words")
            return words.astype(np.uint32)

        if task.stage == "add" and len(self.masked | {cid}) > MASKING:
            sums, data = _drawn_upload(sums, task)
        else:
            self.masked |= {cid} if task.stage == "add" else set()
            sums, data = stage_answer(sums, task, key, words_of)
        file.write_bytes(device_state.write_state(sums))
        return data

    def _trained(self, cid: str, work: Work) -> Flat:
        center = work.start if isinstance(work, Fit) else None
        if not isinstance(center, np.ndarray):
            raise TypeError("a model is sent")
        moved = np.random.default_rng(zlib.crc32(cid.encode())).standard_normal(len(center), np.float32) / 100
        if not self.total.size:
            self.total = np.zeros(len(center))
        self.total += moved
        return center + moved


def _drawn_upload(sums: DeviceSums, task: AskedStage) -> tuple[DeviceSums, bytes]:
    """Random words as an upload, and the state of a device that masked."""
    sums = device_sums.on_relay(sums, task.message)
    ((name, mine),) = sums.sums.items()
    words = np.random.default_rng(0).bytes(packed_size(mine.roster.words, mine.roster.bits))
    upload = write_upload(name, mine.roster.words, mine.roster.bits, words)
    return replace(sums, sums={name: replace(mine, upload="drawn")}), upload


def _devices_process(pipe: Connection, folder: Path, schema: Schema, dropped: int) -> None:
    """Serve until the pipe closes. A task's work comes once, and is then named by None."""
    side, work = DevicesSide(folder, schema), dict[str, Any]()
    while (asked := pipe.recv()) is not None:
        cid, key, task = asked
        if task == "work":
            work = key
        elif task == "fit":
            pipe.send_bytes(side.answer(cid, key, work["fit"]))
        else:
            pipe.send_bytes(side.answer(cid, key, replace(task, work=work["sum"] if task.stage == "add" else None)))
    whole = sorted(side.seconds.values())[-min(MASKING, len(side.seconds) - dropped) :]
    pipe.send((statistics.median(whole), max(side.memory), side.total if len(side.masked) < MASKING else None))


@dataclass
class CoordinatorSide(StoredCohort):
    """The coordinator with its store; it asks the devices of the other process."""

    pipe: Connection = field(kw_only=True)
    schema: Schema = field(kw_only=True)
    up: dict[str, int] = field(default_factory=lambda: defaultdict(int), kw_only=True)
    down: dict[str, int] = field(default_factory=lambda: defaultdict(int), kw_only=True)
    told: bool = field(default=False, kw_only=True)
    drawn: bool = field(kw_only=True)  # whether some uploads are: then their sum is unmasked, and is no sum of models

    def answer(self, key: ExchangeKey, cid: str, task: AskedStage) -> bytes:
        if task.work is not None and not self.told:
            self.tell({"sum": task.work})
        plain = AskedStage(stage=task.stage, message=task.message, after=task.after, decode=_nothing, max_bytes=0)
        data = self._asked(cid, key, plain)
        self.down[cid] += len(task.message) + (0 if task.work is None else 4 * self.schema.size)
        return data

    def tell(self, work: Mapping[str, Any]) -> None:
        self.pipe.send(("", work, "work"))
        self.told = True

    def _asked(self, cid: str, key: ExchangeKey, task: AskedStage | str) -> bytes:
        self.pipe.send((cid, key, task))
        data = self.pipe.recv_bytes()
        self.up[cid] += len(data)
        return data

    def ask_round(self, exchange: Exchange) -> Replies:
        """One exchange of the method."""
        if isinstance(exchange, SumByCenter):
            sums = self.masked_sums()
            found = sums.sums(FIRST, exchange)
            if sums.failures and not (self.drawn and "did not keep to its task" in sums.failures[0]):
                raise ValueError(sums.failures)
            return found
        return self._clear(exchange)

    def _clear(self, exchange: Exchange) -> Replies:
        self.store.exchanges.open(FIRST, dict.fromkeys(exchange, ""), 60.0)
        specs = {cid: self._spec(task) for cid, task in exchange.items()}
        answered = [cid for cid in exchange if cid not in self.silent["add"]]
        self.tell({"fit": exchange[answered[0]]})
        for cid in answered:
            data = self._asked(cid, FIRST, "fit")
            self.down[cid] += 4 * self.schema.size
            decode_reply(specs[cid], data, SAMPLES)
            sha256 = self.store.updates(cid).put(data)
            self.store.exchanges.put_replies(FIRST, [StoredReply(cid, sha256, len(data), SAMPLES, "delta", BASE, 0.0)])
        stored = self.store.exchanges.replies(FIRST)
        return StoredReplies(
            answered,
            lambda cid: decode_accepted(specs[cid], self.store.updates(cid).read(stored[cid].sha256), SAMPLES),
            {"update": dict.fromkeys(answered, SAMPLES)},
        )

    def _spec(self, task: Any) -> ReplySpec:  # noqa: ANN401 - a Fit
        return ReplySpec(
            task=task, schema=self.schema, samples=SAMPLES, codec="f32", base=BASE, base_vector=task.start,
            max_update_rms=MAX_UPDATE_RMS,
        )  # fmt: skip


def _nothing(*_: object) -> Any:  # noqa: ANN401 - never called
    raise TypeError


def play_cell(devices: int, size: int, secure: str) -> CellCost:
    """One round in two processes."""
    schema = Schema((TensorSpec(name="w", role="p", shape=(size,)),), ("w",))
    server = ServerOptions(secure=secure, secure_clip=1.0)
    strategy, fleet = FedAvg(server=server, local_steps=1, batch_size=8), dict.fromkeys(cids(devices), SAMPLES)
    start: Array = np.random.default_rng(0).standard_normal(size).astype(np.float32) / 10
    state = strategy.begin(start, schema, fleet, np.random.default_rng(1))
    here, there = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory() as name, closing(Store(Path(name) / "store")) as store:
        (Path(name) / "states").mkdir()
        dropped = set(cids(devices)[-devices * DROPPED_PERCENT // 100 :])
        arguments = (there, Path(name) / "states", schema, len(dropped))
        other = multiprocessing.get_context("spawn").Process(target=_devices_process, args=arguments, daemon=True)
        other.start()
        there.close()
        side = CoordinatorSide(
            store, _nothing, {"add": dropped}, pipe=here, schema=schema, drawn=devices - len(dropped) > MASKING
        )
        rng, began = np.random.default_rng(2), time.process_time()
        played = sealed_round if secure != "off" else FedAvg.round
        with peak_mb() as memory:
            after = drive(played(strategy, state, schema, fleet, rng), side.ask_round)
        seconds = time.process_time() - began
        here.send(None)
        device_s, device_mb, total = here.recv()
        other.join()
    kept = [cid for cid in fleet if cid not in dropped]
    off = 0.0 if total is None else np.abs(after.centers[0] - start - total / len(kept)).max()
    return CellCost(
        up=statistics.mean(side.up[cid] for cid in kept),
        down=statistics.mean(side.down[cid] for cid in kept),
        device_s=device_s,
        device_mb=device_mb,
        coordinator_s=seconds,
        coordinator_mb=memory[0],
        off=float(off),
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(vars(play_cell(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))) + "\n")
