"""RESULTS.md and its pages say what the kept cells say: every table, every count of cells, every interval on top."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emulator.experiments.command import ExperimentArgs, compare_experiment, run_experiment, summarise_experiment
from emulator.experiments.plan import experiment_names
from tests.figures import nearest_strangers
from tests.support.doc_pages import DOCS, ROOT

KEPT = DOCS / "results"
TOP, BEYOND, CELLS = ROOT / "RESULTS.md", DOCS / "results-beyond.md", DOCS / "results-cells.md"
SECTION = re.compile(r"<!-- ([\w-]+) -->\n(.*?)\n<!-- end of \1 -->", flags=re.DOTALL)
COMMAND = re.compile(r"`fedcenters-emulator experiment ([\w-]+)(?: --data DIR)? --rounds (\d+) --seeds (\d+)`")
PAPERS = ("fedsoft-table1", "fedsoft-table3", "wecfl-table2", "wecfl-table5", "fesem-table2")


def sections(page: Path) -> dict[str, str]:
    return {found[1]: found[2] for found in SECTION.finditer(page.read_text(encoding="utf-8"))}


TABLES = {name: text for page in (TOP, BEYOND) for name, text in sections(page).items()}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_that_of_the_kept_cells(name: str) -> None:
    told = COMMAND.search(TABLES[name])
    assert told is not None
    assert told[1] == name
    prepared = ExperimentArgs(name=name, rounds=int(told[2]), seeds=int(told[3]), out=KEPT, kept=True)
    assert run_experiment(prepared, lambda _: None)["table"] == TABLES[name]


def test_every_kept_table_stands_on_a_page_and_the_default_and_the_papers_on_the_first() -> None:
    assert set(TABLES) == {path.name for path in KEPT.iterdir() if path.is_dir()}
    assert tuple(sections(TOP)) == ("default-method", *PAPERS)


def test_the_page_of_cells_counts_what_is_kept_of_every_experiment() -> None:
    found = sections(CELLS)
    assert set(found) == set(experiment_names())
    for name, text in found.items():
        rounds = re.search(r"; (\d+) rounds\.$", text.splitlines()[0])
        assert rounds is not None
        assert summarise_experiment(ExperimentArgs(name=name, rounds=int(rounds[1]), out=KEPT))["table"] == text


@pytest.mark.parametrize(
    ("column", "first", "second", "said"),
    [
        ("F-MNIST (0.1, 10)", "WeCFL, K = 10", "FedAvg", "13.9 ± 3.1 points more"),
        ("F-MNIST (0.1, 10)", "WeCFL, server momentum, K = 10", "WeCFL, K = 10", "1.0 ± 0.4 more"),
        ("F-MNIST (0.1, 10)", "WeCFL, K = 10", "FeSEM, K = 10", "-0.01 ± 0.06 on (0.1, 10)"),
        ("F-MNIST (3, 2)", "NonFed", "WeCFL, server momentum, K = 10", "by 1.8 ± 0.9"),
        ("F-MNIST (3, 2)", "WeCFL, K = 10", "FeSEM, K = 10", "-0.2 ± 1.4 on (3, 2)"),
    ],
)
def test_an_interval_of_the_headline_is_that_of_the_kept_cells(column: str, first: str, second: str, said: str) -> None:
    assert said in headline()
    found = compare_experiment(ExperimentArgs(name="wecfl-table2", out=KEPT, only=[column]), [first, second])
    one = found["comparisons"][0]
    assert one["measure"] == "accuracy"
    mean, half = one["difference"], one["interval"][1] - one["difference"]
    digits = 2 if "0.01" in said else 1
    assert f"{mean:.{digits}f} ± {half:.{digits}f}" in said


def test_no_claim_of_the_headline_is_bold_without_an_interval() -> None:
    bold = [line for line in headline().splitlines() if "**" in line]
    assert len(bold) >= 4
    assert all("±" in line for line in bold)


def headline() -> str:
    """The first section of the first page."""
    text = TOP.read_text(encoding="utf-8")
    name = "## Where clustering wins, and where it does not"
    return text.partition(name)[2].partition("\n## ")[0]


def test_seeds_that_agree_have_no_interval() -> None:
    row = {"set": "WISDM", "devices": 20, "guide": "taught", "labels": False, "kind": "known"}
    told = nearest_strangers.table([row | {"none": 0.0, "well": 11 / 12}] * 3)
    assert "±" not in told
    assert "| 0 |  | 92 |" in told
