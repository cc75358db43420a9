"""`python -m tests.benches.million`: what a round of a simulated fleet costs from a thousand devices to a million.

    devices      1,000 of 10^3 to 10^6 devices are sampled in each round and take one SGD step; 1,000 others evaluate
    parameters   the same in a fleet of 10^5, for models of 10^3 to 10^5 parameters
    resume       four rounds at once; two, and the others from their checkpoint by another process: are the bits equal?
    pfl          the setting of pfl's own benchmark: 50 of 1,000 devices with 50 images of CIFAR-10 each take 5 steps of
                 10 images with its CNN of two convolutions; it has 1,500 such rounds, here some are played

A device's samples are drawn from its number when it is used: `synthetic` has a pattern for each digit and three groups
that write the digits differently, `writers` are those of MNIST in turn, with images of 8 x 8 pixels, `fashion` has a
mix of Fashion-MNIST's labels for each device, in three groups that name them differently, in 8 x 8 pixels too. The
model is an MLP 64-h-10. Each cell is a process of its own, one after the other. Seconds are of a round after the first
one, of the wall and of CPU; `mb` is the peak of resident memory above what the process had before the run, which
includes the data set that samples are drawn from and eight bytes for each device.
A row replaces the one of the same cell in the file --json, million.json beside this module; --picture draws that file
and measures nothing. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from coordinator.models.registry import Model
from coordinator.rounds.round import EvaluationPlan
from coordinator.storage.state_codec import encode_state
from coordinator.strategies.registry import make_method
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import I64, Array
from emulator.data.drawn_mixes import label_mixes
from emulator.data.registry import load_data_set
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.run.execute import run_simulation
from emulator.run.settings import RunSettings
from emulator.simulation.checkpoint import Checkpoints
from emulator.simulation.drawn_devices import DrawnDevices
from emulator.simulation.emulated_devices import EmulatedDevices
from export.compiler.program import vector_of
from tests.benches.fit import exponent
from tests.benches.machine import described, load, peak_memory, reset_peak_memory
from tests.benches.picture import draw_million

KEPT = Path(__file__).with_suffix(".json")  # the figures of BENCHMARKS.md
DEVICES = (1_000, 10_000, 100_000, 1_000_000)
HIDDEN = (13, 128, 1_333)  # 75 h + 10 parameters
USUAL, MANY = 128, 100_000
METHODS: dict[str, dict[str, Any]] = {"fedavg": {}, "fesem": {"clusters": 3}}
SAMPLED, ROUNDS, BATCH = 1_000, 4, 16
TRAIN, TEST, GROUPS, CLASSES, SIDE = 16, 8, 3, 10, 8
PFL = {"local-steps": 5, "batch-size": 10, "learning-rate": 0.1, "momentum": 0.0}
PFL_DEVICES, PFL_SAMPLED, PFL_IMAGES, PFL_ROUNDS = 1_000, 50, 50, 5
Fleet = tuple[I64, Callable[[int], DeviceData]]  # samples [n], and what draws those of a device


def main() -> None:
    """Measure what was asked for, or one cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["devices", "parameters", "resume", "pfl"])
    parser.add_argument("--data", default="synthetic", choices=SOURCES)
    parser.add_argument("--devices", type=int, nargs="*", default=list(DEVICES))
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--json", type=Path, default=KEPT, help="the file of figures")
    parser.add_argument("--picture", type=Path, help="draw the figures of that file, and measure nothing")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cell:
        sys.stdout.write(json.dumps(played(**json.loads(asked.cell))) + "\n")
        return
    found: list[dict[str, Any]] = json.loads(asked.json.read_text(encoding="utf-8")) if asked.json.is_file() else []
    if asked.picture:
        draw_million(found, asked.picture)
        return
    sys.stderr.write(f"{described()}, load {load():.1f}\n")
    for what in asked.what:
        for method in asked.methods if what != "pfl" else ("fedavg",):
            new = BENCHES[what](what=what, method=method, data=asked.data, sizes=asked.devices)
            found = [old for old in found if not any(_is_same(old, row) for row in new)] + new
            asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _is_same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return all(old[key] == new[key] for key in ("what", "method", "data", "n", "parameters"))


def devices(*, sizes: list[int], **how: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - of `played`
    """A row for each size of the fleet."""
    rows = [cell(n=n, **how) for n in sizes]
    if len(rows) > 1:
        told = {key: round(exponent([(row["n"], row[key]) for row in rows]), 2) for key in ("wall_s", "cpu_s", "mb")}
        sys.stdout.write(json.dumps({"method": how["method"], "exponents": told}) + "\n")
    return rows


def parameters(*, sizes: list[int], **how: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """A row for each model."""
    return [cell(n=MANY, hidden=hidden, **how) for hidden in HIDDEN]


def resume(*, sizes: list[int], **how: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """A row for the largest fleet."""
    with tempfile.TemporaryDirectory(prefix="bench-million-") as folder:
        cell(n=max(sizes), stop=2, folder=f"{folder}/parts", **how)
        rest = cell(n=max(sizes), folder=f"{folder}/parts", **how)
        whole = cell(n=max(sizes), folder=f"{folder}/whole", **how)
    return [{**rest, "same": rest["digest"] == whole["digest"]}]


def pfl(*, sizes: list[int], **how: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """The row of pfl's setting."""
    how["data"] = "cifar10"
    row = cell(n=PFL_DEVICES, sampled=PFL_SAMPLED, rounds=PFL_ROUNDS, **how)
    return [{**row, "updates_per_cpu_s": round(PFL_SAMPLED / row["cpu_s"], 1)}]


BENCHES = {"devices": devices, "parameters": parameters, "resume": resume, "pfl": pfl}


def cell(**how: Any) -> dict[str, Any]:  # noqa: ANN401 - of `played`
    """One run in a process of its own."""
    command = [sys.executable, "-m", "tests.benches.million", "--cell", json.dumps(how)]
    row: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    return row


class RoundsPlayed(Exception):
    """So many rounds as were asked for."""


def played(  # noqa: PLR0913 - a cell has these settings
    *,
    what: str,
    method: str,
    data: str,
    n: int,
    hidden: int = USUAL,
    sampled: int = SAMPLED,
    rounds: int = ROUNDS,
    stop: int = 0,
    folder: str = "",
) -> dict[str, Any]:
    """A run in this process; it ends after round `stop`, and keeps checkpoints in `folder` and goes on from them."""
    model = cnn_of_pfl() if what == "pfl" else mlp(hidden)
    learner = cpu_recipe(model).open()
    start = vector_of(model.module, learner.program.schema)
    fleet, usual = SOURCES[data](n), {"local-steps": 1, "batch-size": BATCH}
    before, rows = reset_peak_memory(), list[tuple[float, float]]()

    def ended(record: Mapping[str, Any]) -> None:
        rows.append((time.perf_counter(), time.process_time()))
        if stop and record["round"] > stop:
            raise RoundsPlayed

    share, sha = min(1.0, sampled / n), hashlib.sha256()
    options = {**(PFL if what == "pfl" else usual), "fraction-train": share, **METHODS[method]}
    found = None
    with suppress(RoundsPlayed):
        found = run_simulation(
            make_method(method, **options),
            start,
            EmulatedDevices(learner=learner, local=DrawnDevices(*fleet)),
            RunSettings(rounds=rounds, seed=0, batch=BATCH, evaluation=EvaluationPlan(fraction=share, last=share)),
            progress=ended,
            checkpoints=Checkpoints(folder=Path(folder), every=1, resume=True, fingerprint={}) if folder else None,
        )
    if found is not None:
        sha.update(encode_state(found.state) + json.dumps(list(found.records)).encode())
    (wall, cpu), (first_wall, first_cpu), later = rows[-1], rows[0], max(1, len(rows) - 1)
    return {
        "what": what,
        "method": method,
        "data": data,
        "n": n,
        "parameters": learner.program.schema.size,
        "wall_s": round((wall - first_wall) / later, 3),
        "cpu_s": round((cpu - first_cpu) / later, 3),
        "mb": round((peak_memory() - before) / 1e6, 1),
        "digest": sha.hexdigest()[:16],
        "accuracy": found and round(found.records[-1]["accuracy"]["macro"] or 0.0, 3),
        "load": round(load(), 1),
    }


def mlp(hidden: int) -> Model:
    """64-h-10; the same first weights in each process."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))
    rng = np.random.default_rng(0)
    for tensor in net.parameters():
        drawn = 0.05 * rng.standard_normal(tuple(tensor.shape), np.float32)
        tensor.data[:] = tensor.new_tensor(drawn)
    return Model(name=f"mlp-{hidden}", module=net, input=(1, SIDE, SIDE), classes=CLASSES)


def cnn_of_pfl() -> Model:
    """Two convolutions of 3 x 3 and a hidden layer, with dropout: 1.6 million parameters."""
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, CLASSES),
    )
    return Model(name="pfl-cnn", module=net, input=(3, 32, 32), classes=CLASSES)


def synthetic(n: int) -> Fleet:
    """A device's group, its number modulo GROUPS, writes the digits in its own way."""
    patterns = np.random.default_rng(1).standard_normal((CLASSES, 1, SIDE, SIDE)).astype(np.float32)

    def draw(number: int) -> DeviceData:
        rng = np.random.default_rng([2, number])
        digits = rng.integers(CLASSES, size=TRAIN + TEST)
        x = patterns[digits] + rng.standard_normal((TRAIN + TEST, 1, SIDE, SIDE), np.float32)
        y = (digits + 3 * (number % GROUPS)) % CLASSES
        return DeviceData(train=Dataset(x[:TRAIN], y[:TRAIN]), test=Dataset(x[TRAIN:], y[TRAIN:]))

    return np.full(n, TRAIN), draw


def writers(n: int) -> Fleet:
    """Device i has the images of writer i modulo the number of writers; every fifth is for tests."""
    whole = load_data_set("mnist-writers").train
    if whole.user is None:
        raise ValueError("these images have no writers")
    x, user = pooled(whole.x), whole.user
    images = [np.flatnonzero(user == who) for who in np.unique(user)]
    sizes = np.array([len(rows) - len(rows[::5]) for rows in images])

    def draw(number: int) -> DeviceData:
        rows = images[number % len(images)]
        mine, held = np.delete(rows, np.s_[::5]), rows[::5]
        return DeviceData(train=Dataset(x[mine], whole.y[mine]), test=Dataset(x[held], whole.y[held]))

    return sizes[np.arange(n) % len(images)], draw


def fashion(n: int) -> Fleet:
    """Each device has its own mix of labels, with the names of its group (drawn_mixes.py)."""
    whole = load_data_set("fashion-mnist").train
    return label_mixes(pooled(whole.x), whole.y, devices=n, train=TRAIN, test=TEST, groups=GROUPS)


def pooled(images: Array) -> Array:
    """[m, 1, 28, 28] of 0..255 -> [m, 1, 8, 8] of 0..1: means of 4 x 4 pixels of the images with a margin."""
    wide = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)))
    means: Array = wide.reshape(len(wide), 1, SIDE, 4, SIDE, 4).mean(axis=(3, 5), dtype=np.float32)
    return means / np.float32(255)


def cifar10(n: int) -> Fleet:
    """Device i has PFL_IMAGES of the images in random order; all test on the same ten others."""
    data = load_data_set("cifar10")
    order = np.random.default_rng(0).permutation(len(data.train))
    x, y, test = data.train.x, data.train.y, data.test or data.train

    def draw(number: int) -> DeviceData:
        rows = order[PFL_IMAGES * number : PFL_IMAGES * (number + 1)]
        held = Dataset(data.ready(test.x[:CLASSES]), test.y[:CLASSES])
        return DeviceData(train=Dataset(data.ready(x[rows]), y[rows]), test=held)

    return np.full(n, PFL_IMAGES), draw


SOURCES: dict[str, Callable[[int], Fleet]] = {
    "synthetic": synthetic,
    "writers": writers,
    "fashion": fashion,
    "cifar10": cifar10,
}

if __name__ == "__main__":
    main()
