"""One base and many adapters: `make adapters`. Needs FEDCENTERS_DATA, and peft and transformers.

Two bases are trained from scratch on samples that no device has: a language model of characters on the smaller parts of
Shakespeare's plays, an image model on upright images of Fashion-MNIST. The devices are the largest parts, and devices
of four groups that hold their camera in four ways. Each way trains LoRA on the frozen base, or the whole base,
from the same start. Figures go into docs/one-base-many-adapters.md between its marks and into docs/adapters.svg; each
base and each run is kept in `--parts DIR` (build/adapters) and is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedcenters as fc
from emulator.experiments.table import paired_difference
from tests.figures.adapter_cases import CASES, DEVICES, AdaptedFleet, model_of, train_base
from tests.support.doc_pages import DOCS, machine, put
from tests.zoo.rows import without_torchvisions_own_operators

PAGE, PICTURE = DOCS / "one-base-many-adapters.md", DOCS / "adapters.svg"
SEEDS = (0, 1, 2)
LOCAL: Mapping[str, Any] = {"local_steps": 10, "batch_size": 16, "optimiser": "adam"}
LEAST_SPAN = 10  # per cent that a panel shows
RATES = {True: 1e-2, False: 1e-3}  # of adapters, of whole models


@dataclass(frozen=True, kw_only=True)
class Way:
    """A method, and whether it trains adapters on a frozen base or the whole model."""

    adapted: bool
    method: Callable[..., Any]
    grouped: bool = False


WAYS: Mapping[str, Way] = {
    "one adapter, FedAvg": Way(adapted=True, method=fc.FedAvg),
    "K adapters, WeCFL": Way(adapted=True, method=fc.WeCFL, grouped=True),
    "an adapter each, alone": Way(adapted=True, method=fc.NonFed),
    "one whole model, FedAvg": Way(adapted=False, method=fc.FedAvg),
}
FIRST = next(iter(WAYS))  # the others are compared with it


def play(case: AdaptedFleet, base: Mapping[str, Tensor], fleet: fc.Fleet, way: Way, seed: int) -> dict[str, Any]:
    """One run: accuracy by round, the adjusted Rand index, the size of what is trained, bytes per device and round."""
    began = time.process_time()
    settings: dict[str, Any] = {**LOCAL, "learning_rate": RATES[way.adapted]}
    if way.grouped:
        settings |= {"clusters": case.clusters, "representation": "*lora_B*" if way.adapted else "all"}
    model, method = partial(model_of, case, base, adapted=way.adapted), way.method(**settings)
    result = fc.simulate(method, fleet=fleet, model=model, rounds=case.rounds, seed=seed, progress=False)
    records = result.run.records
    return {
        "accuracy": [record["accuracy"]["micro"] for record in records],
        "ari": result.summary()["ari"],
        "trained": sum(p.numel() for p in model().parameters() if p.requires_grad),
        "up": records[-1]["bytes"]["up"] / DEVICES,
        "cpu_s": time.process_time() - began,
    }


def accuracy_of(case: AdaptedFleet, base: Mapping[str, Tensor], fleet: fc.Fleet, seed: int) -> float:
    """Of the base as it is, over all held-out samples."""
    tests = [device.test for device in fleet.cut(seed).devices.values()]
    x, y = (torch.from_numpy(np.concatenate([np.asarray(getattr(t, name)) for t in tests])) for name in ("x", "y"))
    with torch.no_grad():
        guesses = model_of(case, base, adapted=False).eval()(x).argmax(-1)
    return float((guesses == y).double().mean())


def play_all(folder: Path, data: Path, cases: Sequence[AdaptedFleet]) -> None:
    """Every base and run that left no file yet."""
    for case in cases:
        samples, fleet = case.read(data)
        path = folder / f"base-{CASES.index(case)}.pt"
        if not path.is_file():
            torch.save(train_base(case, samples).state_dict(), path)
        base = torch.load(path)
        for seed in SEEDS:
            found = read_part(folder, case, seed)
            found.setdefault("base", accuracy_of(case, base, fleet, seed))
            for name, way in WAYS.items():
                if name not in found:
                    found[name] = play(case, base, fleet, way, seed)
                    part_of(folder, case, seed).write_text(json.dumps(found), encoding="utf-8")
                    say(f"{case.title}, seed {seed}, {name}: {found[name]['accuracy'][-1]:.3f}")


def part_of(folder: Path, case: AdaptedFleet, seed: int) -> Path:
    return folder / f"case-{CASES.index(case)}-seed-{seed}.json"


def read_part(folder: Path, case: AdaptedFleet, seed: int) -> dict[str, Any]:
    """What a case and a seed have played so far."""
    path = part_of(folder, case, seed)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def tables(folder: Path) -> str:
    """Markdown: one table per case."""
    parts = {
        case.title: {seed: json.loads(part_of(folder, case, seed).read_text()) for seed in SEEDS} for case in CASES
    }
    seconds = sum(part[name]["cpu_s"] for seeds in parts.values() for part in seeds.values() for name in WAYS)
    said = f"Seeds {', '.join(map(str, SEEDS))}: mean and standard deviation; differences are paired, with Student's"
    out = [f"{said} 95 % interval. {seconds / 60:.0f} CPU minutes after the bases; {machine()}.", ""]
    for case in CASES:
        seeds = parts[case.title]
        untouched = 100 * float(np.mean([part["base"] for part in seeds.values()]))
        about = f"{DEVICES} devices, {case.rounds} rounds, K = {case.clusters}. The base as it is: {untouched:.1f} %."
        out += [f"**{case.title}**: {about}", ""]
        head = ["way", "trained parameters", "kB up per device and round", "accuracy %"]
        head += [f"better than {FIRST}, points", *([] if case.text else ["ARI"])]
        out += [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
        first = {seed: last(part[FIRST]) for seed, part in seeds.items()}
        for name in WAYS:
            ours = {seed: last(part[name]) for seed, part in seeds.items()}
            mean, deviation = np.mean(list(ours.values())), np.std(list(ours.values()), ddof=1)
            better, half, _ = paired_difference(ours, first)
            one = seeds[SEEDS[0]][name]
            cells = [name, f"{one['trained']:,}", f"{one['up'] / 1e3:.1f}", f"{mean:.1f} ± {deviation:.1f}"]
            cells += ["" if name == FIRST else f"{better:+.1f} ± {half or 0:.1f}"]
            if not case.text:
                scores = [part[name]["ari"] for part in seeds.values()]
                cells += [f"{np.mean(scores):.2f}" if WAYS[name].grouped else ""]
            out += [f"| {' | '.join(cells)} |"]
        out += [""]
    return "\n".join(out)


def last(run: Mapping[str, Any]) -> float:
    """Per cent: the mean of the last three rounds."""
    return 100 * float(np.mean(run["accuracy"][-3:]))


def drawn(folder: Path, path: Path) -> None:
    """Accuracy by the kilobytes that a device has sent: a panel per case, a line per way and seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from emulator.reports.plots import COLOURS, STYLE

    with mpl.rc_context({**STYLE, "font.size": 8, "axes.titlesize": 9}):
        figure, axes = plt.subplots(1, len(CASES), figsize=(8.6, 3.6))
        for ax, case in zip(axes, CASES, strict=True):
            for i, (name, way) in enumerate(WAYS.items()):
                for seed in SEEDS:
                    run = json.loads(part_of(folder, case, seed).read_text(encoding="utf-8"))[name]
                    looks: dict[str, Any] = {
                        "color": COLOURS[i],
                        "lw": 1.2,
                        "label": name if seed == SEEDS[0] else None,
                    }
                    accuracy = [100 * value for value in run["accuracy"]]
                    if way.method is fc.NonFed:  # it sends nothing that a run needs
                        ax.axhline(accuracy[-1], ls=":", **looks)
                        continue
                    ax.plot([run["up"] / 1e3 * n for n in range(1, len(accuracy) + 1)], accuracy, **looks)
            ax.set(xscale="log", xlabel="kB that a device has sent", title=case.title)
            middle, half = np.mean(ax.get_ylim()), np.ptp(ax.get_ylim()) / 2
            ax.set_ylim(middle - max(half, LEAST_SPAN / 2), middle + max(half, LEAST_SPAN / 2))
            ax.grid(axis="y", color="#e5e7eb", lw=0.6)
        axes[0].set_ylabel("accuracy, %")
        figure.tight_layout(rect=(0, 0.13, 1, 1))
        figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=len(WAYS))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201 - a script's progress


def main() -> None:
    """Play what is missing, and write the page's figures and its picture."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--parts", type=Path, default=Path("build/adapters"))
    words.add_argument("--case", type=int, choices=range(len(CASES)), help="play this one, and write nothing else")
    asked = words.parse_args()
    folder: Path = asked.parts
    folder.mkdir(parents=True, exist_ok=True)
    without_torchvisions_own_operators()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers
    play_all(folder, Path(os.environ["FEDCENTERS_DATA"]), CASES if asked.case is None else (CASES[asked.case],))
    if asked.case is not None:
        return
    put(PAGE, "adapters", tables(folder))
    drawn(folder, PICTURE)


if __name__ == "__main__":
    main()
