"""Differences between rows are paired by seed, and none is called clear without an interval."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import UsageError
from emulator.experiments.command import ExperimentArgs, compare_experiment
from emulator.experiments.compare import PairedDifference, compare_rows
from emulator.experiments.plan import TableCell, parse_plan, row_label
from emulator.reports.console_tables import differences_table

TOML = """
title = "T"
source = "S"
metrics = ["accuracy", "own-error"]
rounds = 7
seeds = 3
[[columns]]
name = "A"
data-set = "digits"
partition = "iid"
model = "digits-mlp"
devices = 4
[[rows]]
name = "FedAvg"
method = "fedavg"
[[rows]]
name = "WeCFL"
method = "wecfl"
k = 5
settings = { clusters = 5 }
[[rows]]
name = "WeCFL"
method = "wecfl"
k = 10
settings = { clusters = 10 }
[[rows]]
name = "WeCFL, server momentum"
method = "wecfl"
k = 10
settings = { clusters = 10, server-momentum = 0.8 }
"""
PLAN = parse_plan("t", TOML)
RESULTS = Path(__file__).parents[3] / "docs" / "results"
ACCURACY: Mapping[str, Sequence[float]] = {
    "FedAvg": [70.0, 72.0, 71.0],
    "WeCFL, K = 5": [99.0],
    "WeCFL, K = 10": [80.0, 81.0, 82.0],
    "WeCFL, server momentum, K = 10": [81.0, 82.1, 82.9],
}


def results(cell: TableCell) -> list[Mapping[str, Any]]:
    told = ACCURACY[row_label(cell)]
    return [{"seed": s, "values": {"accuracy": [x], "own-error": [100 - x]}} for s, x in enumerate(told)]


def compared(*asked: str, measures: Sequence[str] = ("accuracy",)) -> dict[tuple[str, str], PairedDifference]:
    return {(one.first, one.second): one for one in compare_rows(PLAN.cells, results, measures, asked)}


def test_a_pair_has_its_mean_difference_and_students_interval_over_common_seeds() -> None:
    (one,) = compared("WeCFL, K = 10", "fedavg").values()
    assert (one.column, one.measure, one.first, one.second) == ("A", "accuracy", "WeCFL, K = 10", "FedAvg")
    assert one.by_seed == {0: 10.0, 1: 9.0, 2: 11.0}
    assert one.mean == 10.0
    assert one.half == pytest.approx(4.303 / 3**0.5, rel=1e-3)  # t of 0.975, two degrees of freedom; deviation 1
    assert one.clear


def test_one_common_seed_has_no_interval_and_is_never_clear() -> None:
    (one,) = compared("WeCFL, K = 5", "FedAvg").values()
    assert (one.mean, one.half, one.clear) == (29.0, None, False)
    assert one.to_json()["interval"] is None


def test_words_are_names_labels_or_methods_and_numbers_of_centers_are_not_mixed_unasked() -> None:
    momentum = "WeCFL, server momentum, K = 10"
    assert set(compared("wecfl,fedavg")) == {("WeCFL, K = 5", "FedAvg"), ("WeCFL, K = 10", "FedAvg")}
    assert set(compared("WeCFL, server momentum", "wecfl")) == {(momentum, "WeCFL, K = 10")}
    assert set(compared("WeCFL, K = 5", "WeCFL, K = 10")) == {("WeCFL, K = 5", "WeCFL, K = 10")}
    assert set(compared("WeCFL, K = 10")) == {(row, "WeCFL, K = 10") for row in ACCURACY if row != "WeCFL, K = 10"}


def test_a_pair_that_is_asked_for_again_is_compared_once() -> None:
    once = compare_rows(PLAN.cells, results, ["accuracy"], ["WeCFL, K = 5,FedAvg"])
    assert compare_rows(PLAN.cells, results, ["accuracy"], ["WeCFL, K = 5,FedAvg", "FedAvg", "WeCFL, K = 5"]) == once


def test_names_with_commas_combine_in_one_word() -> None:
    momentum = "WeCFL, server momentum, K = 10"
    assert set(compared("WeCFL, server momentum,FedAvg")) == {(momentum, "FedAvg")}
    assert set(compared(f"WeCFL, K = 10,{momentum}")) == {("WeCFL, K = 10", momentum)}


def test_best_is_that_of_the_measure_among_rows_with_the_most_seeds() -> None:
    best = "WeCFL, server momentum, K = 10"
    found = compared("best", measures=("own-error",))  # the least error
    assert {second for _, second in found} == {best}
    assert {first for first, _ in found} == set(ACCURACY) - {best}
    assert {second for _, second in compared("best")} == {best}


def test_a_row_that_diverged_is_not_the_best_and_its_differences_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    best = "WeCFL, server momentum, K = 10"
    figures = {**ACCURACY, "FedAvg": [70.0, math.nan, 71.0]}
    monkeypatch.setattr(f"{__name__}.ACCURACY", figures)
    found = compared("best")
    assert {second for _, second in found} == {best}
    told = found["FedAvg", best].to_json()
    assert (told["difference"], told["interval"], told["clear"]) == (None, None, False)
    assert told["by_seed"] == {"0": -11.0, "1": None, "2": pytest.approx(-11.9)}


def test_unknown_words_and_nothing_to_compare_are_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match="called fesem") as wrong:
        compared("wecfl", "fesem")
    assert "WeCFL, K = 10" in wrong.value.hint
    with pytest.raises(UsageError, match="best is compared with every row"):
        compared("best", "wecfl")
    with pytest.raises(UsageError, match="no two finished cells") as wrong:
        compare_rows(PLAN.cells, lambda _: [], ["accuracy"], ["best"])
    assert "--summary" in wrong.value.hint


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=6), st.floats(-5, 5))
def test_a_draw_that_both_rows_share_changes_no_difference(draws: Sequence[float], gain: float) -> None:
    def drawn(cell: TableCell) -> list[Mapping[str, Any]]:
        shift = gain if cell.row.k == 10 else 0.0
        return [{"seed": s, "values": {"accuracy": [x + shift]}} for s, x in enumerate(draws)]

    (one,) = compare_rows(PLAN.cells, drawn, ["accuracy"], ["WeCFL, K = 10", "FedAvg"])
    assert one.mean == pytest.approx(gain, abs=1e-9)
    assert one.half == pytest.approx(0.0, abs=1e-9)


def test_the_command_compares_kept_cells_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = ExperimentArgs(name="wecfl-table2", out=RESULTS, only=["F-MNIST (0.1, 10)", "K=10"])
    found = compare_experiment(prepared, ["WeCFL, server momentum", "WeCFL"])
    accuracy = found["comparisons"][0]
    assert json.loads(json.dumps(found)) == found
    assert (accuracy["measure"], accuracy["n"], accuracy["clear"]) == ("accuracy", 3, True)
    assert accuracy["difference"] == pytest.approx(np.mean(list(accuracy["by_seed"].values())))
    low, high = accuracy["interval"]
    assert low < accuracy["difference"] < high
    monkeypatch.setenv("COLUMNS", "120")
    differences_table(found)
    printed = capsys.readouterr().out
    assert "F-MNIST (0.1, 10), accuracy" in printed
    assert f"{low:+.2f} to {high:+.2f}" in printed
    with pytest.raises(UsageError, match="no two finished cells"):
        compare_experiment(ExperimentArgs(name="wecfl-table2", out=tmp_path), ["best"])


def test_rows_without_a_common_seed_have_no_difference() -> None:
    def apart(cell: TableCell) -> list[Mapping[str, Any]]:
        return [{"seed": cell.row.k, "values": {"accuracy": [1.0]}}]

    (one,) = compare_rows(PLAN.cells, apart, ["accuracy"], ["WeCFL, K = 10", "FedAvg"])
    assert math.isnan(one.mean)
    told = one.to_json()
    assert (told["difference"], told["n"], told["clear"]) == (None, 0, False)
