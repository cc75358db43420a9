from __future__ import annotations

import math

from emulator.experiments.matrix import against_best, render_matrix
from emulator.experiments.plan import TableCell, parse_plan
from emulator.experiments.table import lost_rows
from tests.emulator.experiments.test_plan import TOML
from tests.emulator.experiments.test_table import rows_of


def test_a_row_is_judged_against_the_best_other_one_seed_by_seed() -> None:
    plan = parse_plan("t", 'judged = "FedSGD"\n' + TOML)

    def results(cell: TableCell) -> list[dict[str, object]]:
        shift = 1.0 if cell.row.name == "FedSGD" else 0.0
        return [{"seed": s, "values": {"accuracy": [80.0 + s + shift]}, "note": ""} for s in range(3)]

    head, _, first, *_ = rows_of(render_matrix(plan, results, command="run it"))
    assert head[-2:] == ["FedSGD less the best other", "seeds"]
    assert first[1:] == ["81.0 ± 1.0", "82.0 ± 1.0", "+1.00 ± 0.00 (FedAvg)", "3"]


def test_a_matrix_without_its_judged_row_judges_nothing() -> None:
    plan = parse_plan("t", 'judged = "FedSGD"\n' + TOML)
    found = [{"seed": 0, "values": {"accuracy": [80.0]}, "note": ""}]
    _, _, first, *_ = rows_of(render_matrix(plan, lambda _: found, command="run it", only=plan.only(["FedAvg"])))
    assert first[1:] == ["80.0", "", "1"]


def test_a_row_that_lacks_seeds_is_judged_on_those_that_it_has_from_three_on() -> None:
    ours = {0: 80.0, 1: 81.0, 2: 82.0, 3: 99.0}
    whole = {seed: figure + 0.5 for seed, figure in ours.items()}
    found = {"ours": ours, "two": {0: 99.0, 1: 99.0}, "whole": whole}
    assert against_best(found, "ours") == "-0.50 ± 0.00 (whole)"
    three = {0: 81.0, 1: 82.0, 2: 83.0}
    assert against_best({**found, "three": three}, "ours") == "-1.00 ± 0.00 (three, 3 seeds)"
    assert against_best({**found, "three": {0: 79.0, 1: 80.0, 2: 81.0}}, "ours") == "-0.50 ± 0.00 (whole)"
    assert against_best({"ours": {}, "whole": {0: 1.0}}, "ours") == ""
    worse = {seed: figure + 9.0 for seed, figure in ours.items()}
    assert against_best({**found, "worse": worse}, "ours", lower_is_better=True) == "-0.50 ± 0.00 (whole)"
    assert against_best({"diverged": dict.fromkeys(ours, math.nan), **found}, "ours") == "-0.50 ± 0.00 (whole)"


def test_another_figure_takes_the_place_of_an_old_one_and_a_missing_one_does_not() -> None:
    plan = parse_plan("t", 'judged = "FedSGD"\n' + TOML)

    def table(figure: float | None) -> str:
        found = [] if figure is None else [{"seed": 0, "values": {"accuracy": [figure]}, "note": ""}]
        return render_matrix(plan, lambda _: found, command="run it")

    assert lost_rows(table(80.0), table(81.0)) == []
    assert lost_rows(table(80.0), table(None))
