"""What a device takes: its files on disk, and a real client's resident memory while it trains the WeCFL CNN.

    python -m tests.boards.sizes

The process measured is `fedcenters-edge join` as it is, with its broker, files and TLS-free loopback link, on this
machine's architecture; batch 32, two local steps, ONNX Runtime. Writes .boards/figures.json and prints it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import start_broker
from edge_client.board import wheels
from edge_client.board.flash import LIGHT_ENGINES, PACKAGE
from emulator.testbed.testbed_files import write_toml
from tests.support.arm64_board import PATIENCE_S, STORE, note, started, until

MODEL, BATCH, SAMPLES, STEPS = "wecfl-cnn", 32, 128, 20
SHAPE = (1, 28, 28)


def main(folder: Path) -> None:
    """One round of one device; then what its process took at its largest."""
    run = folder / "run"
    run.mkdir()
    data = folder / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, *SHAPE)).astype(np.float32)
    for name in ("train.npz", "test.npz"):
        np.savez(data / name, x=x, y=np.arange(SAMPLES) % 10)
    with start_broker(folder / "broker", "mosquitto") as broker:
        about = {"federation": "sizes", "broker": broker.url}
        training = {"method": "fedavg", "num-rounds": 2, "local-steps": STEPS}
        serve = {"folder": str(run), "formats": [], "model": {"name": MODEL, "batch-size": BATCH, "engines": ["onnx"]}}
        write_toml(folder / "coordinator.toml", about | serve | {"deadline-s": PATIENCE_S, "runs": [training]})
        key = open_signing_key(run).public.hex()
        mine = {"device-id": "porch", "data": "data", "state": "state", "signing-keys": [key], "max-temperature": 0}
        write_toml(folder / "client.toml", about | mine)
        service = [sys.executable, "-m", "coordinator", "serve", str(folder / "coordinator.toml")]
        join = [sys.executable, "-m", "edge_client.cli", "join", "--config", str(folder / "client.toml")]
        with started(folder / "serve.log", service) as one, started(folder / "join.log", join) as two:
            until(run / "metrics.jsonl", "run-done", (one, two), folder)
            status = Path(f"/proc/{two.pid}/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    code = sum(len(e.data) for e in wheels.client_files(PACKAGE, LIGHT_ENGINES) if e.path.endswith(".py"))
    note(**{"client's peak resident, MB": round(int(peak.split()[1]) * 1024 / 1e6, 1), "client's code, bytes": code})


if __name__ == "__main__":
    STORE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
    sys.stdout.write((STORE / "figures.json").read_text())
