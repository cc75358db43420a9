"""Bench: a whole run of FedAvg, 50 devices x 3 rounds, from the command to its result, against a Flower simulation.

Both train 10 steps of 32 samples on the same devices' samples and evaluate every device after every round; ours with
two workers, Flower with two actors. What a person waits for counts: starting, training, writing the result, ending.
Each of our runs has a folder of its own: where the same run is there already, the command loads torch to compare them.
"""

from __future__ import annotations

import json
import statistics
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coordinator.models.registry import build_model
from edge_client.protocol.task import Array
from emulator.data.fleet_split import FleetData
from emulator.data.loaders.images import UPPER
from emulator.options import SimulateArgs
from emulator.run.load import make_fleet
from tests.benches.peer import ROOT, PeerMissing, environment, python_of
from tests.benches.processes import CommandFailed, CommandUsage, run_watched
from tests.benches.results import BenchFigure, missing_figures
from tests.benches.work import images

DEVICES, ROUNDS, STEPS, BATCH, LR, MOMENTUM = 50, 3, 10, 32, 0.01, 0.9
MOST_REPEATS = 5  # one of Flower's takes half a minute


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run: the registry's model, the zoo's function of the same model, and our name of the data set."""

    name: str
    model: str
    zoo: str
    data_set: str

    def simulated(self, data: Path) -> SimulateArgs:
        """The question that our command is asked."""
        return SimulateArgs(
            method="fedavg",
            data_set=self.data_set,
            model=self.model,
            partition="iid",
            devices=DEVICES,
            rounds=ROUNDS,
            data=data,
        )


# The loader of EMNIST letters takes any images in the format of MNIST: ours have Fashion-MNIST's shape and ten classes.
CASES = (
    Case(name="wecfl", model="wecfl-cnn", zoo="wecfl_cnn", data_set="emnist-letters"),
    Case(name="digits", model="digits-mlp", zoo="digits_mlp", data_set="digits"),
)


def run(repeats: int) -> tuple[list[BenchFigure], dict[str, str]]:
    """The rows of both cases."""
    figures: list[BenchFigure] = []
    versions: dict[str, str] = {}
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="fedcenters-") as folder:
            try:
                figures += measured(case, min(repeats, MOST_REPEATS), Path(folder))
                versions = flower_versions()
            except (PeerMissing, CommandFailed) as why:
                rows = ("wall", "memory", "left") if case.name == "wecfl" else ("wall", "memory")
                figures += missing_figures(tuple(f"run-{case.name}-{row}" for row in rows), str(why))
    return figures, versions


def flower_versions() -> dict[str, str]:
    """Of the environment, from its metadata."""
    found = (python_of("flower").parents[1]).glob("lib/python*/site-packages/*.dist-info")
    names = dict(path.name.removesuffix(".dist-info").split("-", 1) for path in found)
    return {name: names[name] for name in ("flwr", "ray") if name in names}


def measured(case: Case, repeats: int, folder: Path) -> list[BenchFigure]:
    """Both sides in turn."""
    python_of("flower")
    write_images(folder / "emnist")
    _, split = make_fleet(case.simulated(folder))
    write_devices(case, split, folder)
    contestants: dict[str, Callable[[], CommandUsage]] = {
        "ours": lambda: run_watched(
            ours(case, folder, Path(tempfile.mkdtemp(dir=folder))), environment(), cwd=folder, scratch=folder
        ),
        "flower": lambda: run_watched(flower(case, folder), environment(), cwd=ROOT, scratch=folder),
    }
    seen: dict[str, list[CommandUsage]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, contestant in contestants.items():
            seen[name].append(contestant())
    return figures_of(case.name, seen)


def ours(case: Case, folder: Path, out: Path) -> list[str]:
    """Our command, which reads the images from `folder`."""
    settings = {"local-steps": STEPS, "batch-size": BATCH, "learning-rate": LR, "momentum": MOMENTUM}
    asked = {"method": "fedavg", "data-set": case.data_set, "model": case.model, "partition": "iid"}
    asked |= {"devices": str(DEVICES), "rounds": str(ROUNDS), "workers": "2", "data": str(folder), "out": str(out)}
    options = [text for name, value in asked.items() for text in (f"--{name}", value)]
    options += [text for name, setting in settings.items() for text in ("-c", f"{name}={setting}")]
    return [str(Path(sys.executable).parent / "fedcenters-emulator"), "simulate", *options, "--json"]


def flower(case: Case, folder: Path) -> list[str]:
    """The same work for Flower."""
    return [str(python_of("flower")), "-m", "tests.benches.peers.flower_run", str(folder), case.zoo]


def figures_of(name: str, seen: Mapping[str, Sequence[CommandUsage]]) -> list[BenchFigure]:
    """Medians; the accuracies and CPU seconds are said beside them."""

    def middle(side: str, value: str) -> float:
        return float(statistics.median(getattr(ended, value) for ended in seen[side]))

    right = {side: json.loads(ended[-1].stdout.splitlines()[-1])["accuracy"] for side, ended in seen.items()}
    mine_right = right["ours"]["micro"]
    runs = f"{len(seen['ours'])} runs each"
    note = (
        f"{runs}; CPU seconds {middle('ours', 'cpu_s'):.0f} and {middle('flower', 'cpu_s'):.0f}; "
        f"processes {middle('ours', 'processes'):.0f} and {middle('flower', 'processes'):.0f}; "
        f"accuracy {mine_right:.2f} and {right['flower']:.2f}"
    )
    figures = []
    for row, value in (("wall", "wall_s"), ("memory", "peak_mb")):
        mine, theirs = middle("ours", value), middle("flower", value)
        said = note if row == "wall" else ""
        figures.append(BenchFigure(row=f"run-{name}-{row}", ours=mine, theirs=theirs, score=theirs / mine, note=said))
    if name == "wecfl":
        left = {side: max(ended.left for ended in runs) for side, runs in seen.items()}
        figures.append(
            BenchFigure(row=f"run-{name}-left", ours=left["ours"], theirs=left["flower"], score=float(left["ours"]))
        )
    return figures


def write_images(folder: Path) -> None:
    """128 training and 26 test images for each device, as the four files of EMNIST by class."""
    folder.mkdir()
    for part, each, seed in (("train", 128, 0), ("test", 26, 1)):
        data = images(DEVICES * each, classes=10, seed=seed)
        pixels = np.round((data.x[:, 0] + 1) * 127.5).astype(np.uint8)
        stem = f"emnist-byclass-{part}"
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(idx_bytes(pixels))
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(idx_bytes((data.y + UPPER).astype(np.uint8)))


def idx_bytes(values: Array) -> bytes:
    """uint8 values in the format of MNIST."""
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_devices(case: Case, split: FleetData, folder: Path) -> None:
    """What flower_run.py reads: the same samples, and the model that our run starts from."""
    for k, (_, local) in enumerate(sorted(split.devices.items())):
        if local.test is None:
            raise ValueError("every device of these fleets has test samples")
        parts = {"train/x": local.train.x, "train/y": local.train.y, "test/x": local.test.x, "test/y": local.test.y}
        np.savez(folder / f"{k}.npz", allow_pickle=False, **parts)
    state = build_model(case.model, seed=0).module.state_dict()
    np.savez(folder / "start.npz", allow_pickle=False, **{name: value.numpy() for name, value in state.items()})
    settings = {"devices": DEVICES, "rounds": ROUNDS, "steps": STEPS, "batch": BATCH, "lr": LR, "momentum": MOMENTUM}
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
