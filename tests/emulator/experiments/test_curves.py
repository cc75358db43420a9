"""What the picture of a table shows is what its cells hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from edge_client.errors import UsageError
from emulator.experiments import curves, plan
from emulator.experiments.command import ExperimentArgs, run_experiment
from emulator.experiments.plan import TableCell, row_label
from emulator.reports import plots
from tests.emulator.experiments.test_plan import TOML

PLAN = plan.parse_plan("t", TOML)
FEDAVG, FEDSGD = PLAN.cells


def seed(number: int, *curve: float) -> dict[str, Any]:
    return {"seed": number, "curves": {"accuracy": list(curve)}}


def results(cell: TableCell) -> Sequence[Mapping[str, Any]]:
    return {FEDAVG.row.name: [seed(0, 0.5, 0.75), seed(1, 0.7, 0.85)], FEDSGD.row.name: [seed(0, 0.3, 0.4)]}[
        cell.row.name
    ]


def test_a_line_is_the_mean_of_the_finished_seeds_and_a_cell_that_was_not_run_has_none() -> None:
    (panel,) = curves.by_column(PLAN, lambda cell: results(cell) if cell == FEDAVG else [])
    assert panel.title == "A, 2 seeds"
    assert panel.lines.keys() == panel.dots.keys() == {"FedAvg"}
    np.testing.assert_allclose(np.array(panel.lines["FedAvg"], np.float64), [0.6, 0.8])


def test_lines_of_one_panel_are_of_the_same_seeds_and_dots_are_of_all() -> None:
    (panel,) = curves.by_column(PLAN, results)
    assert panel.title == "A, 1 seed"
    assert panel.lines == {"FedAvg": [0.5, 0.75], "FedSGD": [0.3, 0.4]}
    assert {name: len(dots) for name, dots in panel.dots.items()} == {"FedAvg": 2, "FedSGD": 1}


def test_every_seed_has_a_dot_at_its_figure_of_the_table_in_the_colour_of_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    make = plots.make_figure

    def keep(*args: Any) -> Any:  # noqa: ANN401 - matplotlib's
        drawn.append(make(*args))
        return drawn[-1]

    monkeypatch.setattr(plots, "make_figure", keep)
    assert curves.draw_table_curves(PLAN, results, tmp_path / "p.svg")
    first, second, _ = drawn[0].axes[0].collections
    assert drawn[0].axes[0].get_ylim()[0] <= 0.3  # every round is in the picture, the first one too
    assert drawn[0].axes[0].get_ylabel() == "accuracy"
    assert curves.DOTS in [text.get_text() for text in drawn[0].legends[0].get_texts()]
    np.testing.assert_allclose(first.get_offsets()[:, 1], [0.625, 0.775])  # of fewer than three rounds all count
    np.testing.assert_allclose(second.get_offsets()[:, 1], [0.35])
    left, right = first.get_offsets()[0, 0], second.get_offsets()[0, 0]
    assert 2 < left < right < drawn[0].axes[0].get_xlim()[1]  # beyond the last round, and seen
    lines = drawn[0].axes[0].get_lines()
    for dots, line in zip((first, second), lines, strict=True):
        np.testing.assert_allclose(dots.get_facecolor()[0], to_rgba(line.get_color()))


def test_the_axis_names_no_round_that_was_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dots stand right of the last round."""
    drawn: list[Any] = []
    make = plots.make_figure
    monkeypatch.setattr(plots, "make_figure", lambda *args: drawn.append(make(*args)) or drawn[-1])  # type: ignore[func-returns-value]
    assert curves.draw_table_curves(PLAN, lambda _: [seed(0, *[0.5] * 100)], tmp_path / "p.svg")
    assert drawn[0].axes[0].get_xticks().tolist() == [20, 40, 60, 80, 100]


def test_a_dot_is_the_mean_of_the_last_three_rounds_with_an_accuracy() -> None:
    assert curves.seed_ends([[0.1, 0.2, 0.4, 0.6, None], [None, None]]) == [pytest.approx(0.4)]


def test_a_line_says_how_many_centers_it_has() -> None:
    assert row_label(FEDAVG) == "FedAvg"
    assert row_label(replace(FEDAVG, row=replace(FEDAVG.row, k=3))) == "FedAvg, K = 3"


def test_rounds_without_an_accuracy_are_passed_over_and_errors_have_no_curve() -> None:
    assert curves.mean_curve([[None, 0.5], [None, 0.7]]) == [None, pytest.approx(0.6)]
    assert curves.mean_curve([[None, None]]) == []
    assert curves.mean_curve([]) == []


def test_a_row_looks_the_same_where_another_is_missing() -> None:
    lines = {"second": [0.1, 0.2]}
    axes = plots.make_figure(4, 3, lambda a: plots.draw_curves(a, lines, title="t", looks=["first", "second"])).axes[0]
    (line,) = axes.get_lines()
    assert (line.get_color(), line.get_linestyle()) == (plots.curve_colour(1), plots.LINES[1])


def test_thirty_two_lines_have_thirty_two_looks() -> None:
    lines = {str(i): [0.1, 0.2] for i in range(32)}
    axes = plots.make_figure(4, 3, lambda a: plots.draw_curves(a, lines, title="t")).axes[0]
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}) == 32


@pytest.mark.parametrize(("name", "start"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.pdf", b"%PDF")])
def test_the_ending_says_the_format_and_the_same_cells_give_the_same_bytes(
    tmp_path: Path, name: str, start: bytes
) -> None:
    assert curves.draw_table_curves(PLAN, results, tmp_path / name)
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(start)
    assert b"/Type3" not in drawn  # fonts that publishers refuse
    assert curves.draw_table_curves(PLAN, results, tmp_path / name)
    assert (tmp_path / name).read_bytes() == drawn


def test_without_a_finished_cell_there_is_no_picture(tmp_path: Path) -> None:
    assert not curves.draw_table_curves(PLAN, lambda _: [], tmp_path / "p.svg")
    assert list(tmp_path.iterdir()) == []


def test_another_format_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither .pdf nor .png nor .svg"):
        run_experiment(ExperimentArgs(name="wecfl-table2", out=tmp_path, picture=tmp_path / "p.gif"), print)
    assert list(tmp_path.iterdir()) == []
