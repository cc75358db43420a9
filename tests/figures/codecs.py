"""What a codec costs in accuracy and saves in bytes on a real run: `make codecs`. Needs FEDCENTERS_DATA.

Fashion-MNIST on 60 devices in ten groups, WeCFL with ten centers, 15 rounds; everything but the codec is the same.
Writes the table into docs/codecs.md, between its marks. Top-k is no codec of the protocol: it is tried here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.rounds.metrics import last_rounds
from coordinator.strategies.registry import make_method
from edge_client.protocol.task import Flat, Schema
from emulator.experiments.table import mean_and_deviation, paired_difference
from emulator.options import SimulateArgs
from emulator.reports.display_names import signed
from emulator.run.execute import SimulationResult, run_simulation
from emulator.run.load import make_fleet, open_devices
from emulator.run.settings import RunSettings
from emulator.simulation.codec_channel import Codec, CodecChannel, protocol_codec
from emulator.simulation.emulated_devices import EmulatedDevices
from tests.support.doc_pages import DOCS, machine, put

PAGE = DOCS / "codecs.md"
SEEDS, DEVICES, ROUNDS, BATCH = (0, 1, 2), 60, 15, 32
SETTINGS: Mapping[str, Any] = {"clusters": 10, "local-steps": 20, "learning-rate": 0.02, "batch-size": BATCH}


def top(share: float) -> Codec:
    """Only the `share` of all values that are largest, as float32 with a 32-bit index each."""

    def code(delta: Flat, _schema: Schema) -> tuple[Flat, int]:
        count = max(1, round(share * delta.size))
        kept = np.argpartition(np.abs(delta), -count)[-count:]
        out = np.zeros_like(delta)
        out[kept] = delta[kept]
        return out, 8 * count

    return code


WAYS: Mapping[str, tuple[Codec | None, bool]] = {  # name -> code and feedback
    "f32": (None, False),
    "f16": (protocol_codec("f16"), False),
    "i8, feedback": (protocol_codec("i8"), True),
    "i8, none": (protocol_codec("i8"), False),
    "top 10 %, feedback": (top(0.1), True),
    "top 10 %, none": (top(0.1), False),
    "top 1 %, feedback": (top(0.01), True),
}


Played = tuple[SimulationResult, float | None]  # a run, and its adjusted Rand index


def played(data: Path) -> dict[str, list[Played]]:
    """Every way of every seed."""
    found: dict[str, list[Played]] = {way: [] for way in WAYS}
    for seed in SEEDS:
        asked = SimulateArgs(data_set="fashion-mnist", model="mnist-mlp", devices=DEVICES, seed=seed, data=data)
        args, split = make_fleet(asked)
        facts: dict[str, Any] = {"seed": seed, "batch": BATCH}
        with open_devices(args.model, split, **facts, engine="lean") as (devices, start):
            for way, (code, feedback) in WAYS.items():
                fleet = EmulatedDevices(learner=devices.learner, local=devices.local)
                channel = partial(CodecChannel, code=code, feedback=feedback)
                method = make_method("wecfl", **SETTINGS)
                result = run_simulation(method, start, fleet, RunSettings(rounds=ROUNDS, channel=channel, **facts))
                found[way].append((result, result.scores(split.groups)["ari"]))
        print(f"seed {seed} is done", file=sys.stderr)  # noqa: T201 - a script's progress
    return found


def table(found: Mapping[str, list[Played]], seconds: float) -> str:
    """Markdown: accuracy over the last three rounds, how well the groups were found, bytes up."""
    seeds = ", ".join(map(str, SEEDS))
    said = (
        f"Accuracy weighs by samples and is the mean of the last three rounds, over n = {len(SEEDS)} seeds ({seeds}); "
        "± is the standard deviation between seeds (n - 1). Against f32: paired by seed, with Student's 95 % interval"
    )
    rows = ["| codec | accuracy, % | against f32, points | ARI | MB up a round | ratio |", "|---|---|---|---|---|---|"]
    plain = _accuracies(found["f32"])
    whole = _bytes(found["f32"])
    for way, results in found.items():
        mine, size = _accuracies(results), _bytes(results)
        mean, deviation = mean_and_deviation(list(mine.values()))
        better, half, _ = paired_difference(mine, plain)
        apart = "" if way == "f32" else f"{signed(better)} ± {half:.2f}"
        rows.append(
            f"| {way} | {mean:.2f} ± {deviation:.2f} | {apart} "
            f"| {np.mean([ari for _, ari in results if ari is not None]):.2f} | {size / 1e6:.2f} | {whole / size:.1f} |"
        )
    return "\n".join([f"{said}. {seconds / 60:.0f} CPU minutes; {machine()}.", "", *rows])


def _accuracies(results: list[Played]) -> dict[int, float]:
    """Seed -> per cent."""
    means = [float(np.mean(last_rounds(result.records, "accuracy", "micro"))) for result, _ in results]
    return {seed: 100 * mean for seed, mean in zip(SEEDS, means, strict=True)}


def _bytes(results: list[Played]) -> float:
    return float(np.mean([record["bytes"]["up"] for result, _ in results for record in result.records]))


def main() -> None:
    """Play and write."""
    data = os.environ.get("FEDCENTERS_DATA")
    if data is None:
        raise SystemExit("set FEDCENTERS_DATA to the folder of data sets")
    began = time.process_time()
    found = played(Path(data))
    put(PAGE, "codecs", table(found, time.process_time() - began))


if __name__ == "__main__":
    main()
