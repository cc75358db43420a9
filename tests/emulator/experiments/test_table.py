from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from edge_client.errors import ConfigError, UsageError
from emulator.experiments.measures import Measure
from emulator.experiments.plan import PaperFigure, TableCell, parse_plan
from emulator.experiments.table import (
    lost_rows,
    mean_and_deviation,
    paired_difference,
    render_table,
    replace_section,
    told_figures,
    verdict,
)
from tests.emulator.experiments.test_plan import TOML

PLAN = parse_plan("t", TOML)
FOUND = [
    {"seed": 0, "values": {"accuracy": [85.0, 86.0], "f1-of-devices": [50.0]}, "note": "lossy pixels"},
    {"seed": 1, "values": {"accuracy": [86.0, 87.0]}, "note": "lossy pixels"},
]


def results(cell: TableCell) -> Sequence[Mapping[str, Any]]:
    return FOUND if cell.row.method == "fedavg" else []


def rows_of(text: str) -> list[list[str]]:
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_each_cell_shows_the_papers_figure_ours_and_a_verdict_else_ours_alone_and_absent_ones_are_counted() -> None:
    text = render_table(PLAN, results, command="run it", reasons={"B": "no files"})
    head, line, ours = rows_of(text)
    assert head[3:7] == ["accuracy %: paper", "accuracy %: ours", "accuracy %: verdict", "F1 of devices %"]
    assert set(line) == {"---"}
    assert ours == ["A", "1", "FedAvg", "86.08 ± 0.7", "86.00 ± 0.71", "agrees (-0.1)", "50.00", "2"]
    assert "* 1 of 2 cells were not run; `--summary` names them." in text
    assert "`run it`" in text
    assert "* A: lossy pixels." in text
    assert "* B was not run: no files." in text


def test_a_table_without_any_figure_of_a_paper_has_no_columns_for_one() -> None:
    plan = parse_plan("t", TOML.replace('paper = ["86.08±0.70 -"]', ""))
    head, _, ours = rows_of(render_table(plan, results, command="run it"))
    assert head == ["data", "K", "method", "accuracy %", "F1 of devices %", "seeds"]
    assert ours == ["A", "1", "FedAvg", "86.00 ± 0.71", "50.00", "2"]


def test_a_measure_of_some_cells_has_one_column_with_a_verdict_and_none_where_no_cell_has_it() -> None:
    text = TOML.replace("[settings]", '[also]\naccuracy-test-batch = "accuracy"\n[settings]')
    plan = parse_plan("t", text)
    assert "statistics of the test batch" not in render_table(plan, results, command="")
    both = [{"seed": 0, "values": {"accuracy": [85.5], "accuracy-test-batch": [85.4]}, "note": ""}, FOUND[1]]
    head, _, ours = rows_of(render_table(plan, lambda c: both if c.row.method == "fedavg" else [], command=""))
    assert head[7] == "accuracy %, statistics of the test batch"
    assert ours[7] == "85.40; agrees (-0.7); n = 1"
    with pytest.raises(ConfigError, match="no metric is called f1"):
        parse_plan("t", text.replace('= "accuracy"', '= "f1"'))


@pytest.mark.parametrize(
    ("paper", "ours", "said"),
    [
        (PaperFigure(mean=80.0), 80.9, "agrees (+0.9)"),  # within the slack of 1
        (PaperFigure(mean=80.0), 79.96, "agrees (0.0)"),
        (PaperFigure(mean=80.0), 80.04, "agrees (0.0)"),
        (PaperFigure(mean=80.0), 82.5, "+2.5"),
        (PaperFigure(mean=80.0, deviation=1.0), 78.1, "agrees (-1.9)"),  # two deviations of the paper's
        (PaperFigure(mean=80.0, deviation=5.0), 86.4, "+6.4, within 2 sd"),  # a wide deviation alone does not agree
        (PaperFigure(mean=80.0, deviation=0.1), 70.0, "-10.0"),
        (None, 1.0, ""),
    ],
)
def test_a_verdict_is_a_distance_in_the_papers_deviations(paper: PaperFigure | None, ours: float, said: str) -> None:
    assert verdict(Measure(title="t", values=lambda _: [], slack=1.0), paper, ours) == said


def test_errors_may_differ_by_a_share_of_themselves() -> None:
    measure = Measure(title="t", values=lambda _: [], relative_slack=0.15)
    assert verdict(measure, PaperFigure(mean=100.0), 114.0) == "agrees (+14.0)"
    assert verdict(measure, PaperFigure(mean=100.0), 116.0) == "+16.0"
    assert verdict(Measure(title="t", values=lambda _: []), PaperFigure(mean=1.0), 0.97) == "0.0"


def test_a_deviation_is_that_between_seeds_and_one_seed_has_none() -> None:
    mean, deviation = mean_and_deviation([1.0, 3.0])
    assert mean == 2.0
    assert deviation == pytest.approx(2**0.5)
    assert mean_and_deviation([2.0])[1] is None


def test_rows_are_compared_over_their_common_seeds_with_students_interval() -> None:
    ours, other = {0: 3.0, 1: 5.0, 2: 4.0, 9: 0.0}, {0: 1.0, 1: 2.0, 2: 3.0, 5: 7.0}
    mean, half, n = paired_difference(ours, other)
    assert (mean, n) == (2.0, 3)
    assert half == pytest.approx(4.303 * 1.0 / 3**0.5, rel=1e-3)  # t of 0.975 with two degrees of freedom
    assert paired_difference({0: 3.0}, other) == (2.0, None, 1)


@pytest.mark.parametrize(
    ("values", "shown"),
    [((84.5, 86.5), "-0.50 ± 6.35"), ((85.499, 86.499), "+0.00 ± 0.00")],
    ids=["less", "hardly less"],
)
def test_a_row_shows_its_difference_to_the_row_that_it_is_read_against(values: Sequence[float], shown: str) -> None:
    """One that rounds to nothing had a minus."""
    plan = parse_plan("t", TOML.replace('method = "fedsgd"', 'method = "fedsgd"\nagainst = "FedAvg"'))
    other = [{"seed": s, "values": {"accuracy": [value]}, "note": ""} for s, value in enumerate(values)]
    head, _, first, second = rows_of(render_table(plan, lambda cell: other if cell.row.against else FOUND, command=""))
    assert head[-2] == "accuracy % against another row, paired"
    assert first[-2] == ""
    assert second[-2] == f"{shown} to FedAvg, n = 2"


def test_a_table_that_lacks_figures_of_the_file_leaves_it_and_names_a_row(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    replace_section(path, "t", render_table(PLAN, results, command="run it"))
    replace_section(path, "t", render_table(PLAN, results, command="run it another way"), lost=lost_rows)
    held = path.read_text()
    with pytest.raises(UsageError, match=r"figures that were not run here \(A, 1, FedAvg\); it stays[\s\S]*hint: "):
        replace_section(path, "t", render_table(PLAN, lambda _: [], command="run it"), lost=lost_rows)
    assert path.read_text() == held


def test_a_table_of_fewer_seeds_leaves_the_file(tmp_path: Path) -> None:
    path, some = tmp_path / "RESULTS.md", [{"seed": s, "values": {"accuracy": [84.0]}, "note": ""} for s in range(3)]
    replace_section(path, "t", render_table(PLAN, lambda _: some, command="run it"))
    replace_section(path, "t", render_table(PLAN, lambda _: some, command="run it"), lost=lost_rows)
    with pytest.raises(UsageError, match=r"\(A, 1, FedAvg; A, 1, FedSGD\); it stays[\s\S]*--seeds"):
        replace_section(path, "t", render_table(PLAN, lambda _: some[:2], command="run it"), lost=lost_rows)


def test_a_table_replaces_itself_between_its_markers_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\nwords\n")
    replace_section(path, "one", "first")
    replace_section(path, "two", "second")
    replace_section(path, "one", "third")
    text = path.read_text()
    assert text.startswith("# Results\n\nwords\n")
    assert text.count("<!-- one -->") == text.count("<!-- end of one -->") == 1
    assert "first" not in text
    assert text.index("third") < text.index("second")
    before = text
    replace_section(path, "two", "second")
    assert path.read_text() == before


def test_a_table_says_of_which_rounds_its_figures_are_and_with_several_seeds_what_their_plus_minus_is() -> None:
    rounds, spread = render_table(PLAN, results, command="run it").splitlines()[-2:]
    assert rounds.startswith("* A seed's accuracy and F1 are means")
    assert spread == (
        "* Our ± behind a figure is the standard deviation between seeds (n - 1), behind a difference half of"
        " Student's 95 % interval."
    )
    one_seed = render_table(PLAN, lambda cell: results(cell)[:1], command="run it")
    assert one_seed.splitlines()[-1] == rounds
    assert told_figures(["own-error"], several=False) == ["A seed's figures are those after its last round"]
