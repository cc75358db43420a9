from __future__ import annotations

import json
from dataclasses import replace
from typing import NoReturn

import pytest

from tests.benches import updates
from tests.benches.__main__ import bench
from tests.benches.goals import GOALS, Goal
from tests.benches.peer import PeerMissing
from tests.benches.render import BEGIN, END, PICTURE, notes, number, rewritten, section, verdict
from tests.benches.results import BenchFigure, BenchResults, missing_figures

FOUND = (
    BenchFigure(row="updates-wecfl-pfl", ours=20.0, theirs=10.0, score=2.0, note="updates 1e-6 apart"),
    BenchFigure(row="updates-mlp-pfl", ours=20.0, theirs=10.0, score=2.0),
    BenchFigure(row="updates-wecfl-loop", ours=20.0, theirs=10.0, score=2.0),
    BenchFigure(row="clustering-after", ours=4.0, score=4.0),
    BenchFigure(row="clustering-large", ours=0.4, score=0.4),
    BenchFigure(row="growth-centers", score=1.02, points=((2.0, 0.1), (4.0, 0.2))),
    *missing_figures(("run-wecfl-wall", "run-wecfl-memory"), "flower is not installed; run make bench-peers"),
)
RESULTS = BenchResults(
    date="2026-01-02",
    machine="a machine, 2 cores",
    load=(0.1, 1.2),
    repeats=7,
    versions={"pfl": "0.6.0"},
    commands=("make bench-peers", "python -m tests.benches"),
    seconds={"updates": 60.0, "growth": 60.0},
    figures=FOUND,
)


def lines(results: BenchResults = RESULTS) -> list[str]:
    return section(results).splitlines()


def verdicts() -> dict[str, str]:
    table = [line.split("|") for line in lines() if line.startswith("| ")][1:]
    return {goal.row: cells[8].strip() for goal, cells in zip(GOALS, table, strict=True)}


def test_every_goal_has_a_line_with_as_many_cells_as_the_head() -> None:
    table = [line for line in lines() if line.startswith("|")]
    assert len(table) == len(GOALS) + 2
    assert {line.count("|") for line in table} == {9}


def test_a_ratio_at_its_goal_is_reached_and_one_below_is_missed() -> None:
    assert verdicts()["updates-wecfl-pfl"] == "reached"
    assert verdicts()["updates-mlp-pfl"] == "missed"


def test_a_goal_that_must_not_be_exceeded_is_compared_the_other_way() -> None:
    assert verdicts()["clustering-after"] == "reached"
    assert verdicts()["clustering-large"] == "missed"


def test_a_bench_that_could_not_run_or_did_not_is_unmeasured_and_not_won() -> None:
    assert verdicts()["run-wecfl-wall"] == "unmeasured"
    assert verdicts()["scaling-mlp"] == "unmeasured"
    assert any("flower is not installed" in line for line in lines())


def test_a_peer_that_ends_at_its_turn_makes_the_rows_of_its_bench_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the whole command, and the benches after it were not run."""

    def ends(_: int) -> NoReturn:
        raise PeerMissing("pfl ended: killed")

    monkeypatch.setattr(updates, "run", ends)
    figures, versions = bench("updates", 1)
    assert {f.row for f in figures} == {goal.row for goal in GOALS if goal.row.startswith("updates-")}
    assert {f.unmeasured for f in figures} == {"pfl ended: killed"}
    assert versions == {}


def test_the_page_says_why_a_figure_is_missing_and_leaves_the_notes_of_the_others_to_the_command() -> None:
    assert "updates 1e-6 apart" not in section(RESULTS)
    assert "updates 1e-6 apart" in notes(RESULTS)
    assert "flower is not installed" not in notes(RESULTS)


def test_a_figure_with_a_reason_against_it_is_unmeasured_even_with_a_score() -> None:
    goal = Goal(row="a", bench="b", against="c", at_least=1.0)
    assert verdict(goal, BenchFigure(row="a", score=9.0, unmeasured="the updates differ")) == "unmeasured"


def test_a_row_without_a_goal_gets_no_verdict() -> None:
    assert verdicts()["updates-wecfl-loop"] == ""


def test_the_preface_says_when_where_how_and_whether_the_machine_was_busy() -> None:
    first = lines()[0]
    assert "2026-01-02" in first
    assert "`python -m tests.benches`" in first
    assert "pfl 0.6.0" in first
    assert "idle" in first
    assert "busy, load 3.0" in section(replace(RESULTS, load=(3.0, 1.0)))


def test_the_picture_is_shown_when_something_was_drawn() -> None:
    assert PICTURE in section(RESULTS)
    assert PICTURE not in section(replace(RESULTS, figures=FOUND[:2]))


def test_only_what_stands_between_the_markers_changes() -> None:
    page = f"# Before\n\n{BEGIN}\nold\n{END}\n\nAfter\n"
    new = rewritten(page, RESULTS)
    assert new == f"# Before\n\n{BEGIN}\n{section(RESULTS)}\n{END}\n\nAfter\n"
    assert rewritten(new, RESULTS) == new


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_page_without_both_markers_once_and_in_order_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="benches: begin"):
        rewritten(page, RESULTS)


def test_results_survive_their_file() -> None:
    assert BenchResults.from_json(json.loads(json.dumps(RESULTS.to_json()))) == RESULTS


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (3.0, "3"), (0.01234, "0.0123"), (123.4, "123"), (1e-9, "1.0e-09"), (None, "")]
)
def test_a_number_reads_as_a_person_writes_it(value: float | None, text: str) -> None:
    assert number(value) == text


def test_no_two_goals_share_a_row_and_none_aims_below_what_it_must_reach() -> None:
    assert len({goal.row for goal in GOALS}) == len(GOALS)
    assert all(g.met(g.aim, g.at_least) for g in GOALS if g.aim is not None and g.at_least is not None)
