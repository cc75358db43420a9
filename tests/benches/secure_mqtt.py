"""Bench: one round of FedAvg over mosquitto by real processes, in the clear and with `secure`, for cohorts and models.

    python -m tests.benches.secure_mqtt 50 200

The round trains one step on digits, which costs next to nothing. Bytes are of one device, by the coordinator's count of
its topics, and contain the round's test. Seconds are those of the round. All devices are threads of one process: its
memory has their models, the engine and the clients. Memory is proportional (processes.py); that of the coordinator has
torch, which compiles the training program first.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from coordinator.models.registry import ModelEntry
from emulator.testbed.testbed import COORDINATOR_MODULE, DEVICES_MODULE
from tests.benches.peer import environment
from tests.benches.processes import CommandFailed, run_watched

ROOT = Path(__file__).parents[2]
MODELS = {"mlp_29k": (386,), "mlp_1_15m": (1_024, 1_034)}


def _mlp(hidden: tuple[int, ...]) -> nn.Module:
    widths = (64, *hidden)
    layers = [part for pair in zip(widths, hidden, strict=False) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], 10))


def _entry(hidden: tuple[int, ...]) -> ModelEntry:
    return ModelEntry(make=partial(_mlp, hidden), input=(1, 8, 8), classes=10)


mlp_29k = _entry(MODELS["mlp_29k"])
mlp_1_15m = _entry(MODELS["mlp_1_15m"])


@dataclass(frozen=True, kw_only=True)
class MaskedRoundCost:
    """What one round took: bytes of one device up and down, seconds, peak MB of the coordinator and of all devices."""

    up: float
    down: float
    seconds: float
    coordinator_mb: float
    devices_mb: float


def play(devices: int, model: str, secure: str, folder: Path) -> MaskedRoundCost:
    """Run the command and read what it left. Raises CommandFailed."""
    settings = {"local-steps": "1", "batch-size": "8", "secure": secure}
    options = {
        "--method": "fedavg", "--data-set": "digits", "--partition": "iid", "--model": f"{__spec__.name}:{model}",
        "--devices": str(devices), "--rounds": "1", "--broker": "mosquitto", "--name": "bench",
    }  # fmt: skip
    words = [word for option in options.items() for word in option]
    words += [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
    used = run_watched(
        [sys.executable, "-m", "emulator", "simulate", *words, "--json"], environment(), cwd=folder, scratch=folder
    )
    lines = (folder / "runs" / "bench" / "metrics.jsonl").read_text().splitlines()
    record = next(found for found in map(json.loads, lines) if found["event"] == "round")
    if "failed" in record.get("secure", {}):
        raise CommandFailed(record["secure"]["failed"])
    return MaskedRoundCost(
        up=record["bytes"]["up"] / devices,
        down=record["bytes"]["down"] / devices,
        seconds=record["seconds"],
        coordinator_mb=max(mb for line, mb in used.peaks_mb.items() if COORDINATOR_MODULE in line),
        devices_mb=max(mb for line, mb in used.peaks_mb.items() if DEVICES_MODULE in line),
    )


def main() -> None:
    """Print one row for each cohort, model and mode."""
    sys.stdout.write("| devices | model | secure | up, kB | down, kB | round, s | coordinator, MB | devices, MB |\n")
    for devices in [int(arg) for arg in sys.argv[1:]] or [50, 200]:
        for model in MODELS:
            for secure in ("off", "updates"):
                with tempfile.TemporaryDirectory() as folder:
                    cost = play(devices, model, secure, Path(folder))
                sys.stdout.write(
                    f"| {devices} | {model} | {secure} | {cost.up / 1e3:,.1f} | {cost.down / 1e3:,.1f} "
                    f"| {cost.seconds:.1f} | {cost.coordinator_mb:.0f} | {cost.devices_mb:.0f} |\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()
