"""How well honest devices are served while others attack, with every reduce: `make hostile`.

Each cell is a whole run in the emulator: digits on 30 devices, 6 rounds of 10 local steps; accuracy of the honest
devices on their own held-out samples after the last round, the mean of three seeds. Admission works as on a
coordinator. Writes the tables into docs/hostile-devices.md, between its marks, and docs/hostile.svg.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.strategies.registry import make_method
from emulator.options import SimulateArgs
from emulator.run.execute import run_simulation
from emulator.run.load import make_fleet, open_devices
from emulator.run.settings import RunSettings
from emulator.simulation import attacks as hostile
from emulator.simulation.attacks import ATTACKS, AttackSpec
from emulator.simulation.emulated_devices import EmulatedDevices
from tests.support.doc_pages import DOCS, machine, put
from tests.support.methods import reduced_by

PAGE, PICTURE = DOCS / "hostile-devices.md", DOCS / "hostile.svg"
SEEDS, SHARES = (0, 1, 2), (0.0, 0.1, 0.2, 0.3)
DEVICES, ROUNDS = 30, 6
TRIM = 0.4  # of a center's devices: with 30 % of the fleet, one center may have more
REDUCES = ("mean", "norm-clip", "trimmed-mean", "median", "multi-krum", "geometric-median")
LOCAL = {"local-steps": 10}
METHODS: Mapping[str, tuple[int, Mapping[str, Any]]] = {  # title -> true groups, settings
    "fedavg": (1, {}),
    "wecfl": (3, {"clusters": 3}),
    "tkm": (3, {"clusters": 3, "trim-clusters": 0.3}),
}
Row = tuple[str, str, str]  # method, reduce, attack
Cells = dict[Row, dict[float, list[float]]]  # share -> one accuracy per seed


def rows() -> Iterator[Row]:
    """NaN is refused whatever the reduce, so it is played with one."""
    for method in METHODS:
        for reduce in REDUCES:
            if method != "tkm" or reduce == "median":
                attacks = ATTACKS if reduce == REDUCES[0] else ATTACKS[:-1]
                yield from ((method, reduce, attack) for attack in attacks)


def played() -> Cells:
    """Every run; those without an attack once for all attacks."""
    cells: Cells = {row: {share: [] for share in SHARES} for row in rows()}
    for seed in SEEDS:
        for groups in sorted({groups for groups, _ in METHODS.values()}):
            args, split = make_fleet(SimulateArgs(devices=DEVICES, groups=groups, seed=seed))
            facts: dict[str, Any] = {"seed": seed, "batch": 16}
            with open_devices(args.model, split, **facts, engine="lean") as (devices, start):
                calm: dict[tuple[str, str], float] = {}
                for (method, reduce, attack), found in cells.items():
                    if METHODS[method][0] != groups:
                        continue
                    strategy = make_method(method, **{**LOCAL, **METHODS[method][1], **reduced_by(reduce, TRIM)})
                    for share in SHARES:
                        if not share and (method, reduce) in calm:
                            found[share].append(calm[method, reduce])
                            continue
                        enemy = AttackSpec(attack=attack, share=share)
                        liars = enemy.attackers(split.devices, seed)
                        fleet = EmulatedDevices(learner=devices.learner, local=enemy.poison_data(split.devices, liars))
                        settings = RunSettings(rounds=ROUNDS, **facts, attack=enemy.make_attack(liars, seed))
                        result = run_simulation(strategy, start, fleet, settings)
                        accuracy = hostile.honest_accuracy(result.records[-1], liars)
                        found[share].append(float("nan") if accuracy is None else accuracy)
                        if not share:
                            calm[method, reduce] = found[share][-1]
        print(f"seed {seed} is done", file=sys.stderr)  # noqa: T201 - a script's progress
    return cells


def tables(cells: Cells, seconds: float) -> str:
    """Markdown: one table per method."""
    seeds, spread = ", ".join(map(str, SEEDS)), 100 * max(_spread(cells))
    said = f"mean of seeds {seeds}; the largest standard deviation of a cell is {spread:.0f}"
    out = [f"Percent of the honest devices' held-out samples, {said}. {seconds / 60:.0f} CPU minutes; {machine()}.", ""]
    out += [f"A cell has the accuracy with {', '.join(f'{share:.0%}' for share in SHARES[1:])} of hostile devices.", ""]
    for method in METHODS:
        reduces = list(dict.fromkeys(r for m, r, _ in cells if m == method))
        calm = [next(found[0.0] for (m, r, _), found in cells.items() if (m, r) == (method, one)) for one in reduces]
        rows = [("none", [_cell(values) for values in calm])]
        for attack in ATTACKS:
            mine = [cells.get((method, reduce, attack)) for reduce in reduces]
            shown = [", ".join(_cell(found[share]) for share in SHARES[1:]) if found else "" for found in mine]
            rows += [(f"`{attack}`", shown)] if any(shown) else []
        out += [f"**{method}**", "", f"| attack | {' | '.join(f'`{reduce}`' for reduce in reduces)} |"]
        out += ["|---|" + "---|" * len(reduces), *(f"| {name} | {' | '.join(shown)} |" for name, shown in rows), ""]
    return "\n".join(out)


def _cell(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.0f}"


def _spread(cells: Cells) -> list[float]:
    return [float(np.std(values, ddof=1)) for found in cells.values() for values in found.values()]


def drawn(cells: Cells, path: Path) -> None:
    """One panel per attack and method: accuracy by share, one line per reduce. The same figures, the same bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from emulator.reports.plots import COLOURS, STYLE

    attacks, markers = ATTACKS[:-1], "osD^vP"
    with mpl.rc_context({**STYLE, "font.size": 8, "axes.titlesize": 9}):
        figure, axes = plt.subplots(len(METHODS), len(attacks), figsize=(9.6, 6.2), sharex=True, sharey=True)
        for line, method in zip(axes, METHODS, strict=True):
            for ax, attack in zip(line, attacks, strict=True):
                for i, reduce in enumerate(REDUCES):
                    found = cells.get((method, reduce, attack))
                    if found is not None:
                        means = [float(np.mean(found[share])) for share in SHARES]
                        look: dict[str, Any] = {"color": COLOURS[i], "marker": markers[i], "ms": 3.5, "lw": 1.3}
                        ax.plot(SHARES, means, label=reduce, **look)
                ax.set(xticks=SHARES, xticklabels=[f"{share:.0%}" for share in SHARES], ylim=(0, 1.02))
                ax.set_title(f"{method}, {attack}")
                ax.grid(axis="y", color="#e5e7eb", lw=0.6)
        for ax in axes[:, 0]:
            ax.set_ylabel("accuracy, honest devices")
        for ax in axes[-1]:
            ax.set_xlabel("hostile devices")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.tight_layout(rect=(0, 0.05, 1, 1))
        figure.legend(handles, labels, loc="lower center", ncols=len(REDUCES))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    """Play, draw, write. `--keep FILE` also leaves the numbers as JSON."""
    began = time.process_time()
    cells = played()
    seconds = time.process_time() - began
    if "--keep" in sys.argv:
        kept = {" ".join(row): found for row, found in cells.items()}
        Path(sys.argv[sys.argv.index("--keep") + 1]).write_text(json.dumps(kept), encoding="utf-8")
    put(PAGE, "hostile", tables(cells, seconds))
    drawn(cells, PICTURE)


if __name__ == "__main__":
    main()
