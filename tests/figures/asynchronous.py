"""Time and bytes to an accuracy without rounds, beside rounds and over-selection: `make asynchronous`.

Virtual time; a tenth of the devices is a hundred times slower than the usual one, and in one fleet each device is away
for 30 % of the time. Every way trains the same devices from the same model with the same settings of the method, and
as many of them at once; the clock stops when the mean accuracy over all held-out samples reaches the target, which is
looked at after as many updates as a round wants and costs no time. Three seeds; the interval is that of Student's t of
the logarithms (95 %). Each case and seed leaves a file in `--parts DIR` (build/asynchronous), and is not played again;
`--case N` and `--seed N` play one of them. When all are played they are written into docs/emulate-a-fleet.md, between
its marks, and drawn into docs/asynchronous.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.rounds.asynchronous.options import Asynchronous
from coordinator.rounds.round import EvaluationPlan
from coordinator.strategies.registry import make_method
from edge_client.protocol.task import Flat
from emulator.options import SimulateArgs
from emulator.run.execute import open_run, run_rounds
from emulator.run.load import make_fleet, open_devices
from emulator.run.own_metrics import measure_own
from emulator.run.settings import RunSettings
from emulator.simulation.device_profiles import DeviceProfile
from emulator.simulation.emulated_devices import EmulatedDevices
from tests.support.doc_pages import DOCS, machine, put

PAGE, PICTURE = DOCS / "emulate-a-fleet.md", DOCS / "asynchronous.svg"
SEEDS = (0, 1, 2)
T_95 = 4.303  # Student's t of three values
LINK = {"evaluate_s": 0.03, "down_bytes_s": 5e6, "up_bytes_s": 1.5e6, "latency_s": 0.08, "cycle_s": 600.0}
KINDS = tuple(
    DeviceProfile(name=name, step_s=step_s, share=share, **LINK)
    for name, step_s, share in (("fast", 0.05, 3), ("usual", 0.1, 4), ("slow", 0.2, 2), ("straggler", 10.0, 1))
)
FLEETS = {
    "10 % stragglers": KINDS,
    "10 % stragglers, 30 % away": tuple(replace(kind, availability=0.7) for kind in KINDS),
}
STALENESS = 100  # versions; a usual device sees about ten
MOST_UPDATES = 4_000  # of a run that does not reach its target


@dataclass(frozen=True, kw_only=True)
class RacedFleet:
    """A fleet and a method, and the accuracy that ends a run; the targets of digits were chosen with seed 9."""

    data_set: str
    model: str
    partition: str
    devices: int
    at_once: int
    method: str
    target: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    fleets: tuple[str, ...] = tuple(FLEETS)

    @property
    def title(self) -> str:
        return f"{self.data_set}, {self.method}, {self.devices} devices, {self.at_once} at once, to {self.target:.0%}"


LOCAL = {"local-steps": 10, "learning-rate": 0.05, "batch-size": 16}
CASES = (
    RacedFleet(
        data_set="digits", model="digits-mlp", partition="dirichlet:alpha=0.5,least=2", devices=100, at_once=50,
        method="fedavg", target=0.9, settings=LOCAL,
    ),
    RacedFleet(
        data_set="digits", model="digits-mlp", partition="label-permutations:groups=3", devices=30, at_once=15,
        method="fesem", target=0.9, settings=LOCAL, fleets=tuple(FLEETS)[1:],
    ),
    RacedFleet(
        data_set="fashion-mnist", model="mnist-mlp", partition="dirichlet:alpha=0.3", devices=100, at_once=50,
        method="fedavg", target=0.75, settings=LOCAL, fleets=tuple(FLEETS)[1:],
    ),
)  # fmt: skip
WAYS: Mapping[str, Mapping[str, Any]] = {
    "rounds": {},
    "over-selection 1.3": {"over_select": 1.3},
    "over-selection 2": {"over_select": 2.0},
    "no rounds, buffer a tenth": {"buffer": 0.1},
    "no rounds, buffer a half": {"buffer": 0.5},
}
AGAINST = "no rounds, buffer a half"  # the better buffer of the two, chosen after these runs
Point = tuple[float, int, int, int, float]  # seconds, bytes down, bytes up, updates that counted, accuracy
Runs = dict[tuple[str, str, str], list[list[Point]]]  # case, fleet, way -> a curve for each seed


def settings_of(case: RacedFleet, fleet: str, way: Mapping[str, Any], seed: int) -> tuple[RunSettings, int]:
    """-> the settings of a run, and after how many of its rounds as many updates have come as one round wants."""
    how, share = dict(way), 1.0
    if "buffer" in how:
        share = how.pop("buffer")
        buffer = round(share * case.at_once)
        how["asynchronous"] = Asynchronous(concurrency=case.at_once, buffer=buffer, max_staleness=STALENESS)
    every = round(1 / share)
    rounds = every * MOST_UPDATES // case.at_once
    quiet = EvaluationPlan(every=rounds + 1, fraction=1e-9)
    facts: dict[str, Any] = {"rounds": rounds, "seed": seed, "batch": int(case.settings["batch-size"])}
    return RunSettings(**facts, profiles=FLEETS[fleet], evaluation=quiet, **how), every


def curve(
    case: RacedFleet, fleet: str, way: Mapping[str, Any], seed: int, devices: EmulatedDevices, start: Flat
) -> list[Point]:
    """One run until its target: a point for as many updates as a round wants."""
    settings, every = settings_of(case, fleet, way, seed)
    share = {} if settings.asynchronous else {"fraction-train": case.at_once / case.devices}
    live = open_run(make_method(case.method, **case.settings, **share), start, devices, settings)
    points: list[Point] = []
    down = up = counted = 0
    for number in run_rounds(live, settings):
        record = live.records[-1]
        down, up = down + record["bytes"]["down"], up + record["bytes"]["up"]
        counted += record["asynchronous"]["counted"] if "asynchronous" in record else live.network.answered
        if number % every == 0:
            right = {"right": lambda y, outputs: float((outputs.argmax(axis=-1) == y).mean())}
            accuracy = measure_own(right, live.strategy, live.state, devices, 256)["right"]["micro"] or 0.0
            points.append((live.network.now_s, down, up, counted, accuracy))
            if accuracy >= case.target:
                break
    return points


def play(case: RacedFleet, seed: int) -> dict[str, Any]:
    """Every run of a case with one seed: curves by fleet and way, and the CPU seconds that they took."""
    began, place = time.process_time(), os.environ.get("FEDCENTERS_DATA")
    what: dict[str, Any] = {"data_set": case.data_set, "partition": case.partition, "devices": case.devices}
    args = SimulateArgs(**what, model=case.model, seed=seed, data=Path(place) if place else None)
    args, split = make_fleet(args)
    batch, curves = int(case.settings["batch-size"]), dict[str, dict[str, list[Point]]]()
    for fleet in case.fleets:
        for name, way in WAYS.items():
            with open_devices(case.model, split, seed=seed, batch=batch, engine="lean") as (devices, start):
                points = curve(case, fleet, way, seed, devices, start)
            curves.setdefault(fleet, {})[name] = points
            seconds, down, up, counted, accuracy = points[-1]
            told = f"{case.title}, {fleet}, {name}, seed {seed}: {accuracy:.3f} after {seconds:,.0f} s"
            print(told, f"{counted} updates, {(down + up) / 1e6:.0f} MB", file=sys.stderr)  # noqa: T201 - a script's progress
    return {"curves": curves, "cpu_s": time.process_time() - began}


def read_parts(folder: Path) -> tuple[Runs, float]:
    """The curves of each fleet that every seed has played, and their CPU seconds."""
    found, cpu_s = Runs(), 0.0
    for number, case in enumerate(CASES):
        paths = [folder / f"case-{number}-seed-{seed}.json" for seed in SEEDS]
        for part in map(
            json.loads, (path.read_text(encoding="utf-8") for path in paths if all(p.is_file() for p in paths))
        ):
            cpu_s += part["cpu_s"]
            for fleet, ways in part["curves"].items():
                for way, points in ways.items():
                    found.setdefault((case.title, fleet, way), []).append([tuple(point) for point in points])
    return found, cpu_s


def interval(values: list[float]) -> str:
    """The geometric mean and its interval, or how many runs did not reach their target."""
    if missing := [value for value in values if not math.isfinite(value)]:
        return f"{len(missing)} of {len(values)} not reached"
    logs = np.log(values)
    half = T_95 * logs.std(ddof=1) / math.sqrt(len(logs))
    low, mean, high = (shown(float(np.exp(logs.mean() + part))) for part in (-half, 0.0, half))
    return mean if half == 0 else f"{mean} ({low} to {high})"


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def at_target(points: list[Point], target: float) -> Point:
    last = points[-1]
    return last if last[4] >= target else (math.inf, 0, 0, 0, last[4])


def tables(found: Runs, seconds: float) -> str:
    """Markdown: one table per case."""
    said = f"Seeds {', '.join(map(str, SEEDS))}: geometric mean and 95 % interval."
    out = [f"{said} Ratios are to `{AGAINST}` with the same seed. {seconds / 60:.0f} CPU minutes; {machine()}.", ""]
    for case in (case for case in CASES if case.title in {row[0] for row in found}):
        out += [f"**{case.title}**", "", "| fleet | way | virtual seconds | times the seconds |"]
        out[-1] += " MB up and down | times the bytes | updates that counted |"
        out += ["|---|---|---|---|---|---|---|"]
        for fleet in case.fleets:
            ours = [at_target(points, case.target) for points in found[case.title, fleet, AGAINST]]
            for way in WAYS:
                ends = [at_target(points, case.target) for points in found[case.title, fleet, way]]
                cells = [
                    interval([e[0] for e in ends]),
                    interval([e[0] / o[0] for e, o in zip(ends, ours, strict=True)]),
                ]
                sizes = [(e[1] + e[2]) / 1e6 if math.isfinite(e[0]) else math.inf for e in ends]
                bytes_ours = [(o[1] + o[2]) / 1e6 for o in ours]
                cells += [interval(sizes), interval([a / b for a, b in zip(sizes, bytes_ours, strict=True)])]
                counted = [float(e[3]) if math.isfinite(e[0]) else math.inf for e in ends]
                out += [f"| {fleet} | {way} | {' | '.join([*cells, interval(counted)])} |"]
        out += [""]
    return "\n".join(out)


def drawn(found: Runs, path: Path) -> None:
    """A panel for each case and fleet: accuracy by virtual seconds. The same figures, the same bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from emulator.reports.plots import COLOURS, STYLE

    with mpl.rc_context({**STYLE, "font.size": 8, "axes.titlesize": 8}):
        panels = [(c, fleet) for c in CASES for fleet in c.fleets if (c.title, fleet, next(iter(WAYS))) in found]
        figure, axes = plt.subplots(1, len(panels), figsize=(2.6 * len(panels), 3.2), sharey=True, squeeze=False)
        for ax, (case, fleet) in zip(axes[0], panels, strict=True):
            for i, way in enumerate(WAYS):
                for j, points in enumerate(found[case.title, fleet, way]):
                    looks: dict[str, Any] = {"color": COLOURS[i], "lw": 1.1, "label": way if j == 0 else None}
                    ax.plot([p[0] for p in points], [p[4] for p in points], **looks)
            ax.axhline(case.target, color="#9ca3af", lw=0.6, ls=":")
            ax.set(xscale="log", ylim=(0, 1))
            ax.set_title(f"{case.data_set}, {case.method}\n{fleet}")
            ax.grid(axis="y", color="#e5e7eb", lw=0.6)
            ax.set_xlabel("virtual seconds")
        axes[0, 0].set_ylabel("accuracy")
        figure.tight_layout(rect=(0, 0.08, 1, 1))
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=len(WAYS))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    """Play what is missing, and write when nothing is."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--parts", type=Path, default=Path("build/asynchronous"))
    words.add_argument("--case", type=int, choices=range(len(CASES)))
    words.add_argument("--seed", type=int, choices=SEEDS)
    asked = words.parse_args()
    asked.parts.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS if asked.seed is None else (asked.seed,):
        for number in range(len(CASES)) if asked.case is None else (asked.case,):
            path = asked.parts / f"case-{number}-seed-{seed}.json"
            if not path.is_file():
                path.write_text(json.dumps(play(CASES[number], seed)), encoding="utf-8")
    found, cpu_s = read_parts(asked.parts)
    if missing := sorted({case.title for case in CASES} - {title for title, *_ in found}):
        sys.stderr.write(f"nothing is written until every seed is played of: {'; '.join(missing)}\n")
        return
    put(PAGE, "asynchronous", tables(found, cpu_s))
    drawn(found, PICTURE)


if __name__ == "__main__":
    main()
