"""fc.compare: names, table, history over all runs, picture, and the progress of several runs."""

from __future__ import annotations

from typing import Any

import pytest

import fedcenters as fc
from edge_client.errors import UsageError


@pytest.fixture(scope="module")
def found() -> Any:  # noqa: ANN401 - fc.Comparison, which a module fetches when it is used
    methods: dict[str, Any] = {"one": fc.FedAvg(local_steps=5), "three": fc.FeSEM(3, local_steps=5)}
    return fc.compare(methods, fleet=fc.fleets.digits(devices=6), seeds=2, rounds=2)


def test_a_dict_names_the_methods_everywhere(found: fc.Comparison) -> None:
    assert list(found.results) == list(found.table()["method"]) == ["one", "three"]
    assert [line.get_label() for line in found.plot().axes[0].lines] == ["one", "three"]


def test_history_has_a_row_for_each_method_seed_and_round(found: fc.Comparison) -> None:
    rows = found.history
    keys = list(zip(rows["method"], rows["seed"], rows["round"], strict=True))
    assert keys == [(name, seed, t) for name in ("one", "three") for seed in (0, 1) for t in (1, 2)]
    assert rows["accuracy"][3] == found.results["one"][1].accuracy


def test_the_table_is_printed_in_per_cent_points_and_megabytes(found: fc.Comparison) -> None:
    head, first, second = repr(found).splitlines()
    words = "method seeds accuracy ± deviation better by ± 95 % interval, points ARI MB seconds"
    assert " ".join(head.split()) == words
    assert "%" in first
    assert "±" in second
    assert "<th>better by ± 95 % interval, points</th>" in found._repr_html_()
    assert all(isinstance(n, int) for n in found.table()["bytes"].tolist())


def test_the_progress_says_which_run_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulator.console.REPEAT_INTERVAL_S", 0.0)
    fc.compare(
        [fc.FedAvg(local_steps=1), fc.NonFed(local_steps=1)],
        fleet=fc.fleets.digits(devices=3),
        seeds=1,
        rounds=1,
        progress=True,
    )
    told = capsys.readouterr().err
    assert "run 1 of 2  FedAvg(local_steps=1)  reading the data" in told
    assert "run 2 of 2  NonFed(local_steps=1)" in told


@pytest.mark.parametrize("wrong", [fc.FedAvg(), [], {}, [fc.FedAvg(), fc.FedAvg()], ["fedavg"], {"one": fc.FedAvg}])
def test_what_is_no_list_of_methods_is_named(wrong: Any) -> None:  # noqa: ANN401
    with pytest.raises(UsageError, match=r"hint: (give|write)"):
        fc.compare(wrong, fleet=fc.fleets.digits(devices=3))
