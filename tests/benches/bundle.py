"""`python -m tests.benches.bundle`: memory and seconds of publishing three centers, against devices and parameters.

The coordinator's own function, after the last round: the centers as files, the router fitted to every device's
measurement of every center (losses, moments of inputs and of answers), the signed bundle with one ONNX and one TFLite
file for each center, checked against torch, and their blobs. The training program is compiled before. Each cell is a
process of its own; `mb` is the peak of resident memory above what the process had, torch and the compiler's libraries
included, `cpu_s` seconds of CPU. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from coordinator.artifacts.finished_run import RunResult, make_strategy
from coordinator.artifacts.publish import publish_centers
from coordinator.artifacts.signed_program import prepare_program
from coordinator.config import read_config
from coordinator.identity.signing_key import open_signing_key
from coordinator.models.registry import ModelEntry
from coordinator.rounds.metrics import make_report
from coordinator.rounds.round_record import round_record
from coordinator.storage.store import Store
from coordinator.strategies.base import State
from edge_client.protocol.nearest.answer_moments import AnswerLook, answer_moments
from edge_client.protocol.nearest.input_moments import moments_of
from edge_client.protocol.task import Reply
from emulator.testbed.testbed_files import write_toml
from tests.benches.aggregation import SIZES
from tests.benches.machine import described, load, peak_memory, reset_peak_memory

CENTERS, CLASSES, SAMPLES = 3, 10, 24


def model(hidden: int) -> ModelEntry:
    """64-h-10."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))

    return ModelEntry(make=make, input=(1, 8, 8), classes=CLASSES)


def recurrent() -> ModelEntry:
    """Reads eight rows of eight by an LSTM, of which a file has every step."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.tell = nn.LSTM(8, 64, batch_first=True), nn.Linear(64, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.tell(self.read(x.squeeze(1))[0][:, -1])
            return logits

    return ModelEntry(make=Rows, input=(1, 8, 8), classes=CLASSES)


def small() -> ModelEntry:
    return model(SIZES["29k"])


def large() -> ModelEntry:
    return model(SIZES["1.15M"])


MODELS = {
    "29k": "tests.benches.bundle:small",
    "1.15M": "tests.benches.bundle:large",
    "lstm": "tests.benches.bundle:recurrent",
}


def main() -> None:
    """A row for each size and number of devices, or one cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[10, 1_000])
    parser.add_argument("--sizes", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cell:
        sys.stdout.write(json.dumps(cell(**json.loads(asked.cell))) + "\n")
        return
    sys.stderr.write(f"{described()}, load {load():.1f}\n")
    for size in asked.sizes:
        for devices in asked.devices:
            command = [
                sys.executable,
                "-m",
                "tests.benches.bundle",
                "--cell",
                json.dumps({"devices": devices, "size": size}),
            ]
            sys.stdout.write(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            sys.stdout.flush()


def cell(*, devices: int, size: str) -> dict[str, Any]:
    """Publish once, in this process."""
    with tempfile.TemporaryDirectory(prefix="bench-bundle-") as name:
        folder, path = Path(name) / "run", Path(name) / "coordinator.toml"
        folder.mkdir()
        runs = [{"method": "fesem", "clusters": CENTERS, "num-rounds": 1}]
        what = {"name": MODELS[size], "engines": ["onnx"]}
        write_toml(
            path,
            {"federation": "bench", "broker": "mqtt://127.0.0.1", "folder": str(folder), "model": what, "runs": runs},
        )
        config = read_config(path)
        with closing(Store(folder / "store")) as store:
            prepared = prepare_program(
                config, store, open_signing_key(config.signing_key_folder), config.compiled_engines
            )
            names = [f"device-{i:05d}" for i in range(devices)]
            store.states.enrol(dict.fromkeys(names, (SAMPLES, "onnx")))
            centers = prepared.initial + np.float32(0.01) * np.arange(CENTERS, dtype=np.float32)[:, None]
            state = State(centers=centers, assignment={who: i % CENTERS for i, who in enumerate(names)})
            report = make_report({}, state.assignment, n_centers=CENTERS)
            told: dict[str, Any] = {
                "method": "fesem",
                "round": 1,
                "of": 1,
                "bytes_down": 0,
                "bytes_up": 0,
                "seconds": 0.0,
            }
            record = round_record(report, run=config.runs[0].name, **told)
            store.states.put(store.states.run_id(config.runs[0].name, lambda: "1"), 1, state, [record])
            store.facts.put("lesson", json.dumps(config.fingerprint()))
            strategy = make_strategy(config.runs[0], config)
            measured = {who: measurement(i) for i, who in enumerate(names)}
            outcome = RunResult(run=config.runs[0], strategy=strategy, state=state, measurements=measured)
            idle, cpu_s = reset_peak_memory(), time.process_time()
            catalog, _, _ = publish_centers([outcome], config, store, prepared, unix_ms=0)
            took = round(time.process_time() - cpu_s, 2)
        facts: dict[str, Any] = {"devices": devices, "parameters": size, "router": catalog.router is not None}
        files = sum(file.stat().st_size for file in (folder / "bundle").rglob("*") if file.is_file()) / 1e6
        return facts | {"mb": round((peak_memory() - idle) / 1e6, 1), "cpu_s": took, "bundle_mb": round(files, 1)}


def measurement(number: int) -> Reply:
    """What device `number` tells of the centers: its own, number modulo CENTERS, has the least loss."""
    rng = np.random.default_rng(number)
    losses = np.where(np.arange(CENTERS) == number % CENTERS, 0.3, 2.0) + 0.1 * rng.random(CENTERS)
    looks = []
    for _ in range(CENTERS):
        train, test = (answer_moments(rng.standard_normal((n, CLASSES))) for n in (SAMPLES, SAMPLES // 4))
        looks.append(AnswerLook(entropy=1.0, train=train, test=test).to_vector())
    inputs = moments_of(rng.standard_normal((SAMPLES, 1, 8, 8)).astype(np.float32))
    told = None if inputs is None else inputs.to_vector()
    return Reply(n=SAMPLES, losses=losses, answers=np.stack(looks), inputs=told)


if __name__ == "__main__":
    main()
