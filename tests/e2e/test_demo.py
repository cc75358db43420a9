"""`fedcenters-emulator demo`: the whole chain on this machine, on the embedded broker, and left half-way on mosquitto.

That both brokers lead to the same numbers is held by tests/emulator/testbed/test_simulate_over_mqtt.py (embedded) and
tests/e2e/test_kept_models.py (mosquitto), which compare with a run in one process, and that new devices find their
center over mosquitto by tests/e2e/test_newcomer.py. A whole demo takes half a minute of CPU time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.local_broker import find_mosquitto
from export.bundle.reader import read_bundle
from tests.support.patience import patience

PATIENCE_S = patience(400)


@dataclass(frozen=True)
class Played:
    """A demo that has ended: its folder for everything, the exit code, and what it said."""

    home: Path
    code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        """The JSON object."""
        found: dict[str, Any] = json.loads(self.stdout)
        return found

    @property
    def run(self) -> Path:
        """The run's own folder."""
        (folder,) = (self.home / "runs").iterdir()
        return folder


@contextmanager
def demo(home: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A demo that writes only below `home`; killed if a test leaves it running."""
    (home / "tmp").mkdir(parents=True)
    env = os.environ | {
        "TMPDIR": str(home / "tmp"),
        "MPLCONFIGDIR": str(home / "mpl"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    command = [sys.executable, "-m", "emulator", "demo", "--json", "--out", str(home / "runs"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def played(home: Path, *options: str) -> Played:
    with demo(home, *options) as process:
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return Played(home, process.returncode, stdout, stderr)


def left_running(home: Path) -> list[Sequence[str]]:
    """Command lines of processes that work in `home`."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(str(home) in word for word in line)]


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The first demo compiles its model, as a user's does: nothing is left for it by an earlier test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCENTERS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """One demo on the broker that every user has."""
    return played(tmp_path_factory.mktemp("demo"), "--broker", "embedded")


def test_it_succeeds_and_prints_exactly_one_json_object_with_the_promised_fields(finished: Played) -> None:
    assert finished.code == 0, finished.stderr
    assert finished.stdout.count("\n") == 1
    assert shape(finished.result) == {
        "method": str,
        "devices": int,
        "rounds": int,
        "clusters": int,
        "ari": float,
        "accuracy": {"centers": float, "global": float},
        "new_devices": {"asked": int, "right": int, "accuracy": float},
        "parity": {"onnx": float, "tflite": float},
        "parity_values": int,
        "engines": {"onnx": int, "litert": int, "torch": int},
        "bytes": {"down": int, "up": int},
        "seconds": float,
        "run": str,
    }


def shape(value: object) -> object:
    return {key: shape(inner) for key, inner in value.items()} if isinstance(value, Mapping) else type(value)


def test_the_hidden_groups_are_found_and_their_centers_beat_one_global_model(finished: Played) -> None:
    found = finished.result
    assert (found["method"], found["devices"], found["clusters"], found["ari"]) == ("fesem", 12, 3, 1.0)
    assert found["accuracy"]["centers"] >= found["accuracy"]["global"] + 0.15
    assert min(found["bytes"].values()) > 0


def test_half_the_devices_trained_with_onnx_and_a_quarter_each_with_litert_and_torch(finished: Played) -> None:
    assert finished.result["engines"] == {"onnx": 6, "litert": 3, "torch": 3}


def test_three_new_devices_find_their_center_and_run_its_file(finished: Played) -> None:
    new = finished.result["new_devices"]
    assert (new["asked"], new["right"]) == (3, 3)
    assert new["accuracy"] > finished.result["accuracy"]["global"]
    served = [json.loads(line) for line in (finished.run / "metrics.jsonl").read_text().splitlines()]
    assert {event["format"] for event in served if event["event"] == "served"} == {"onnx", "tflite"}


def test_the_exported_files_compute_what_torch_computes(finished: Played) -> None:
    assert max(finished.result["parity"].values()) <= 1e-4
    assert len(read_bundle(finished.run / "bundle").manifest["centers"]) == 3


def test_the_run_folder_holds_what_was_promised_and_nothing_else_is_left(finished: Played) -> None:
    assert finished.result["run"] == str(finished.run)
    names = {path.name for path in finished.run.iterdir()}
    assert names >= {"metrics.jsonl", "config.toml", "centers", "bundle", "report.html"}
    assert not [name for name in names if name.startswith(".") or name == "logs"]
    assert list((finished.home / "tmp").iterdir()) == []
    assert left_running(finished.home) == []


def test_it_talks_on_stderr_from_the_first_moment_without_colours(finished: Played) -> None:
    lines = finished.stderr.splitlines()
    begins = "0.0 s  12 devices, 3 hidden groups, one coordinator, over MQTT on this machine; times since the command"
    assert lines[0].strip() == begins
    steps = [
        "reading the digits",
        "devices start; the coordinator compiles",
        "exporting",
        "3 new devices start",
        "drawing",
    ]
    told = [next(i for i, line in enumerate(lines) if step in line) for step in steps]
    assert told == sorted(told)
    assert sum("FeSEM round" in line for line in lines) == finished.result["rounds"]
    assert "\x1b" not in finished.stderr
    assert "embedded listens" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("moment", ["12 devices", "write their labels", "FeSEM round 2/"])
def test_ctrl_c_leaves_no_process_keeps_what_was_done_and_says_130(moment: str, tmp_path: Path) -> None:
    """It runs on mosquitto where that is installed."""
    home, said = tmp_path / "home", list[str]()
    with demo(home) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if moment in line:
                break
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, "".join(said) + stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert left_running(home) == []
    assert list((home / "tmp").iterdir()) == []
    kept = list((home / "runs").glob("*/metrics.jsonl"))
    assert all(f"what was done is kept in {path.parent}" in stderr for path in kept)
    if "round" in moment:
        broker = "embedded" if find_mosquitto() is None else "mosquitto"
        assert any(f"{broker} listens" in line for line in said)
        assert len(kept) == 1
        assert '"round":1' in kept[0].read_text()
    assert list((home / "runs").glob("*/.work")) == []
