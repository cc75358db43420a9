"""Bench: a round of FedAvg on masked sums, in the clear, and by Flower's SecAgg+: bytes, CPU seconds, memory.

    python -m tests.benches.secure_sums                              all cells of ours, masked and clear
    python -m tests.benches.secure_sums --flower --devices 50 200    masked cells of ours and of Flower, in turn

Each cell has a process of its own, of at most 8 minutes (--limit). 30 % of the devices drop out after they have dealt
their shares; in the clear they do not answer. Words have 32 bits. secure_cell.py and peers/flower_secagg.py say what is
measured; Flower is given our number of neighbours and our threshold. Estimates are those of masks alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

from coordinator.aggregation.sum_graph import sum_parameters
from edge_client.protocol.secure.parameters import SECURE_MODES
from tests.benches.peer import PeerMissing, environment, python_of
from tests.benches.secure_cell import DROPPED_PERCENT, CellCost

CLEAR, MASKED = SECURE_MODES[:2]
STREAM_GBS = 4.5  # of AES in counter mode on one core, in the estimates
MAX_OFF = 1e-4  # words of 32 bits round each parameter by a part of 5e-5, for a center of length 107
TITLES = (
    "devices", "parameters", "side", "up, KB", "down, KB", "device, s", "device, MB", "coordinator, s",
    "coordinator, MB", "estimate: device, s", "coordinator, s", "masks, GB",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What follows from the graph: the masks of one device and those that the coordinator takes off, at STREAM_GBS."""

    device_s: float
    coordinator_s: float
    coordinator_gb: float


def estimate(devices: int, size: int) -> Estimate:
    """Each device masks with itself and its k neighbours; the dropped ones' masks are taken off one by one."""
    k, kept = sum_parameters(devices).neighbours, 1 - DROPPED_PERCENT / 100
    streams, word_gb = devices * kept + devices * (1 - kept) * kept * k, 4 * size / 1e9
    return Estimate(
        device_s=(k + 1) * word_gb / STREAM_GBS,
        coordinator_s=streams * word_gb / STREAM_GBS,
        coordinator_gb=streams * word_gb,
    )


def command(devices: int, size: int, side: str) -> list[str]:
    """How a cell is played. Raises PeerMissing."""
    if side != "Flower":
        return [sys.executable, "-m", "tests.benches.secure_cell", str(devices), str(size), side]
    made = sum_parameters(devices)
    numbers = (devices, size, devices * DROPPED_PERCENT // 100, made.neighbours, made.threshold)
    return [str(python_of("flower")), "-m", "tests.benches.peers.flower_secagg", *map(str, numbers)]


def play(devices: int, size: int, side: str, limit_s: float) -> CellCost | str:
    """What a cell took, or why it cannot be told."""
    try:
        done = subprocess.run(
            command(devices, size, side), env=environment(), check=True, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return f"not run to its end within {limit_s:.0f} s"
    except subprocess.CalledProcessError as wrong:
        last = [line for line in wrong.stderr.splitlines() if line.strip()][-1:]
        return f"exit code {wrong.returncode}: {' '.join(last)}"
    except PeerMissing as missing:
        return str(missing)
    cost = CellCost(**json.loads(done.stdout.splitlines()[-1]))
    return cost if cost.off < MAX_OFF else f"the mean is {cost.off:.2g} off"


def row(devices: int, size: int, side: str, found: list[CellCost | str]) -> str:
    """A line of the table, of the medians."""
    known = [cost for cost in found if isinstance(cost, CellCost)]
    name = f"| {devices:,} | {size:,} | {side} |"
    if not known:
        return f"{name} {found[-1]} |\n"
    middle = {key: statistics.median(vars(cost)[key] for cost in known) for key in vars(known[0])}
    planned = estimate(devices, size) if side == MASKED else None
    last = "|||" if planned is None else (
        f" {planned.device_s:.3f} | {planned.coordinator_s:.1f} | {planned.coordinator_gb:.1f} |"
    )  # fmt: skip
    return (
        f"{name} {middle['up'] / 1e3:,.1f} | {middle['down'] / 1e3:,.1f} | {middle['device_s']:.3f} | "
        f"{middle['device_mb']:.0f} | {middle['coordinator_s']:.2f} | {middle['coordinator_mb']:.0f} |{last}\n"
    )


def main() -> None:
    """Print one row for each cell."""
    ask = argparse.ArgumentParser()
    ask.add_argument("--devices", type=int, nargs="+", default=[50, 200, 1_000])
    ask.add_argument("--parameters", type=int, nargs="+", default=[29_000, 1_150_000])
    ask.add_argument("--flower", action="store_true")
    ask.add_argument("--repeats", type=int, default=1)
    ask.add_argument("--limit", type=float, default=480.0)
    asked = ask.parse_args()
    sys.stdout.write(f"| {' | '.join(TITLES)} |\n")
    for devices, size in itertools.product(asked.devices, asked.parameters):
        found: dict[str, list[CellCost | str]] = {MASKED: [], "Flower" if asked.flower else CLEAR: []}
        for _, side in itertools.product(range(asked.repeats), found):
            found[side].append(play(devices, size, side, asked.limit))
        for side, costs in found.items():
            sys.stdout.write(row(devices, size, side, costs))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
