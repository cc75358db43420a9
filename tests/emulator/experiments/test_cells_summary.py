"""The summary names every cell of a table once: with its seeds, or as not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_client.errors import UsageError
from emulator.experiments.cells_summary import render_summary, summarise_cells
from emulator.experiments.command import ExperimentArgs, run_experiment, say_nothing, summarise_experiment
from emulator.experiments.plan import TableCell, read_plan
from tests.emulator.experiments.test_compare import PLAN, RESULTS, results


def test_counts_and_seeds_are_those_of_the_finished_cells() -> None:
    def some(cell: TableCell):  # type: ignore[no-untyped-def]  # noqa: ANN202
        return results(cell) if cell.row.name != "FedAvg" else []

    found = summarise_cells(PLAN, PLAN.cells, some)
    assert (found["run"], found["of"], found["with_all_seeds"]) == (3, 4, 2)
    assert [one["seeds"] for one in found["cells"]] == [[], [0], [0, 1, 2], [0, 1, 2]]
    told = render_summary(found)
    assert told.startswith("T: 3 of 4 cells run, 2 with 3 seeds; 7 rounds.")
    assert (
        "| A | WeCFL, K = 5 (1); WeCFL, K = 10 (3); WeCFL, server momentum, K = 10 (3) | FedAvg |" in told.splitlines()
    )


def test_the_command_writes_its_section_and_runs_nothing(tmp_path: Path) -> None:
    page = tmp_path / "cells.md"
    found = summarise_experiment(ExperimentArgs(name="wecfl-table2", out=RESULTS, write=page))
    assert json.loads(json.dumps(found)) == found
    assert found["of"] == len(read_plan("wecfl-table2").cells)
    assert found["table"] in page.read_text()
    summarise_experiment(ExperimentArgs(name="wecfl-table2", out=RESULTS, only=["FedAvg"], write=page))
    assert found["table"] not in page.read_text()
    empty = summarise_experiment(ExperimentArgs(name="wecfl-table2", out=tmp_path))
    assert (empty["run"], empty["of"]) == (0, found["of"])
    assert list(tmp_path.iterdir()) == [page]


def test_a_summary_does_not_replace_the_table_that_a_file_has(tmp_path: Path) -> None:
    prepared = ExperimentArgs(name="ifca-starts", out=RESULTS, kept=True, write=tmp_path / "R.md")
    table = run_experiment(prepared, say_nothing)["table"]
    with pytest.raises(UsageError, match="has figures that were not run here"):
        summarise_experiment(prepared)
    assert table in (tmp_path / "R.md").read_text()
