"""`simulate --broker`: the same question over MQTT has the same answer, and leaves nothing but its folder."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from typer.testing import CliRunner

from edge_client.protocol.topics import check_federation
from emulator.cli import app
from emulator.config import CONFIG_FILE as ASKED
from emulator.config import make_args, read_table
from emulator.console import ConsoleProgress
from emulator.options import OPTIONS
from emulator.reports import comparison
from emulator.simulate import simulate_json
from emulator.testbed import simulate_over_mqtt as over_mqtt
from emulator.testbed.simulate_over_mqtt import VIRTUAL_ONLY, federation_name
from tests.support.patience import patience

PATIENCE_S = patience(400)
ROOT = Path(__file__).resolve().parents[3]
QUESTION = ("--data-set", "digits", "--devices", "4", "--rounds", "2", "-c", "local-steps=2", "--engine", "onnx")


@contextmanager
def started(home: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run that writes only below `home`; killed if a test leaves it running."""
    (home / "tmp").mkdir(parents=True)
    env = os.environ | {"TMPDIR": str(home / "tmp"), "PYTHONPATH": str(ROOT)}
    where = ("--broker", "embedded", "--json", "--out", str(home / "runs"))
    command = [sys.executable, "-m", "emulator", "simulate", *QUESTION, *where, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def processes(home: Path, word: str = "") -> list[psutil.Process]:
    """Those that work in `home`, with `word` in their command line."""
    lines = {process: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return [process for process, line in lines.items() if str(home) in " ".join(line) and word in " ".join(line)]


def rounds(folder: Path) -> list[dict[str, Any]]:
    """What the records of a run's rounds say of its devices and centers."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    keys = ("round", "of", "assignment", "per_device", "per_center", "accuracy", "f1_of_devices", "f1_pooled", "loss")
    return [{key: line.get(key) for key in keys} for line in lines if line["event"] == "round"]


def centers(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "centers").rglob("*.safetensors")}


def test_runs_in_folders_of_other_names_have_federations_of_their_own() -> None:
    long = "fesem-digits-by-label-of-forty-devices"
    names = ["digits", "Digits", "digits_1", "digits-1", f"{long}-1", f"{long}-2", "\udcff"]
    found = [federation_name(name) for name in names]
    assert len(set(map(check_federation, found))) == len(names)
    assert found[0] == "digits"


@pytest.mark.parametrize("method", ["fesem", pytest.param("fedsoft", marks=pytest.mark.slow)])
def test_over_mqtt_the_devices_end_where_they_end_in_one_process(method: str, tmp_path: Path) -> None:
    with started(tmp_path / "mqtt", "--method", method) as process:
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    assert "compiled for ONNX Runtime and torch" in stderr
    assert "exported" not in stderr
    real = json.loads(stdout)
    folder = Path(real["run"])
    asked_again = read_table(folder / ASKED)
    assert asked_again.pop("broker") == "embedded"
    virtual = simulate_json(make_args(asked_again, {"out": tmp_path / "here"}))
    elsewhere = {"seconds", "virtual_seconds", "run"}
    assert virtual.keys() - real.keys() == {"virtual_seconds"}
    assert {key: real[key] for key in real.keys() - elsewhere} == {key: virtual[key] for key in real.keys() - elsewhere}
    assert rounds(folder) == rounds(Path(str(virtual["run"])))
    assert centers(folder) == centers(Path(str(virtual["run"]))) != {}
    (line,) = comparison.read_runs(folder)
    assert line.ari == pytest.approx(real["ari"])
    assert {path.name for path in folder.iterdir()} >= {"config.toml", "metrics.jsonl", "centers", "store", ASKED}
    assert_nothing_is_left(tmp_path / "mqtt")


@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        ({"data-set": "regression", "devices": 4}, {"metrics"}),
        ({"data-set": "digits", "devices": 6, "secure": "updates", "privacy-noise": 1.0}, {"secure", "privacy"}),
    ],
)
def test_over_mqtt_the_command_tells_of_a_record_what_it_tells_in_one_process(
    asked: dict[str, Any], keys: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left out what the server sees of a run on sums, and the squared error of targets that are no classes."""
    common = {"method": "fedavg", "num-rounds": 1, "local-steps": 1, "out": tmp_path, **asked}
    virtual = simulate_json(make_args(common))
    lines = (Path(str(virtual["run"])) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records, told = [json.loads(line) for line in lines], list[dict[str, Any]]()

    def run(*parts: object) -> None:
        cast("Callable[..., None]", parts[-1])(tmp_path, records)

    monkeypatch.setattr(over_mqtt, "run_over_mqtt", run)
    progress = ConsoleProgress(stream=io.StringIO())
    over_mqtt.simulate_over_mqtt(make_args(common, {"broker": "embedded"}), progress, told.append)
    assert keys < virtual.keys()
    assert virtual.keys() - told[0].keys() == {"virtual_seconds"}
    assert {key: told[0][key] for key in keys} == {key: virtual[key] for key in keys}


def assert_nothing_is_left(home: Path) -> None:
    assert processes(home) == []
    assert list((home / "tmp").iterdir()) == []
    assert list(home.glob("runs/*/.work")) == []


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--profiles", "kinds.toml"), 2, "leave profiles out"),
        (("--ray", "auto"), 2, "leave ray out"),
        (("--workers", "2"), 2, "leave workers out"),
        (("--hostile", "sign-flip:0.2"), 2, "leave hostile out"),
        (("-c", "checkpoint-every=5"), 2, "leave checkpoint-every out"),
        (("--resume",), 2, "leave --resume out"),
        (("--engine", "lean"), 2, "use one of onnx, litert, pt2"),
        (("--engine", "caffe"), 2, "use one of onnx, litert, pt2"),
        (("--devices", "201"), 2, "fedcenters-emulator fleet"),
        (("--broker", "rabbit"), 2, "use one of auto, mosquitto, embedded"),
        (("--broker", "mqtt://127.0.0.1:1"), 4, "start it, or leave --broker out"),
        (("--codec", "f8"), 3, "use some of: f32, f16, i8"),
        (("--method", "fedavg", "-c", "secure=updates", "-c", "fraction-train=0.1"), 3, "set fraction-train to"),
        (("--method", "fedavg", "-c", "secure=updates", "--fraction-evaluate", "0.1"), 3, "set fraction-evaluate to"),
        (("--method", "fedavg", "-c", "secure=updates", "-c", "least-members=2"), 3, "set least-members to 5"),
    ],
)
def test_what_cannot_be_played_is_refused_with_what_to_do_and_leaves_nothing(
    options: Sequence[str], code: int, said: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["simulate", "--broker", "embedded", "--out", str(tmp_path / "runs"), *options])
    assert done.exit_code == code, done.stderr
    assert said in done.stderr.split("hint: ")[-1]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("runs/*")) == []


def test_a_name_that_is_taken_is_refused_and_the_run_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    options = ["--broker", "embedded", "--out", str(tmp_path), "--name", "mine"]
    done = CliRunner().invoke(app, ["simulate", *options])
    assert (done.exit_code, "choose another --name" in done.stderr) == (2, True)
    assert (tmp_path / "mine").is_dir()


def test_what_says_nothing_over_mqtt_is_a_key_of_a_run() -> None:
    assert set(VIRTUAL_ONLY) < set(OPTIONS)


def test_a_device_process_that_dies_ends_the_run_and_its_words_are_kept(tmp_path: Path) -> None:
    with started(tmp_path / "home", "--rounds", "1000") as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "FeSEM round 1/" in line)
        (devices,) = processes(tmp_path / "home", "emulator.testbed.threaded_fleet")
        devices.kill()
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (70, "")
    assert "devices-onnx was killed by SIGKILL" in stderr
    assert "hint: the logs folder" in stderr
    (folder,) = (tmp_path / "home" / "runs").iterdir()
    assert {path.name for path in (folder / "logs").iterdir()} == {"coordinator.log", "devices-onnx.log"}
    assert_nothing_is_left(tmp_path / "home")


def test_a_model_that_only_the_coordinator_can_refuse_is_refused_in_its_words(tmp_path: Path) -> None:
    with started(tmp_path / "home", "--model", "digits-mpl") as process:
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (2, "")
    assert "unknown model 'digits-mpl'" in stderr
    assert_nothing_is_left(tmp_path / "home")


@pytest.mark.parametrize("moment", ["embedded listens", "FeSEM round 1/"])
def test_after_a_signal_there_is_no_process_and_it_says_what_is_kept(moment: str, tmp_path: Path) -> None:
    with started(tmp_path / "home", "--rounds", "1000") as process:
        assert process.stderr is not None
        next(line for line in process.stderr if moment in line)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (128 + signal.SIGTERM, ""), stderr
    assert "Traceback" not in stderr
    kept = list((tmp_path / "home" / "runs").iterdir())
    if "round" in moment:
        assert kept == [tmp_path / "home" / "runs" / "mqtt-fesem-0"]
    assert all(f"what was done is kept in {folder}" in stderr for folder in kept)
    assert_nothing_is_left(tmp_path / "home")


@pytest.mark.broker
def test_a_run_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    """The coordinator and mosquitto went on."""
    with started(tmp_path / "home", "--rounds", "1000", "--broker", "mosquitto") as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "FeSEM round 1/" in line)
        left = [each for each in processes(tmp_path / "home") if each.pid != process.pid]
        process.kill()
    _, alive = psutil.wait_procs(left, timeout=PATIENCE_S)
    names = [each.cmdline() for each in alive]
    for each in alive:
        each.kill()
    assert (len(left), names) == (4, [])  # the coordinator, mosquitto and its watch, the devices
