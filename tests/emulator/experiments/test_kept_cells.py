"""Commands that run nothing take the finished cells with the number of rounds that they have."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.strategies.registry import make_method, method_settings
from edge_client.errors import UsageError
from emulator.cli import app
from emulator.experiments.cells import CellRun, CellStorage
from emulator.experiments.command import (
    ExperimentArgs,
    compare_experiment,
    dry_run_experiment,
    run_experiment,
    say_nothing,
    summarise_experiment,
)
from emulator.experiments.kept_cells import finished_rounds
from emulator.experiments.plan import EXPERIMENTS_FOLDER, read_plan

RESULTS = Path(__file__).parents[3] / "docs" / "results"
TEN = ExperimentArgs(name="fedsoft-table1", out=RESULTS, kept=True)  # its file says 60 rounds


def write_cells(out: Path, rounds: int, count: int, *, seed: int = 0) -> None:
    """Finished cells of fedsoft-table1, without figures, as files."""
    place = CellStorage(data=None, out=out / TEN.name)
    place.out.mkdir(parents=True, exist_ok=True)
    for cell in read_plan(TEN.name, rounds=rounds).cells[:count]:
        settings = method_settings(make_method(cell.row.method, **cell.settings))
        told = {"seed": seed, "settings": settings, "values": {}, "curves": {}, "note": "", "seconds": 30.0}
        told |= {"row": cell.row.name, "column": cell.column.name, "rounds": rounds}
        CellRun(cell=cell, seed=seed).path(place).write_text(json.dumps(told))


@pytest.mark.parametrize(("name", "run", "rounds"), [("fedsoft-table1", 16, 10), ("fesem-table2", 14, 30)])
def test_a_summary_counts_the_finished_cells_with_their_own_rounds(name: str, run: int, rounds: int) -> None:
    found = summarise_experiment(ExperimentArgs(name=name, out=RESULTS))
    assert (found["run"], found["rounds"]) == (run, rounds)


def test_the_kept_table_and_its_command_have_the_rounds_of_the_finished_cells() -> None:
    found = run_experiment(TEN, lambda _: None)
    assert "--rounds 10 " in found["table"]
    assert "| 10:90 | 2 | FedSoft |" in found["table"]


def test_the_kept_table_has_all_finished_seeds_and_with_seeds_those_that_are_asked_for() -> None:
    """It left out, in silence, those above the number in the experiment's file, which is 3 here."""
    every, some = (run_experiment(each, lambda _: None)["table"] for each in (TEN, replace(TEN, seeds=2)))
    assert "--seeds 5`" in every
    assert "--seeds 2`" in some
    for table, seeds in ((every, "5"), (some, "2")):
        assert {line.split(" | ")[-1].strip(" |") for line in table.splitlines() if line.startswith("| 10:90")} == {
            seeds
        }


def test_the_kept_rows_that_are_asked_for_do_not_cost_other_rows_of_the_file_their_seeds(tmp_path: Path) -> None:
    """The file was left as it was, since its other rows had more seeds."""
    for seed, count in ((0, 8), (3, 4)):
        write_cells(tmp_path, 10, count, seed=seed)
    page, last = tmp_path / "RESULTS.md", read_plan(TEN.name, rounds=10).cells[7]
    asked = replace(TEN, out=tmp_path, write=page)
    run_experiment(asked, say_nothing)
    held = page.read_text()
    few = run_experiment(replace(asked, only=[last.row.name, last.column.name]), say_nothing)
    assert "--seeds 3 --only" in few["table"]
    assert "--seeds 4`" in held
    assert page.read_text() == held


def test_the_command_that_repeats_a_table_has_the_rows_that_were_asked_for() -> None:
    asked = ("FedSoft,FedEM", "10:90")
    table = run_experiment(replace(TEN, only=asked), lambda _: None)["table"]
    (command,) = re.findall(r"`(fedcenters-emulator experiment [^`]+)`", table)
    words = shlex.split(command)
    assert [words[i + 1] for i, word in enumerate(words) if word == "--only"] == list(asked)


def test_a_table_has_the_rows_that_were_asked_for_and_a_file_keeps_the_others(tmp_path: Path) -> None:
    page = tmp_path / "mine.md"
    table = run_experiment(replace(TEN, only=["FedEM", "10:90"], write=page), lambda _: None)["table"]
    rows = [line.split(" | ")[2] for line in table.splitlines() if line.startswith("| 10:90")]
    assert rows == ["FedEM"]
    assert "| FedSoft |" not in table
    assert "| FedSoft |" in page.read_text()
    assert "--only" in table
    assert "--only" not in page.read_text()


@pytest.mark.parametrize("what", [["--summary"], ["--compare", "best"], ["--dry-run"]])
def test_a_picture_is_refused_where_none_is_drawn(tmp_path: Path, what: list[str]) -> None:
    asked = ["experiment", TEN.name, "--out", str(RESULTS), "--picture", str(tmp_path / "p.svg"), *what]
    ran = CliRunner().invoke(app, asked)
    assert ran.exit_code == UsageError("").exit_code
    assert "draw no picture" in ran.stderr


def test_differences_are_those_of_the_finished_cells_with_their_own_rounds() -> None:
    found = compare_experiment(TEN, ["best"])
    assert found["rounds"] == 10
    assert found["comparisons"]


def test_of_several_numbers_of_rounds_the_one_with_most_cells_counts_and_a_line_names_the_others(
    tmp_path: Path,
) -> None:
    write_cells(tmp_path, 10, 3)
    write_cells(tmp_path, 20, 2)
    mixed, said = ExperimentArgs(name=TEN.name, out=tmp_path), list[str]()
    assert finished_rounds(TEN.name, (), mixed.place) == {10: 3, 20: 2}
    found = summarise_experiment(mixed, said.append)
    assert (found["run"], found["rounds"]) == (3, 10)
    assert said == ["the cells with 10 rounds are taken; 2 cells with 20 rounds are here: --rounds takes them"]


def test_rounds_that_no_cell_has_are_answered_with_those_that_are_here(tmp_path: Path) -> None:
    said: list[str] = []
    wrong_rounds = ExperimentArgs(name=TEN.name, out=RESULTS, rounds=60)
    assert summarise_experiment(wrong_rounds, said.append)["run"] == 0
    assert said == ["no cell with 60 rounds is finished; 16 cells with 10 rounds are here: --rounds takes them"]
    with pytest.raises(UsageError) as wrong:
        compare_experiment(wrong_rounds, ["best"])
    assert "16 cells with 10 rounds are here" in wrong.value.hint


def test_a_section_of_finished_cells_is_never_replaced_by_one_of_none(tmp_path: Path) -> None:
    page = tmp_path / "cells.md"
    summarise_experiment(ExperimentArgs(name=TEN.name, out=RESULTS, write=page))
    held = page.read_text()
    assert "16 of 16 cells run" in held
    for nothing in (ExperimentArgs(name=TEN.name, out=tmp_path / "no", write=page),
                    ExperimentArgs(name=TEN.name, out=RESULTS, rounds=60, write=page)):  # fmt: skip
        with pytest.raises(UsageError, match="16 cells") as wrong:
            summarise_experiment(nothing)
        assert "--rounds" in wrong.value.hint
        assert page.read_text() == held


def test_a_dry_run_says_how_many_runs_of_which_rows_and_how_long_by_finished_cells(tmp_path: Path) -> None:
    asked = ExperimentArgs(name=TEN.name, out=tmp_path, rounds=10, seeds=2, only=["FedSoft,FedEM", "10:90"])
    unknown = dry_run_experiment(asked)
    assert (unknown["runs"], unknown["finished"], unknown["seconds"]) == (4, 0, None)
    assert "rows: FedSoft, K = 2; FedEM, K = 2\ncolumns: 10:90\n" in unknown["text"]
    assert "time of 4 runs: not known" in unknown["text"]
    write_cells(tmp_path, 10, 1)  # FedSoft on 10:90, seed 0: 30 s
    known = dry_run_experiment(asked)
    assert (known["finished"], known["seconds"]) == (1, 90.0)
    assert "time of 3 runs: roughly 2 min" in known["text"]
    assert known["guessed"] == ["FedEM, K = 2"]
    assert "no cell of FedEM, K = 2 is finished: the time of other rows stands for theirs" in known["text"]
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_the_command_in_a_table_of_the_users_own_is_without_the_folder(tmp_path: Path) -> None:
    mine = tmp_path / "my table.toml"
    mine.write_text((EXPERIMENTS_FOLDER / f"{TEN.name}.toml").read_text())
    found = run_experiment(ExperimentArgs(name=str(mine), out=tmp_path, kept=True, rounds=10), say_nothing)
    assert "`fedcenters-emulator experiment 'my table.toml' --" in found["table"]
    assert str(tmp_path) not in found["table"]


def test_a_run_with_other_rounds_names_the_finished_cells_that_it_does_not_take() -> None:
    text = dry_run_experiment(ExperimentArgs(name=TEN.name, out=RESULTS))["text"]
    assert "48 runs of 60 rounds, 0 finished before" in text
    assert "16 cells with 10 rounds are here: --rounds takes them" in text
