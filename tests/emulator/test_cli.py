"""The command line: data on stdout, talk on stderr, one line and a hint for what goes wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from coordinator.models.members import MODEL_NAMES
from edge_client.errors import FedcentersError
from emulator import console
from emulator.cli import app
from emulator.config import parse_pairs
from emulator.options import OPTIONS
from tests.support import finished_run
from tests.support.size_limit import files_of_at_most

RUNNER = CliRunner()


def test_sigterm_as_of_a_scheduler_ends_a_run_with_what_is_kept_and_how_to_go_on(tmp_path: Path) -> None:
    """It ended without a word: the log of a job of SLURM that was cancelled said nothing.

    Nor did Ctrl-C while a round's line was printed.
    """
    command = [sys.executable, "-m", "emulator", "simulate", "--devices", "4", "--rounds", "100000"]
    with subprocess.Popen([*command, "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("round 2/100000: " in line for line in process.stderr)  # then the first one's checkpoint is there
        process.terminate()
        told = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert f"Go on with: fedcenters-emulator simulate {tmp_path}" in told


def test_simulate_prints_one_json_object_with_the_promised_fields(tmp_path: Path) -> None:
    asked = ["simulate", "--method", "fesem", "--data-set", "digits", "--devices", "6", "--rounds", "2", "--json"]
    done = RUNNER.invoke(app, [*asked, "--out", str(tmp_path), "-c", "local-steps=10"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found) >= {
        "method",
        "rounds",
        "devices",
        "clusters",
        "accuracy",
        "f1_of_devices",
        "f1_pooled",
        "ari",
        "seconds",
        "run",
    }
    assert (found["method"], found["rounds"], found["devices"], found["clusters"]) == ("fesem", 2, 6, 3)
    assert set(found["accuracy"]) == set(found["centers_accuracy"]) == {"micro", "macro"}
    assert len((Path(found["run"]) / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["simulate", "--method", "fesam"], 2, "did you mean 'fesem'"),
        (["simulate", "--data-set", "digit"], 2, "digits"),
        (["simulate", "-c", "local-stepps=3"], 3, "did you mean 'local-steps'"),
        (["simulate", "-c", "local-steps"], 2, "write it as -c"),
        (["simulate", "-c", "devices=0"], 2, "use at least 1"),
        (["simulate", "--engine", "caffe"], 2, "onnx"),
        (["demo", "--broker", "rabbit"], 2, "hint: use one of"),
        (["demo", "--broker", "mqtt://127.0.0.1:1"], 4, "no broker answers"),
        (["report", "nowhere"], 3, "hint: pass a folder"),
        (["figures", "nowhere"], 3, "hint: pass a folder"),
        (["simulate", "--partition", "dirichlett"], 2, "did you mean 'dirichlet'"),
        (["simulate", "--data-set", "mnist", "--data", "nowhere"], 3, "train-images"),
        (["experiment", "wecfl-table9"], 2, "wecfl-table2"),
        (["experiment", "wecfl-table2", "--only", "fesam"], 2, "fesem"),
    ],
)
def test_a_mistake_gets_a_line_a_hint_and_an_exit_code(
    arguments: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == code
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "RUN", "--out", "nope/x.html"], "there is no folder nope\n\nhint: make it with mkdir -p nope"),
        (["report", "RUN", "--picture", "nope/x.png"], "there is no folder nope"),
        (["report", "RUN", "--picture", "x.txt"], "x.txt ends with neither"),
        (["report", "RUN", "--out", "RUN"], "run is a folder\n\nhint: name a file in it"),
        (["figures", "RUN", "--out", "file/figures"], "file is no folder"),
        (["choose-k", "--picture", "nope/x.png"], "there is no folder nope"),
        (["experiment", "ifca-starts", "--write", "nope/x.md"], "there is no folder nope"),
        (["experiment", "ifca-starts", "--summary", "--write", "nope/x.md"], "there is no folder nope"),
        (["experiment", "ifca-starts", "--picture", "nope/x.svg"], "there is no folder nope"),
        (["experiment", "ifca-starts", "--out", "file"], "file is no folder"),
        (["demo", "--out", "file/runs"], "file is no folder"),
        (["simulate", "--out", "file/runs"], "cannot write to file/runs"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finished_run.write_demo_run(tmp_path / "run")
    Path("file").write_text("no folder")
    done = RUNNER.invoke(app, ["run" if word == "RUN" else word for word in arguments])
    assert done.exit_code == 2, done.stderr
    assert f"error: {said}" in done.stderr
    assert "drawing" not in done.stderr  # nor was anything else begun
    assert not [line for line in done.stderr.splitlines() if "round" in line]


@pytest.mark.parametrize("command", [["simulate"], ["choose-k", "--most", "2"], ["simulate", "--broker", "auto"]])
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--engine", "caffe"], "engine 'caffe'"),
        (["--model", "digits-mpl"], "unknown model 'digits-mpl'\n\nhint: did you mean 'digits-mlp'?"),
        (["--model", "digits-mlp+nope"], "unknown model 'nope'"),
    ],
)
def test_an_unknown_engine_or_model_is_told_before_samples_are_read(
    command: list[str], asked: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = RUNNER.invoke(app, [*command, *asked, "--data-set", "mnist", "--data", "nowhere"])
    assert done.exit_code == 2, done.stderr
    assert said in done.stderr


def test_the_names_of_models_that_need_no_torch_are_those_that_there_are() -> None:
    from coordinator.models.registry import MODELS

    assert tuple(MODELS) == MODEL_NAMES


def test_every_row_of_the_table_with_a_flag_is_an_option_of_the_command() -> None:
    command: Any = typer.main.get_command(app)
    shown = {flag: p.help for p in command.commands["simulate"].params for flag in p.opts if flag.startswith("-")}
    flags = {f"--{row.name.replace('_', '-')}": row for row in OPTIONS.values() if row.flag}
    assert set(shown) - set(flags) == {"--clusters", "-c", "--resume", "--json"}
    assert all(row.help in shown[flag] for flag, row in flags.items())


def test_long_commands_say_what_they_do_from_their_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "REPEAT_INTERVAL_S", 0.0)  # each part of the work is a line
    monkeypatch.setattr(console.Repeater, "_run", lambda _: None)  # and none is repeated

    def said(*arguments: str) -> list[str]:
        done = RUNNER.invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return list(dict.fromkeys(line.split(" s  ")[1].removeprefix("... ") for line in done.stderr.splitlines()))

    run, fleet = str(tmp_path / "run"), ("--devices", "3", "-c", "local-steps=1")
    told = said("simulate", *fleet, "--rounds", "2", "--out", str(tmp_path), "--name", "run")
    parts = ["reading the data", "preparing the model for 3 devices", "round 1/2 is running", "round 2/2 is running"]
    assert [line for line in told if line in parts] == parts
    assert told[1] == parts[0]
    assert told[-1] == "writing the run's folder"
    told = said("choose-k", *fleet, "--rounds", "1", "--most", "2", "--picture", str(tmp_path / "k.png"))
    parts = ["reading the data", "preparing the model for 3 devices"]
    parts += [f"trial {number}/2: round 1/1 is running" for number in (1, 2)]
    assert [line for line in told if line in parts] == parts
    assert told[-1] == f"drawing {tmp_path}/k.png"
    assert said("report", run, "--out", f"{run}.html") == [f"reading {run}", f"drawing {run}.html"]
    told = said("figures", run)
    assert told[:2] == [f"reading {run}", "drawing labels.png"]
    assert "drawing images.png" in told


def test_report_writes_the_page_and_the_picture(tmp_path: Path) -> None:
    folder = finished_run.write_demo_run(tmp_path / "run")
    done = RUNNER.invoke(app, ["report", str(folder), "--picture", str(tmp_path / "readme.png")])
    assert done.exit_code == 0
    assert done.stdout.split() == [str(folder / "report.html"), str(tmp_path / "readme.png")]


def test_a_page_of_a_demo_that_does_not_fit_on_the_disk_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    run, page = finished_run.write_demo_run(tmp_path / "run"), tmp_path / "run" / "report.html"
    page.write_text("before")
    with files_of_at_most(9):
        done = RUNNER.invoke(app, ["report", str(run)])
    assert (done.exit_code, page.read_text()) == (FedcentersError.exit_code, "before")


def test_a_configuration_that_does_not_fit_on_the_disk_is_not_there(tmp_path: Path) -> None:
    """An empty file was, which the next `init` refused, and from which `simulate` played a run of defaults."""
    told = []
    for size in (100, 1_000_000):
        with files_of_at_most(size):
            told.append(CliRunner().invoke(app, ["init", str(tmp_path / "run.toml"), "--method", "fesem"]))
    assert [result.exit_code for result in told] == [2, 0]
    assert "run.toml: File too large" in told[0].stderr
    assert "clusters" in (tmp_path / "run.toml").read_text()


def test_help_loads_neither_torch_nor_matplotlib() -> None:
    code = "import sys, emulator.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not set(loaded) & {"torch", "matplotlib", "sklearn", "onnxruntime", "coordinator.runtime.server"}


def test_settings_keep_their_text_until_the_method_reads_them() -> None:
    assert parse_pairs(["lam=0.1", "e-step=k-means", "x=a=b"]) == {"lam": "0.1", "e-step": "k-means", "x": "a=b"}


def test_a_bug_is_shown_whole_and_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Path:
        raise ZeroDivisionError

    monkeypatch.setattr("emulator.reports.comparison.write_comparison", broken)
    done = RUNNER.invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 70
    assert "ZeroDivisionError" in done.stderr
    assert "hint: please report" in done.stderr
