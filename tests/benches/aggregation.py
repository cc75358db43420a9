"""`python -m tests.benches.aggregation`: memory and seconds of a coordinator's round, from replies on disk to centers.

Each device's reply is read, validated and shown to the method, as when it arrives; then the exchange closes and the
method makes its centers, Gram matrix and clusters included. `before` is the round as it was: each reply validated again
and copied into one matrix in memory, points in memory, the mean by products with columns of the matrix. Each cell runs
in a process of its own, the two sides in turns. Memory is the peak of resident memory above what the process had before
the round; seconds are of CPU. All devices share SHARED different updates (hard links), so reads come from the page
cache. `ulps` is the greatest difference of a value of the centers, in units of float32's last place, of 5,000 that are
looked at. `map` is the dashboard's map of the devices' models after the round, and `state` the bytes of the round's
state with three centers, beside a fleet of so many; they have no `before`. `before` is left out where its matrix does
not fit into the free memory. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from coordinator.aggregation import centers as centers_module
from coordinator.aggregation.robust import normalized_shares
from coordinator.aggregation.rows import Rows
from coordinator.clustering import column_store
from coordinator.dashboard.embedding_map import make_embedding_map
from coordinator.rounds.update_validation import ReplySpec, decode_accepted, decode_reply, delta_base
from coordinator.storage.state_codec import encode_state
from coordinator.strategies.base import Exchange, Fleet, Replies, State, StoredReplies, drive, notify_reply
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.registry import make_method
from edge_client.protocol import codecs
from edge_client.protocol.task import Array, ClientId, Reply, Schema, TensorSpec
from edge_client.transport.blobs import BlobFolder
from tests.benches.machine import described, load, peak_memory, reset_peak_memory

SHARED = 16
SIZES = {  # parameters -> hidden units of 64 inputs and 10 classes; the last layer is the smaller one
    "29k": 387,
    "1.15M": 15_333,
    "6.6M": 88_000,
}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fesem": {"clusters": 3},
    "fesem-all": {"clusters": 3, "representation": "all"},
    "median": {"reduce": "median"},
    "krum": {"reduce": "krum", "trim-updates": 0.1},
    "map": {"clusters": 3},
    "state": {"clusters": 3},
}
KINDS = {"fesem-all": "fesem", "median": "fedavg", "krum": "fedavg", "map": "fesem", "state": "fesem"}
AFTER = ("map", "state")  # what follows a round


def main() -> None:
    """Measure what was asked for, or one cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[1_000])
    parser.add_argument("--sizes", nargs="*", default=["29k", "1.15M"], choices=SIZES)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--codec", default="f32", choices=("f32", "f16", "i8"))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", choices=("before", "now"))
    parser.add_argument("--folder", type=Path, help="where the replies are kept; else a temporary folder")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cell:
        sys.stdout.write(json.dumps(_cell(**json.loads(asked.cell))) + "\n")
        return
    sys.stderr.write(f"{described()}, load {load():.1f}\n")
    for size in asked.sizes:
        for devices in asked.devices:
            with tempfile.TemporaryDirectory(prefix="bench-aggregation-", dir=asked.folder) as folder:
                _write_replies(Path(folder), SIZES[size], devices, asked.codec)
                for method in asked.methods:
                    _measure(folder, size, devices, method, asked)


def _measure(folder: str, size: str, devices: int, method: str, asked: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, Any]]] = {"before": [], "now": []}
    needed = devices * _schema(SIZES[size]).size * 4 * (2 if method == "fesem-all" else 1)
    for _ in range(asked.repeats):
        for side, runs in found.items():
            if asked.only not in (None, side) or (
                side == "before" and (method in AFTER or needed > psutil.virtual_memory().available - 2e9)
            ):
                continue
            cell = {"folder": folder, "hidden": SIZES[size], "devices": devices, "method": method, "side": side}
            cell["codec"] = asked.codec
            command = [sys.executable, "-m", "tests.benches.aggregation", "--cell", json.dumps(cell)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            runs.append(json.loads(out))
    row = {"devices": devices, "parameters": size, "method": method, "codec": asked.codec}
    for side, runs in found.items():
        if runs:
            best = min(runs, key=lambda run: float(run["cpu_s"]))
            row[side] = {key: best[key] for key in ("mb", "cpu_s", "closing_cpu_s")}
    if found["before"] and found["now"]:
        then, now = (np.array(found[side][0]["sample"], np.float32) for side in ("before", "now"))
        row["ulps"] = float((np.abs(now - then) / np.spacing(np.abs(then))).max())
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def _schema(hidden: int) -> Schema:
    shapes = {"1.weight": (hidden, 64), "1.bias": (hidden,), "3.weight": (10, hidden), "3.bias": (10,)}
    tensors = tuple(TensorSpec(name=name, role="p", shape=shape) for name, shape in shapes.items())
    return Schema(tensors=tensors, classifier=("3.weight", "3.bias"))


def _names(devices: int) -> list[ClientId]:
    return [f"device-{i:05d}" for i in range(devices)]


def _write_replies(folder: Path, hidden: int, devices: int, codec: str) -> None:
    schema, written = _schema(hidden), list[Path]()
    for i, cid in enumerate(_names(devices)):
        (folder / cid).mkdir()
        if i < SHARED:
            delta = np.random.default_rng(i).standard_normal(schema.size, np.float32) * np.float32(0.01)
            data = codecs.encode_vector(
                delta + np.float32(0.02 * (i % 3)), schema, codec=codec, kind="delta", base="0" * 64
            )
            blobs = BlobFolder(folder / cid)
            written.append(blobs.path(blobs.put(data)))
        else:
            os.link(written[i % SHARED], folder / cid / written[i % SHARED].name)


def _cell(*, folder: str, hidden: int, devices: int, method: str, side: str, codec: str) -> dict[str, Any]:
    """One round in this process."""
    schema, fleet = _schema(hidden), {cid: 20 + i % 7 for i, cid in enumerate(_names(devices))}
    strategy = make_method(KINDS.get(method, method), **METHODS[method])
    rng = np.random.default_rng(0)
    model = rng.standard_normal(schema.size, np.float32)
    state = strategy.begin(model, schema, fleet, rng)
    blobs = {cid: next(file.name for file in (Path(folder) / cid).iterdir() if file.is_file()) for cid in fleet}
    if method in AFTER:
        return _after(method, state, fleet, partial(_model_of, folder, blobs, schema, model))
    idle = reset_peak_memory()
    cpu_s, closing_s = time.process_time(), 0.0

    def answered(exchange: Exchange) -> Replies:
        nonlocal closing_s

        def read(cid: ClientId, decode: Any = decode_accepted) -> Reply:  # noqa: ANN401 - one of two functions
            _, vector = delta_base(exchange[cid])
            spec = ReplySpec(
                task=exchange[cid], schema=schema, samples=fleet[cid], codec=codec, base="0" * 64, base_vector=vector,
                max_update_rms=10.0,
            )  # fmt: skip
            reply: Reply = decode(spec, BlobFolder(Path(folder) / cid).read(blobs[cid]), fleet[cid])
            return reply

        for cid in exchange:  # they arrive
            notify_reply(exchange, cid, read(cid, decode_reply))
        closing_s = time.process_time()
        again = partial(read, decode=decode_reply) if side == "before" else read
        return StoredReplies(exchange, again, {"update": fleet})

    with _as_it_was() if side == "before" else nullcontext():
        after = drive(strategy.round(state, schema, fleet, rng), answered)
    now_s = time.process_time()
    sample = after.centers[:, :: max(1, schema.size // 5_000)].ravel().tolist()
    return {
        "mb": round((peak_memory() - idle) / 1e6, 1),
        "cpu_s": round(now_s - cpu_s, 2),
        "closing_cpu_s": round(now_s - closing_s, 2),
        "sample": sample,
    }


def _model_of(folder: str, blobs: Mapping[ClientId, str], schema: Schema, start: Array, cid: ClientId) -> Array:
    """What a device sent, as the dashboard reads it."""
    data = BlobFolder(Path(folder) / cid).read(blobs[cid])
    found: Array = start + codecs.decode_vector(data, schema, kind="delta")
    return found


def _after(what: str, state: State, fleet: Fleet, model: Callable[[ClientId], Array]) -> dict[str, Any]:
    """The map of the devices, or the bytes of the state."""
    assignment = {cid: i % 3 for i, cid in enumerate(fleet)}
    shift = np.float32(0.02) * np.arange(3, dtype=np.float32)[:, None]
    state = replace(state, centers=state.centers + shift, assignment=assignment)
    idle, cpu_s = reset_peak_memory(), time.process_time()
    if what == "map":
        found = make_embedding_map(((c, model(c)) for c in fleet), state.centers, assignment, count=len(fleet))
        sample = found.device_positions[:2].ravel().tolist()
    else:
        sample = [len(encode_state(state))]
    took = round(time.process_time() - cpu_s, 2)
    return {"mb": round((peak_memory() - idle) / 1e6, 1), "cpu_s": took, "closing_cpu_s": took, "sample": sample}


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Updates in one matrix, points in memory, means by products with columns of the matrix."""

    matrices: list[Array] = []

    def from_replies(replies: Replies, size: int) -> ClientUpdates:
        clients, rows = sorted(replies), np.empty((len(replies), size), np.float32)
        n = np.empty(len(clients))
        for i, cid in enumerate(clients):
            reply = replies[cid]
            if reply.update is not None:
                rows[i], n[i] = reply.update, reply.n
        matrices.append(rows)
        return ClientUpdates(tuple(clients), Rows.of(rows), n)

    def means(rows: Rows, by: centers_module.Weights) -> Iterator[tuple[slice, Array]]:
        every = rows.count == len(matrices[-1])
        matrix = (lambda block: matrices[-1][:, block]) if every else rows.by_columns()
        for (start, stop), weight in by:
            shares = normalized_shares(weight)
            for left in range(start, stop, centers_module.COLUMN_BLOCK):
                block = slice(left, min(left + centers_module.COLUMN_BLOCK, stop))
                yield block, shares @ matrix(block).astype(np.float64)

    kept = ClientUpdates.from_replies, centers_module._means, column_store.MEMORY_BYTES
    ClientUpdates.from_replies = staticmethod(from_replies)  # type: ignore[method-assign]
    centers_module._means, column_store.MEMORY_BYTES = means, 2**62
    yield
    ClientUpdates.from_replies = staticmethod(kept[0])  # type: ignore[method-assign]
    centers_module._means, column_store.MEMORY_BYTES = kept[1], kept[2]


if __name__ == "__main__":
    main()
