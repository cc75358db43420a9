from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from coordinator.cli import app, format_run_event
from coordinator.local_broker import Broker
from export.containers.installed_packages import check_installed
from tests.support.virtual_federation import Anything, Federation

CONFIG: dict[str, Any] = {
    "federation": "demo",
    "broker": "mqtt://127.0.0.1:1",
    "folder": "run",
    "model": {"name": "digits-mlp"},
    "runs": [{"method": "fedavg", "num-rounds": 1}],
}


def written(tmp_path: Path, **changes: Anything) -> str:
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(CONFIG | changes))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"brocker": "x"}, 3, "did you mean broker?"),
        ({"runs": [{"method": "fedavgg", "num-rounds": 1}]}, 2, "unknown method 'fedavgg'"),
        ({"runs": [{"method": "fedavg", "num-rounds": 1, "lr": 1}]}, 3, "fedavg has no setting 'lr'"),
        (
            {"runs": [{"method": "fedavg", "num-rounds": 1, "teach-newcomers": True}]},
            3,
            "teach-newcomers belongs at the top of the file, above [model]",
        ),
        (
            {"model": {"name": "digits-mlp", "exit-when-done": True}},
            3,
            "exit-when-done belongs at the top of the file, above [model]",
        ),
        ({"runs": [{"method": "fedavg", "num-rounds": 1, "batch-size": 8}]}, 3, "LiteRT's program is compiled for 16"),
        ({"folder": "/proc/nowhere"}, 3, "cannot write to /proc/nowhere"),
        ({"broker": "http://x"}, 3, "is not an MQTT address"),
        ({"certificate": "keys/coordinator.crt", "key": "keys/coordinator.key"}, 3, "fedcenters-coordinator provision"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_one_message_with_a_hint(
    tmp_path: Path, changes: dict[str, Any], code: int, message: str
) -> None:
    result = CliRunner().invoke(app, ["serve", written(tmp_path, **changes)])
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("module", "changes", "said"),
    [
        ("litert_torch", {}, "litert-torch is not installed: litert in `engines` needs it"),
        ("ai_edge_litert", {}, "; or leave litert out of `engines`"),
        ("onnxruntime", {"formats": []}, "onnxruntime is not installed: onnx in `engines` needs it"),
        (
            "ai_edge_litert",
            {"model": {"name": "digits-mlp", "engines": ["onnx"]}},
            "ai-edge-litert is not installed: tflite in `formats` needs it",
        ),
        ("torch", {}, "torch is not installed: onnx in `engines` needs it"),
    ],
)
def test_a_package_that_compiling_needs_is_missed_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, changes: dict[str, Any], said: str
) -> None:
    config = written(tmp_path, broker="embedded", **changes)
    monkeypatch.setitem(sys.modules, module, None)
    result = CliRunner().invoke(app, ["serve", config])
    assert (result.exit_code, result.stdout) == (3, "")
    assert said in result.stderr
    assert "hint: pip install -c constraints.txt '.[server]'" in result.stderr
    assert "broker" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_package_that_no_engine_or_format_of_the_configuration_needs_may_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "litert_torch", None)
    check_installed(["onnx", "pt2"], ["onnx"])


def test_without_arguments_it_shows_help_with_an_example() -> None:
    result = CliRunner().invoke(app, [])
    assert "example: fedcenters-coordinator serve" in result.output


def test_help_needs_nothing_heavy() -> None:
    code = "import sys, coordinator.cli; print([m for m in ('torch', 'numpy', 'paho', 'sklearn') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_status_prints_one_object_or_a_few_lines(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.start(4)
    fed.finish()
    fed.world.end()
    folder = str(fed.config.folder)
    assert json.loads(CliRunner().invoke(app, ["status", folder, "--json"]).stdout)["done"] is True
    assert "fesem (fesem): round 2/2, accuracy" in CliRunner().invoke(app, ["status", folder]).stdout
    assert CliRunner().invoke(app, ["status", str(tmp_path)]).exit_code == 3


@pytest.mark.broker
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_cleanly(tmp_path: Path, mosquitto: Broker, number: signal.Signals, code: int) -> None:
    config = written(tmp_path, broker=mosquitto.url, model={"name": "digits-mlp", "engines": ["onnx"]}, formats=[])
    command = [sys.executable, "-m", "coordinator", "serve", config]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert process.stderr is not None
    assert "leading demo, epoch 1" in process.stderr.readline()
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in rest


def test_every_event_reads_as_a_sentence(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.start(4)
    fed.finish()
    fed.world.end()
    sentences = [format_run_event(event) for event in fed.events]
    assert not [sentence for sentence in sentences if "{" in sentence]
    assert format_run_event({"event": "something new"}) == "{'event': 'something new'}"


@pytest.mark.parametrize(
    ("ends", "then"),
    [({}, "serving devices that ask for a center"), ({"ends": True}, "ending (exit-when-done)")],
)
def test_the_last_line_says_whether_it_goes_on(ends: dict[str, bool], then: str) -> None:
    assert format_run_event({"event": "done", "seconds": 84.943, **ends}) == f"done in 84.9 s; {then}"
    assert format_run_event({"event": "serving", **ends}) == f"all runs were done before; {then}"


def test_a_device_that_is_revoked_after_the_last_round_is_told_of_no_training() -> None:
    said = format_run_event({"event": "revoked", "device": "pump-7"})
    assert said.startswith("pump-7 was revoked")
    assert "training" not in said


def test_a_round_on_masked_sums_says_what_the_coordinator_sees_and_why_there_was_no_sum() -> None:
    secure = {"mode": "updates", "least_members": 5, "sees": "sums of 5 or more devices", "failed": ["too few devices"]}
    event = {"event": "round", "run": "ifca", "round": 1, "of": 2, "seconds": 1.0, "secure": secure}
    said = format_run_event(event | {"accuracy": {"micro": None, "macro": None}})
    assert said == (
        "ifca round 1/2: not evaluated; no sum: too few devices; the coordinator sees sums of 5 or more devices, 1.0 s"
    )


def test_a_round_names_the_devices_without_an_answer_that_counts() -> None:
    event = {"event": "round", "run": "r", "round": 2, "of": 5, "seconds": 6.3, "accuracy": {"micro": 0.5}}
    assert format_run_event(event) == "r round 2/5: accuracy 50.0%, 6.3 s"
    refused = {f"d{i}": "late" for i in range(4)}
    said = format_run_event({**event, "silent": [f"e{i}" for i in range(7)], "refused": refused})
    assert said == (
        "r round 2/5: accuracy 50.0%, 6.3 s; no answer from e0, e1, e2, e3, e4 and 2 more; "
        "did not count: d0 (late), d1 (late) and 2 more"
    )


@pytest.mark.parametrize(("rounds", "words"), [(1, "1 round"), (20, "20 rounds")])
def test_a_run_that_is_done_counts_its_rounds(rounds: int, words: str) -> None:
    assert format_run_event({"event": "run-done", "run": "fesem", "rounds": rounds}) == f"fesem is done after {words}"


def test_a_device_that_does_not_train_is_told_as_no_fault() -> None:
    """A phone before *Take part*, and a device that only asks for its center, may hold many samples."""
    assert format_run_event({"event": "joined", "device": "web-0000", "engine": "onnx", "n": 0}) == (
        "web-0000 is connected: onnx; it is not in the training"
    )


@pytest.mark.parametrize(
    ("when", "more"),
    [
        ({}, ""),
        ({"takes_part": "next-round"}, "; it takes part from the next round"),
        ({"takes_part": "no"}, "; training is over, and it can ask for a center"),
    ],
)
def test_a_phone_that_takes_part_has_a_line_of_its_own(when: dict[str, str], more: str) -> None:
    event = {"event": "offers", "device": "web-0000", "engine": "onnx", "n": 20, **when}
    assert format_run_event(event) == f"web-0000 offers 20 samples for training{more}"
