"""`python -m tests.figures.nearest_few --data DIR`: which answer does a device with few samples get?

The figures are in docs/results-nearest.md.

The fleets of tests/figures/nearest_strangers.py with ten devices, and an emulated run's guide. Devices that never
trained ask with 1, 3 or 10 samples of one, two, three or all of their classes, by each way; then the same devices with
their inputs spoilt or their classes renamed. A JSON object a line; `--table FILE` prints the two tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_client.data.dataset import Dataset
from edge_client.nearest.choose_center import choose_center
from edge_client.protocol.nearest.selection_rule import guessing_loss
from emulator.router_training import fit_router
from tests.figures.nearest_strangers import (
    BATCH,
    CASES,
    DEVELOPMENT,
    InProcessSource,
    Row,
    StrangersCase,
    finished,
    spoilt,
)

DEVICES = 10
SAMPLES, CLASSES, ALL = (1, 3, 10), (1, 2, 3), 0
KINDS = ("known", "noise", "reversed", "permuted", "labels")
WAYS = {True: ("auto", "loss", "votes", "round", "sketch", "entropy"), False: ("auto", "sketch", "entropy")}
WAYS_CELL = (1, 10)  # the classes and samples of the table of ways


def few_of(data: Dataset, classes: int, samples: int, rng: np.random.Generator) -> Dataset:
    """At most so many samples of so many of a device's classes."""
    some = rng.permutation(np.unique(data.y))[: classes or None]
    rows = rng.permutation(np.flatnonzero(np.isin(data.y, some)))[:samples]
    return Dataset(data.x[rows], data.y[rows])


def asked_with(kind: str, data: Dataset, classes: int, rng: np.random.Generator) -> Dataset:
    """These samples as this kind has them; "labels" renames the classes, since a single one has no other order."""
    if kind == "labels":
        return Dataset(data.x, rng.permutation(classes)[data.y])
    return spoilt(kind, data, rng)


def rows_of(name: str, case: StrangersCase, *, seed: int, data: Path | None) -> Iterator[Row]:
    """The rows of one fleet: for each question, how many devices got which answer."""
    with finished(case, DEVICES, seed=seed, data=data) as (ended, held_out):
        learner, centers = ended.learner, list(ended.centers)
        source = InProcessSource(
            vectors=centers,
            router=fit_router(ended, seed=seed),
            evaluator=learner,
            abstain=guessing_loss(learner.program),
            begin=ended.start,
        )
        own = [np.argmin([learner.evaluate([m], d.train, batch=BATCH)[0][0].mean() for m in centers]) for d in held_out]
        for labels, ways in WAYS.items():
            for classes, samples in ((c, n) for c in (*CLASSES, ALL) for n in SAMPLES if n >= c):
                for kind in KINDS if labels else KINDS[:-1]:
                    rng = np.random.default_rng([seed, classes, samples, KINDS.index(kind)])
                    few = [
                        asked_with(kind, few_of(d.train, classes, samples, rng), learner.program.classes, rng)
                        for d in held_out
                    ]
                    for way in ways:
                        told = [choose_center(source, d, labels=labels, by=way) for d in few]
                        yield {
                            "set": name,
                            "seed": seed,
                            "labels": labels,
                            "way": way,
                            "classes": classes,
                            "samples": samples,
                            "kind": kind,
                            "none": [a.fit == "none" for a in told],
                            "unknown": [a.fit is None for a in told],
                            "refused": [a.center is None for a in told],
                            "guesses": [a.distances.get("loss", {}).get(a.best, 0.0) > source.abstain for a in told],
                            "right": [a.best == k for a, k in zip(told, own, strict=True)],
                        }


def tables(rows: Sequence[Row]) -> str:
    """Markdown: `auto` by classes and samples, then each way with ten samples of one class."""
    found: dict[tuple[Any, ...], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        facts = (row["set"], row["labels"], row["way"], row["classes"], row["samples"])
        found[facts][row["kind"]].append(row)
    names = ["right center", "none", "worse than guessing", "not known", *(f"{kind}: refused" for kind in KINDS[1:])]

    def part(way: str | None) -> str:
        lead = ["fleet", "labels", *(["classes", "samples"] if way else ["way"])]
        lines = ["| " + " | ".join([*lead, *names]) + " |", "| --- " * len(lead) + "|" + " ---: |" * len(names)]
        for (data_set, labels, by, classes, samples), kinds in found.items():
            if by != way if way else (classes, samples) != WAYS_CELL:
                continue
            place = [str(classes or "all"), str(samples)] if way else [by]
            known = kinds["known"]
            told = [_percent(known, name) for name in ("right", "none", "guesses", "unknown")]
            told += [_percent(kinds[kind], "refused") for kind in KINDS[1:]]
            lines.append("| " + " | ".join([data_set, "yes" if labels else "no", *place, *told]) + " |")
        return "\n".join(lines)

    return part("auto") + "\n\n" + part(None)


def _percent(rows: Sequence[Row], name: str) -> str:
    return f"{100 * np.mean([value for row in rows for value in row[name]]):.0f}" if rows else ""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder of data sets; else FEDCENTERS_DATA")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--development", action="store_true", help="the sets that the rule was chosen on")
    parser.add_argument("--table", type=Path, help="a file of lines: print their tables and train nothing")
    asked = parser.parse_args()
    if asked.table is not None:
        lines = asked.table.read_text(encoding="utf-8").splitlines()
        sys.stdout.write(tables([json.loads(line) for line in lines]) + "\n")
        return
    torch.set_num_threads(1)
    cases = DEVELOPMENT if asked.development else {name: CASES[name] for name in ("digits", "WISDM")}
    for name, case in cases.items():
        for seed in range(asked.seeds):
            for row in rows_of(name, case, seed=seed, data=asked.data):
                sys.stdout.write(json.dumps(row, default=bool) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
