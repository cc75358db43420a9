"""One page about several runs: what each achieved, where they differ, how to see them again; alone on a disk."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import fedcenters as fc
from edge_client.errors import ConfigError, FedcentersError
from emulator.cli import app
from emulator.options import SimulateArgs
from emulator.reports import comparison, demo_page
from emulator.reports.repeat import show_coordinator
from emulator.simulate import simulate_json
from tests.support.size_limit import files_of_at_most

ASKED = SimulateArgs(engine="lean", devices=6, rounds=3, settings={"local-steps": 3})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `simulate` says of two runs."""
    out = tmp_path_factory.mktemp("runs")
    asked = [replace(ASKED, out=out), replace(ASKED, out=out, method="fedavg", name="<b>plain</b>".replace("/", ""))]
    return [simulate_json(one) for one in asked]


@pytest.fixture(scope="module")
def two(results: list[dict[str, Any]]) -> list[Path]:
    return [Path(result["run"]) for result in results]


def quickly_drawn(run: Path, empty: Path) -> comparison.RunSummary:
    """A run without the pictures of its devices and images, which take longest and which no verdict is read from."""
    return replace(comparison.read_runs(run)[0], folder=empty)


@pytest.fixture(scope="module")
def page(two: list[Path]) -> str:
    """Of both runs."""
    return comparison.comparison_page([comparison.read_runs(folder)[0] for folder in two])


def table_of(page: str) -> list[list[str]]:
    """The cells of a page's rows, of which the first is the head."""
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL)]


def test_the_table_has_the_accuracy_that_simulate_printed(two: list[Path], results: list[dict[str, Any]]) -> None:
    for folder, result in zip(two, results, strict=True):
        line = comparison.read_runs(folder)[0]
        assert [line.result("accuracy", kind) for kind in ("micro", "macro")] == list(result["accuracy"].values())
        assert line.result("f1_pooled", "") == result["f1_pooled"]


def test_the_table_has_each_runs_own_results(two: list[Path], page: str) -> None:
    first, second = (comparison.read_runs(folder)[0] for folder in two)
    assert (first.method, second.method) == ("FeSEM", "FedAvg")
    for line in (first, second):
        assert f"{line.result('accuracy', 'micro'):.1%}" in page
    assert first.ari is not None
    assert f"<td>{first.ari:.3f}</td>" in page


def test_what_differs_is_listed_and_what_does_not_is_not(page: str) -> None:
    differing = page[page.index("Where they differ") : page.index("<h2>simulate-fesem-0")]
    assert "<td>method</td><td>fesem</td><td>fedavg</td>" in differing
    assert "<td>clusters</td>" not in differing  # FedAvg has no word for it
    assert '<p class="quiet">Only simulate-fesem-0 has: clusters, e-step, ' in differing
    assert "local-steps" not in differing


def test_the_page_stands_alone_and_shows_names_as_text(two: list[Path], page: str) -> None:
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="https?:', page)
    assert "<b>plain" not in page
    assert "&lt;b&gt;plain" in page
    assert page.count("<svg") > 4
    assert f"fedcenters-emulator simulate {two[0] / 'config.toml'}" in page


def test_the_runs_of_a_coordinator_are_told_apart(two: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "config.toml").write_text(
        'broker = "mqtt://x"\n[model]\nname = "m"\n[[runs]]\nname = "a"\nmethod = "fesem"\nlam = 0.5\n'
        '[[runs]]\nname = "b"\nmethod = "fedavg"\n'
    )
    events = [demo_page.read_events(run / "metrics.jsonl") for run in two]
    told = [{**event, "run": name} for name, rows in zip("ab", events, strict=True) for event in rows]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in told))
    lines = comparison.read_runs(folder)
    assert [(line.name, line.method) for line in lines] == [("home/a", "FeSEM"), ("home/b", "FedAvg")]
    assert (lines[0].settings["lam"], lines[0].settings["model"]) == (0.5, "m")
    assert "lam" not in lines[1].settings
    serve = f"fedcenters-coordinator serve {folder / 'config.toml'}"
    assert f"fedcenters-coordinator status {folder}\n{serve}</pre>" in comparison.comparison_page(lines)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "done"}\n')
    lines = comparison.read_runs(folder)
    assert f"{serve} --dashboard 8080" in comparison.comparison_page(lines)
    with (folder / "metrics.jsonl").open("a") as file:  # it was given more rounds
        file.write(f"{json.dumps(told[-1] | {'round': told[-1]['round'] + 1})}\n")
    assert f"{serve}</pre>" in comparison.comparison_page(comparison.read_runs(folder))
    (folder / "simulate.toml").touch()  # and one that `simulate --broker` asked for
    assert f"fedcenters-emulator simulate {folder / 'simulate.toml'}" in comparison.comparison_page(lines)


def test_the_commands_that_show_a_run_again_have_its_folder_in_quotes_where_a_shell_needs_them(
    two: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    line = replace(comparison.read_runs(two[0])[0], folder=folder)
    assert comparison._command(line) == f"fedcenters-emulator simulate '{folder / 'config.toml'}'"
    (folder / "simulate.toml").touch()
    assert comparison._command(line) == f"fedcenters-emulator simulate '{folder / 'simulate.toml'}'"
    status, serve = show_coordinator(folder, {}, done=False).splitlines()
    assert status == f"fedcenters-coordinator status '{folder}'"
    assert serve == f"fedcenters-coordinator serve '{folder / 'config.toml'}'"


def test_the_command_writes_it_into_the_runs_folder(two: list[Path]) -> None:
    done = CliRunner().invoke(app, ["report", str(two[0])])
    assert (done.exit_code, done.stdout.strip()) == (0, str(two[0] / "report.html"))
    assert "is replaced" not in done.stderr
    done = CliRunner().invoke(app, ["report", str(two[0]), "--json"])
    assert json.loads(done.stdout) == {"files": [str(two[0] / "report.html")]}
    assert f"{two[0] / 'report.html'} was there before, and is replaced" in done.stderr


def test_a_page_that_does_not_fit_on_the_disk_leaves_the_one_that_was_there(two: list[Path], tmp_path: Path) -> None:
    """It was cut, and a new one was empty; and an older one was told as replaced before anything was read."""
    old, new = tmp_path / "old.html", tmp_path / "new.html"
    old.write_text("before")
    for page in old, new:
        with files_of_at_most(9):
            done = CliRunner().invoke(app, ["report", str(two[0]), "--out", str(page)])
        assert (done.exit_code, "File too large" in done.stderr) == (FedcentersError.exit_code, True)
        assert "replaced" not in done.stderr
    done = CliRunner().invoke(app, ["report", str(tmp_path / "none"), "--out", str(old)])
    assert (done.exit_code, "replaced" in done.stderr) == (ConfigError.exit_code, False)
    assert (old.read_text(), new.exists()) == ("before", False)


def test_a_picture_of_what_is_no_demo_is_refused_before_the_page_is_written(two: list[Path], tmp_path: Path) -> None:
    picture = tmp_path / "x.png"
    for runs, said in (two[:1], "--picture is of a demo: "), (two, "--picture is of one demo, and here are 2 runs"):
        page = tmp_path / "page.html"
        asked = ["report", *map(str, runs), "--picture", str(picture), "--out", str(page)]
        done = CliRunner().invoke(app, asked)
        assert (done.exit_code, page.exists(), picture.exists()) == (2, False, False)
        assert said in done.stderr
        assert "hint: leave --picture out; `fedcenters-emulator figures RUN` draws" in done.stderr


def test_a_page_of_several_runs_is_beside_the_first_and_not_where_the_command_is_typed(
    two: list[Path], page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = CliRunner().invoke(app, ["report", *map(str, two)])
    assert (done.exit_code, done.stdout.strip()) == (0, str(two[0].parent / "report.html"))
    assert (two[0].parent / "report.html").read_text() == page
    assert list(Path().iterdir()) == []


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run: it has no metrics\.jsonl\n"):
        comparison.read_runs(tmp_path)
    with pytest.raises(ConfigError, match=r"nofolder does not exist\n"):
        comparison.read_runs(tmp_path / "nofolder")


def test_of_many_runs_all_that_were_interrupted_are_named_at_once(two: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a does not exist; .*b does not exist\n"):
        comparison.write_comparison([two[0], tmp_path / "a", two[1], tmp_path / "b"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_runs_over_the_same_fleet_are_ranked(page: str) -> None:
    assert "ends highest" in page
    assert "Not comparable" not in page


def test_runs_with_one_accuracy_are_equal(two: list[Path], tmp_path: Path) -> None:
    first = quickly_drawn(two[0], tmp_path)
    page = comparison.comparison_page([first, replace(first, name="again")])
    assert "ends highest" not in page
    assert "end equal, at" in page
    last = dict(first.rounds[-1])
    last["accuracy"] = {**last["accuracy"], "micro": last["accuracy"]["micro"] - 0.0004}
    page = comparison.comparison_page([first, replace(first, name="again", rounds=[*first.rounds[:-1], last])])
    assert "end less than 0.1 points apart, at" in page  # and not 0.0 points above


def test_runs_in_folders_of_one_name_are_named_by_their_paths(two: list[Path], tmp_path: Path) -> None:
    places = [tmp_path / "here" / "mine", tmp_path / "there" / "mine"]
    lines = []
    for run, place in zip(two, places, strict=True):
        place.mkdir(parents=True)
        lines.append(replace(comparison.read_runs(run)[0], name=place.name, folder=place))
    page = comparison.comparison_page(lines)
    assert "<th>setting</th><th>here/mine</th><th>there/mine</th>" in page
    assert page.count(">here/mine</text>") == page.count(">there/mine</text>") > 0
    assert "there/mine (FedAvg)" in page


def test_the_folder_in_which_one_stands_has_its_name(two: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two[0])
    assert [line.name for line in comparison.read_runs(Path())] == [two[0].name]


def test_runs_over_different_fleets_are_not_ranked(two: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    first = quickly_drawn(two[0], tmp_path / "empty")
    for other in (replace(ASKED, devices=5), replace(ASKED, seed=1), replace(ASKED, partition="iid")):
        run = Path(
            simulate_json(replace(other, out=tmp_path, name=f"{other.devices}-{other.seed}-{other.partition}"))["run"]
        )
        page = comparison.comparison_page([first, quickly_drawn(run, tmp_path / "empty")])
        assert "Not comparable: these runs have different fleets." in page
        assert "ends highest" not in page


def test_a_run_over_mqtt_is_over_the_fleet_of_a_simulated_one_where_names_and_samples_agree(two: list[Path]) -> None:
    first = comparison.read_runs(two[0])[0]
    joined = replace(first, fleet={who: [sum(counts)] for who, counts in first.fleet.items()}, settings={})
    assert first.has_fleet_of(joined)
    more = {**joined.fleet, "device-00": [sum(first.fleet["device-00"]) + 1]}
    assert not first.has_fleet_of(replace(joined, fleet=more))
    assert first.has_fleet_of(replace(joined, fleet=dict.fromkeys(first.fleet, ())))


def test_the_table_has_the_worst_and_the_median_device(two: list[Path], page: str) -> None:
    line = comparison.read_runs(two[0])[0]
    last = sorted(line.rounds[-1]["per_device"].values())
    assert line.percentile(0) == last[0]
    assert line.percentile(50) == pytest.approx((last[2] + last[3]) / 2)
    row = next(row for row in page.split("<tr>") if f">{line.name}<" in row)
    assert f"<td>{last[0]:.1%}</td>" in row


def test_a_device_that_did_not_answer_the_last_test_is_one_of_the_devices(two: list[Path], tmp_path: Path) -> None:
    """The table had 5 devices, beside "6 devices" of the same run."""
    line = quickly_drawn(two[0], tmp_path)
    *before, last = line.rounds
    tested = {who: accuracy for who, accuracy in last["per_device"].items() if who != "device-00"}
    head, row, *_ = table_of(
        comparison.comparison_page([replace(line, rounds=[*before, {**last, "per_device": tested}])])
    )
    assert row[head.index("devices")] == "6"


def test_runs_on_targets_that_are_no_classes_are_ranked_by_their_squared_error(tmp_path: Path) -> None:
    """The page said that none of them was tested."""
    asked = SimulateArgs(data_set="regression", devices=6, rounds=2, out=tmp_path)
    many = replace(asked, method="fesem", settings={"local-steps": 9, "clusters": 2})
    one = replace(asked, method="fedavg", settings={"local-steps": 1})
    found = {run["method"]: run for run in (simulate_json(many), simulate_json(one))}
    folders = [Path(found[name]["run"]) for name in ("fedavg", "fesem")]
    lines = [line for folder in folders for line in comparison.read_runs(folder)]
    least, most = sorted(lines, key=lambda line: found[str(line.rounds[0]["method"])]["metrics"]["squared_error"])
    errors = [f"{found[str(line.rounds[0]['method'])]['metrics']['squared_error']:.4g}" for line in (least, most)]
    page = comparison.comparison_page(lines)
    assert f"{least.name} ({least.method}) ends with the least squared error, {errors[0]}" in page
    assert f"the greatest has {most.name} ({most.method}), {errors[1]}." in page
    head, *rows = table_of(page)
    assert "squared_error" in head
    assert "F1, pooled" not in head
    assert [row[head.index("devices")] for row in rows[:2]] == ["6", "6"]
    shown = [row[head.index("squared_error")] for row in rows[:2]]
    assert shown == (errors[::-1] if lines[0] is most else errors)
    alone = comparison.comparison_page(lines[:1])
    assert f"{lines[0].method} ends with a squared error of " in alone
    assert "<svg" in alone


def test_runs_with_one_loss_of_the_users_own_are_ranked_by_it_and_with_several_by_none(tmp_path: Path) -> None:
    """Logits have no squared error to targets of 0 and 1 that says anything: it called the worse run better."""
    x = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
    data = (x, (x[:, :1] > 0).astype(np.float32))
    asked: dict[str, Any] = {"fleet": fc.fleet(data, by=np.repeat(["anna", "ben", "cleo"], 30)), "out": tmp_path}
    asked |= {"model": lambda: nn.Linear(4, 1), "rounds": 2, "progress": False}
    runs = [
        fc.simulate(fc.FedAvg(local_steps=steps), loss=loss, **asked)
        for steps, loss in ((1, nn.BCEWithLogitsLoss()), (30, nn.BCEWithLogitsLoss()), (1, nn.HuberLoss()))
    ]
    one, many, other = (comparison.read_runs(run.folder)[0] for run in runs if run.folder)
    told = [run.run.records[-1]["loss"]["micro"] for run in runs]
    page = comparison.comparison_page([one, many])
    assert f"{many.name} ({many.method}) ends with the least loss, {told[1]:.4g}" in page
    assert re.search(rf"<td>{told[0]:.4g}</td>", page)
    assert "ends with the least squared error" in comparison.comparison_page([one, other])
    unknown = [replace(line, rounds=[{**e, "metrics": {}} for e in line.rounds]) for line in (one, other)]
    assert comparison.OTHER_LOSSES in comparison.comparison_page(unknown)
