"""fc.compare: names, table, history over all runs, picture, and the progress of several runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import fedcenters as fc
from coordinator.strategies.base import Strategy
from edge_client.errors import FedcentersError, UsageError
from edge_client.protocol.task import Array
from emulator.api import checks, comparison
from emulator.api.checks import COLUMNS, COMPARED, SCORE_COLUMNS
from emulator.api.comparison import left_in_words


@pytest.fixture(scope="module")
def found() -> Any:  # noqa: ANN401 - fc.Comparison, which a module fetches when it is used
    methods: dict[str, Any] = {"one": fc.FedAvg(local_steps=5), "three": fc.FeSEM(3, local_steps=5)}
    return fc.compare(methods, fleet=fc.fleets.digits(devices=6), seeds=2, rounds=2, metrics={"wrong": share_of_wrong})


def share_of_wrong(y: Array, outputs: Array) -> float:
    return float((outputs.argmax(axis=1) != y).mean())


def test_a_dict_names_the_methods_everywhere(found: fc.Comparison) -> None:
    assert list(found.results) == list(found.table()["method"]) == ["one", "three"]
    assert [line.get_label() for line in found.plot().axes[0].lines] == ["one", "three"]


@pytest.mark.parametrize("name", sorted(COLUMNS | SCORE_COLUMNS | COMPARED))
def test_a_metric_cannot_take_the_place_of_another_column(name: str) -> None:
    with pytest.raises(UsageError, match=f"a metric is called '{name}'"):
        fc.simulate(fc.FedAvg(), fleet=fc.fleets.digits(devices=2), rounds=1, metrics={name: share_of_wrong})


def test_a_run_of_before_whose_metric_took_the_place_of_another_column_has_that_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "SCORE_COLUMNS", frozenset())
    asked: dict[str, Any] = {"metrics": {"accuracy": lambda y, outputs: 7.0}, "rounds": 1}
    result = fc.simulate(fc.FedAvg(local_steps=1), fleet=fc.fleets.digits(devices=3), **asked)
    assert list(result.history["accuracy"]) == [result.accuracy]


def test_a_metric_that_cannot_take_y_and_outputs_is_refused_before_a_round_is_trained() -> None:
    began: list[fc.Result] = []
    with pytest.raises(UsageError, match=r"(?s)metric mine: missing a required argument.*lambda y, outputs"):
        fc.simulate(
            fc.FedAvg(local_steps=1),
            fleet=fc.fleets.digits(devices=2),
            rounds=2,
            metrics={"largest": max, "mine": lambda y, outputs, weights: 0.0},  # type: ignore[dict-item, misc]
            on_round=began.append,
        )
    assert not began


def test_history_has_a_row_for_each_method_seed_and_round(found: fc.Comparison) -> None:
    rows = found.history
    keys = list(zip(rows["method"], rows["seed"], rows["round"], strict=True))
    assert keys == [(name, seed, t) for name in ("one", "three") for seed in (0, 1) for t in (1, 2)]
    assert rows["accuracy"][3] == found.results["one"][1].accuracy


def test_the_table_is_printed_in_per_cent_points_and_megabytes(found: fc.Comparison) -> None:
    head, first, second, _ = repr(found).splitlines()
    words = "method seeds accuracy ± deviation better by ± 95 % interval, points ARI MB seconds"
    assert " ".join(head.split()) == words
    assert "%" in first
    assert "±" in second
    assert "<th>better by ± 95 % interval, points</th>" in found._repr_html_()
    assert all(isinstance(n, int) for n in found.table()["bytes"].tolist())


def test_a_dict_may_name_methods_by_a_small_number() -> None:
    """Four digits after the point were shown of it, as of a score."""
    rates = {1e-5: fc.FedAvg(local_steps=1), 2e-5: fc.FedAvg(local_steps=2)}
    found = fc.compare(rates, fleet=fc.fleets.digits(devices=3), rounds=1, seeds=1)  # type: ignore[arg-type]
    assert list(found.table()["method"]) == list(found.history["method"]) == ["1e-05", "2e-05"]
    assert "2e-05" in repr(found)


def test_a_metric_of_ones_own_has_a_table_and_a_picture(found: fc.Comparison) -> None:
    wrong, accuracy = found.table("wrong"), found.table()
    assert wrong["wrong"].tolist() == pytest.approx([1 - value for value in accuracy["accuracy"]])
    assert wrong["more_by"][1] == pytest.approx(-accuracy["better_by"][1])
    assert wrong["interval"][1] == pytest.approx(accuracy["interval"][1])
    (axes,) = found.plot("wrong").axes
    assert axes.get_title(loc="left").startswith("Wrong on held-out samples")
    rows = found.history
    first = [value for value, name, t in zip(rows["wrong"], rows["method"], rows["round"], strict=True)
             if (name, t) == ("one", 1)]  # fmt: skip
    assert np.asarray(axes.lines[0].get_ydata())[0] == pytest.approx(np.mean(first))


def test_a_difference_to_a_method_without_a_score_is_unknown(found: fc.Comparison) -> None:
    """It was NaN, and printed as "+nan"."""

    def untested(run: fc.Result) -> fc.Result:
        records: list[Any] = [
            {**record, "accuracy": {**record["accuracy"], "micro": None}} for record in run.run.records
        ]
        return replace(run, run=replace(run.run, records=records))

    bare = {seed: untested(run) for seed, run in found.results["one"].items()}
    one, three = fc.Comparison(results={"bare": bare, "three": found.results["three"]})._rows()
    assert one["accuracy"] is None
    assert three["accuracy"] > 0
    assert three["better_by"] is three["interval"] is None


def test_a_difference_that_is_printed_as_zero_has_no_minus() -> None:
    assert comparison._signed(-0.0004, 0.01, 100) == "+0.0 ± 1.0"
    assert comparison._signed(-0.004, None, 100) == "-0.4"


def test_a_score_that_no_run_has_is_refused_with_the_nearest_one(found: fc.Comparison) -> None:
    for ask in (found.table, found.plot):
        with pytest.raises(UsageError, match="no run has a score 'wrongs'") as refused:
            ask("wrongs")
        assert "did you mean 'wrong'" in refused.value.hint


def test_below_the_table_stands_of_which_tests_the_scores_are_and_than_what_a_method_is_better(
    found: fc.Comparison,
) -> None:
    """The last accuracy that the progress tells is another number, and "better by" named no other method."""
    mean = "accuracy: the mean of a run's last three tests"
    note = f"{mean}; better by: than 'one', with the same seeds; a difference below its interval may be chance"
    assert repr(found).splitlines()[-1] == note
    assert note.replace("'", "&#x27;") in found._repr_html_()
    single = {name: {0: runs[0]} for name, runs in found.results.items()}
    assert repr(fc.Comparison(results=single)).endswith("; better by: than 'one', with the same seeds")
    alone = fc.Comparison(results={"one": found.results["one"]})
    assert repr(alone).splitlines()[-1] == mean


def test_the_title_of_a_run_tells_the_minutes_of_all_that_are_left_by_the_earlier_ones() -> None:
    took = [("fast", 10.0), ("slow", 170.0)]
    assert left_in_words(took, ["fast", "slow"]) == " (3 min left)"
    assert left_in_words(took, ["new", "new"]) == " (3 min left)"  # as long as the others on average
    assert left_in_words(took, ["fast"]) == left_in_words([], ["slow"]) == ""


@pytest.mark.parametrize("progress", [None, True, False])
def test_without_a_terminal_each_run_is_told_on_stderr_when_it_begins_and_ends(
    capfd: pytest.CaptureFixture[str], *, progress: bool | None
) -> None:
    methods: dict[str, Strategy] = {"one": fc.FedAvg(local_steps=1), "none": fc.NonFed(local_steps=1)}
    found = fc.compare(methods, fleet=fc.fleets.digits(devices=3), seeds=[7], rounds=1, progress=progress)
    out, told = capfd.readouterr()
    assert out == ""
    lines = []
    for n, name in enumerate(methods, 1):
        run, accuracy = f"run {n} of 2  {name}, seed 7", found.results[name][7].accuracy
        lines += [f"{run}: begun", f"{run}: done, accuracy {accuracy:.1%}"]
    begun_and_done = [line.partition(" as served")[0] for line in told.splitlines() if "since" not in line]
    assert begun_and_done == ([] if progress is False else lines)


def test_targets_that_are_no_classes_are_compared_by_their_squared_error() -> None:
    """The table had no measure at all, and the picture no line."""
    x, who = np.random.default_rng(0).normal(size=(80, 3)), np.arange(80) // 20
    fleet = fc.fleet((x, x[:, 0] * np.where(who % 2, 1, -1)), by=who)
    methods: dict[str, Any] = {"one": fc.FedAvg(local_steps=5), "two": fc.FeSEM(2, local_steps=5)}
    found = fc.compare(methods, fleet=fleet, seeds=2, rounds=2)
    table, errors = found.table(), [found.results["two"][s].run.records for s in (0, 1)]
    mean = [np.mean([record["metrics"]["squared_error"]["micro"] for record in each]) for each in errors]
    assert table["squared_error"][1] == pytest.approx(np.mean(mean))
    assert table["better_by"][1] == pytest.approx(table["squared_error"][0] - table["squared_error"][1])
    assert table["better_by"][1] > 0
    assert " ".join(repr(found).splitlines()[0].split()) == (
        "method seeds squared_error ± deviation better by ± 95 % interval MB seconds"
    )
    axes = found.plot().axes[0]
    drawn = np.array([line.get_ydata() for line in axes.lines])
    assert drawn.shape == (2, 2)
    assert axes.get_ylim()[1] > drawn.max()


def test_each_devices_scores_are_those_of_its_held_out_samples_and_their_mean_weighs_samples() -> None:
    x = np.random.default_rng(0).standard_normal((90, 3)).astype(np.float32)
    fleet = fc.fleet((x, x @ np.ones((3, 1), np.float32)), by=np.repeat(["few", "many"], [10, 80]), test=0.2)

    def worst(y: Array, outputs: Array) -> float:
        return float(np.abs(y - outputs).max())

    result = fc.simulate(
        fc.FedAvg(local_steps=1), fleet=fleet, model=nn.Linear(3, 1), metrics={"worst": worst}, rounds=2
    )
    held = {who: local.test for who, local in fleet.items() if local.test is not None}
    off = {who: test.y - result.predict(test.x, center=0) for who, test in held.items()}
    counts = [len(test) for test in held.values()]
    squares, largest = [np.mean(each**2) for each in off.values()], [np.abs(each).max() for each in off.values()]
    for name, mine in {"squared_error": squares, "worst": largest}.items():
        np.testing.assert_allclose(result.per_device(name)[list(off)], mine, rtol=1e-5)  # float32
        assert result.history[name].iloc[-1] == pytest.approx(np.average(mine, weights=counts), rel=1e-5)
    with pytest.raises(UsageError, match="no device has a score 'wurst'\n\nhint: did you mean 'worst'"):
        result.per_device("wurst")


def test_a_loss_of_ones_own_is_what_is_compared() -> None:
    """Outputs of such a loss may be logits, whose error to targets of 0 and 1 says nothing."""
    x = np.random.default_rng(0).normal(size=(40, 3))
    fleet = fc.fleet((x, (x > 0).astype(float)), by=np.arange(40) // 20)
    found = fc.compare(
        [fc.FedAvg(local_steps=1)], fleet=fleet, seeds=1, rounds=1, model=nn.Linear(3, 3), loss=nn.BCEWithLogitsLoss()
    )
    run = found.results["FedAvg(local_steps=1)"][0].run
    assert found.table()["loss"][0] == run.records[-1]["loss"]["micro"]


@pytest.mark.parametrize(
    ("given", "said"), [({"seed": 3}, "no option 'seed'.*did you mean 'seeds'"), ({"name": "x"}, "no option 'name'")]
)
def test_what_every_run_of_a_comparison_has_of_its_own_is_no_option(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){said}"):
        fc.compare([fc.FedAvg()], fleet=fc.fleets.digits(devices=3), **given)


def test_options_that_a_later_method_refuses_are_told_before_the_first_run(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = fc.fleets.digits(devices=3)
    with pytest.raises(UsageError, match="secure with codec f16"):
        fc.compare([fc.FedAvg(), fc.FedAvg(server=fc.ServerOptions(secure="updates"))], fleet=fleet, codec="f16")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("later", "told"),
    [
        (fc.FedAvg(server=fc.ServerOptions(secure="updates")), "batch norm"),
        (fc.FedRC(2, label_prior="device", local_steps=1), "label-prior device corrects the cross-entropy"),
        (fc.FeSEM(2, representation="*.head"), "head"),
    ],
)
def test_what_does_not_suit_a_later_method_is_told_before_the_first_run(
    later: Any,  # noqa: ANN401 - methods of several classes
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was told when the turn of that method came."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    asked: dict[str, Any] = {"fleet": fc.fleets.digits(devices=6), "model": model, "seeds": 1, "rounds": 1}
    loss = nn.CrossEntropyLoss() if told.startswith("label") else None
    with pytest.raises(FedcentersError, match=told):
        fc.compare([fc.FedAvg(local_steps=1), later], loss=loss, **asked)
    assert "FedAvg(local_steps=1), seed 0" not in capsys.readouterr().err


def test_the_model_is_looked_through_once_for_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was traced again for each: a deep network takes seconds, before anything was told."""
    passes: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(len(x))
            return super().forward(x.flatten(1))

    model, fleet = Counted(64, 10), fc.fleets.digits(devices=6)
    monkeypatch.setattr(comparison, "run_one_of_several", lambda *_, **__: None)
    counts = []
    for methods in ([fc.FedAvg()], [fc.FedAvg(), fc.FeSEM(2), fc.IFCA(3)]):
        passes.clear()
        fc.compare(methods, fleet=fleet, model=model, seeds=1, rounds=1)
        counts.append(len(passes))
    assert counts[0] == counts[1] > 0


def test_a_seed_that_is_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match=r"seed 3 is given twice"):
        fc.compare([fc.FedAvg()], fleet=fc.fleets.digits(devices=3), seeds=[3, 1, 3])


def test_a_wrong_seed_is_named_before_any_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"seed is -1"):
        fc.compare([fc.FedAvg(local_steps=1)], fleet=fc.fleets.digits(devices=3), seeds=[3, -1], rounds=1)
    assert "begun" not in capsys.readouterr().err


@pytest.mark.parametrize("seeds", [None, 2.5, "3", True])
def test_seeds_that_are_no_number_and_no_list_are_named(seeds: Any) -> None:  # noqa: ANN401
    with pytest.raises(UsageError, match=r"(?s)seeds is .*as seeds=3, or which"):
        fc.compare([fc.FedAvg()], fleet=fc.fleets.digits(devices=3), seeds=seeds)


@pytest.mark.parametrize("wrong", [fc.FedAvg(), [], {}, [fc.FedAvg(), fc.FedAvg()], ["fedavg"], {"one": fc.FedAvg}])
def test_what_is_no_list_of_methods_is_named(wrong: Any) -> None:  # noqa: ANN401
    with pytest.raises(UsageError, match=r"hint: (give|write)"):
        fc.compare(wrong, fleet=fc.fleets.digits(devices=3))


def test_a_comparison_goes_on_from_the_folders_of_its_runs(tmp_path: Path) -> None:
    methods = {"two": fc.FedAvg(local_steps=2), "four": fc.FedAvg(local_steps=4)}
    asked: dict[str, Any] = {"fleet": fc.fleets.digits(devices=3), "seeds": 1}
    fc.compare(methods, rounds=1, out=tmp_path, **asked)
    further = fc.compare(methods, rounds=2, out=tmp_path, resume=True, **asked)
    whole = fc.compare(methods, rounds=2, **asked)
    for name in methods:
        assert further.results[name][0].accuracy == whole.results[name][0].accuracy
        assert len(further.results[name][0].history) == 2


def test_an_interrupted_comparison_goes_on_and_begins_the_runs_that_were_not_begun(
    tmp_path: Path,
) -> None:
    """Without `resume` it would play the first ones again."""
    methods: dict[str, Any] = {
        "two": fc.FedAvg(local_steps=2),
        "four": fc.FedAvg(local_steps=4),
        "groups": fc.FeSEM(2, local_steps=2),
    }
    asked: dict[str, Any] = {"fleet": fc.fleets.digits(devices=3), "seeds": 2, "rounds": 2}
    fc.simulate(methods["two"], fleet=asked["fleet"], rounds=1, out=tmp_path)
    begun = tmp_path / "simulate-fesem-0"
    fc.simulate(methods["groups"], fleet=asked["fleet"], rounds=2, out=tmp_path, checkpoint_every=0)
    shutil.rmtree(begun / "centers")
    further, whole = fc.compare(methods, out=tmp_path, resume=True, **asked), fc.compare(methods, **asked)
    assert repr(further.table()["accuracy"]) == repr(whole.table()["accuracy"])
    names = [f"simulate-{name}" for name in ("fedavg-0", "fedavg-0-2", "fedavg-1", "fedavg-1-2", "fesem-0", "fesem-1")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (begun / "checkpoint").is_dir()
