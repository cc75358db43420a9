"""`python -m tests.figures.frequent_labels --data DIR`: what the labels alone say in WeCFL's Tables 2 and 5.

A device that names its most frequent training label for every test image: the accuracy over all test samples, for each
column of the tables. A model above it has learned something from the images. Prints a table.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np

from emulator.data.partition_schemes import parse_scheme
from emulator.data.registry import load_data_set
from emulator.experiments.plan import TableColumn, read_plan

EXPERIMENTS = ("wecfl-table2", "wecfl-table5")


def accuracy_of_labels(column: TableColumn, data: Path, seed: int) -> float:
    """The share [%] of all test samples that have the most frequent training label of their device."""
    samples = load_data_set(column.data_set, data, seed=seed)
    split = parse_scheme(column.partition).split(samples, devices=column.devices, seed=seed)
    right = total = 0
    for local in split.devices.values():
        if local.test is not None:
            right += int((local.test.y == np.bincount(local.train.y).argmax()).sum())
            total += len(local.test)
    return 100 * right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("FEDCENTERS_DATA"))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.data is None:
        parser.error("--data DIR, or FEDCENTERS_DATA, names the folder of data sets")
    sys.stdout.write(f"Seed {asked.seed}.\n\n| table | data | accuracy % |\n|---|---|--:|\n")
    for name in EXPERIMENTS:
        for column in {cell.column.name: cell.column for cell in read_plan(name).cells}.values():
            sys.stdout.write(f"| {name} | {column.name} | {accuracy_of_labels(column, asked.data, asked.seed):.2f} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
