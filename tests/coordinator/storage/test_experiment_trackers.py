"""Trackers are told the numbers of rounds, and only when asked for. Their own readers read them back."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from coordinator.storage import experiment_trackers
from coordinator.storage.experiment_trackers import Tracker, numeric_fields, open_trackers
from edge_client.errors import ConfigError, NetworkError
from tests.support.patience import patience
from tests.support.ports import free_port

PATIENCE_S = patience(60)


def round_event(number: int, accuracy: float) -> dict[str, Any]:
    return {
        "event": "round",
        "run": "fesem",
        "round": number,
        "accuracy": {"micro": accuracy, "macro": None},
        "per_center": [0.5, None, 0.75],
        "loss_per_center": [1.5],
        "bytes": {"down": 10, "up": 4},
        "assignment": {"device-00": 1},
        "seconds": 2.5,
    }


def scrape(port: int, name: str, value: float) -> str:
    """What Prometheus reads, once a line that begins with `name` has this value."""
    while True:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S).read().decode()
        if any(line.startswith(name) and line.endswith(f" {float(value)}") for line in text.splitlines()):
            return str(text)


def test_a_round_in_numbers_leaves_out_devices_and_what_is_unknown() -> None:
    assert numeric_fields(round_event(1, 0.25)) == {
        "accuracy/micro": 0.25,
        "bytes/down": 10.0,
        "bytes/up": 4.0,
        "center_accuracy/0": 0.5,
        "center_accuracy/2": 0.75,
        "center_loss/0": 1.5,
        "seconds": 2.5,
    }


def test_scores_beside_accuracy_and_metrics_of_ones_own_are_told() -> None:
    """A regression, which has no accuracy, had its loss alone there. MLflow refuses a whole round for one odd name."""
    scores = {"r2": {"micro": 0.5, "macro": None, "per_device": {"a": 0.5}}, "top 5 (%)": {"micro": 2, "macro": 3}}
    told = numeric_fields({"event": "round", "run": "fesem", "round": 1, "seconds": 1, "metrics": scores})
    assert told == {"r2/micro": 0.5, "top 5 ___/micro": 2.0, "top 5 ___/macro": 3.0, "seconds": 1.0}


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files of one process and second are read in the order of their numbers as texts, so 10 before 9."""
    pytest.importorskip("tensorboard")
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.mark.usefixtures("tensorboard")
def test_tensorboards_own_reader_finds_every_round(tmp_path: Path) -> None:
    with open_trackers("tensorboard", tmp_path, {}) as tell:
        tell({"event": "start"})
        tell(round_event(1, 0.25))
    with open_trackers("tensorboard", tmp_path, {}) as tell:  # it goes on
        tell(round_event(2, 0.5))
    assert tensorboard_has(tmp_path) == [(1, 0.25), (2, 0.5)]


@pytest.mark.usefixtures("tensorboard")
def test_a_run_that_begins_anew_replaces_its_rounds_in_tensorboard(tmp_path: Path) -> None:
    """Each round was there twice, so that the curves went back and forth."""
    for accuracy in (0.25, 0.75):
        with open_trackers("tensorboard", tmp_path, {}) as tell:
            tell(round_event(1, accuracy))
    assert tensorboard_has(tmp_path) == [(1, 0.75)]


@pytest.mark.usefixtures("tensorboard")
def test_rounds_that_are_played_again_from_an_earlier_checkpoint_are_once_in_tensorboard(tmp_path: Path) -> None:
    for rounds in ((1, 2, 3), (2, 3, 4)):
        with open_trackers("tensorboard", tmp_path, {}) as tell:
            for number in rounds:
                tell(round_event(number, number / 8))
    assert tensorboard_has(tmp_path) == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]


def tensorboard_has(folder: Path) -> list[tuple[int, float]]:
    """Step and accuracy, as TensorBoard's own reader finds them."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    reader = EventAccumulator(str(folder / "tensorboard" / "fesem"))
    reader.Reload()
    return [(e.step, float(make_ndarray(e.tensor_proto))) for e in reader.Tensors("accuracy/micro")]


def test_mlflow_has_the_rounds_and_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = pytest.importorskip("mlflow.tracking")
    with open_trackers("mlflow:mine", tmp_path, {"method": "fesem"}) as tell:
        tell(round_event(1, 0.25))
        tell(round_event(2, 0.5))
    client = tracking.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    history = client.get_metric_history(run.info.run_id, "accuracy/micro")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5)]
    assert (run.data.params["method"], run.info.status) == ("fesem", "FINISHED")


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401 - a client of mlflow
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return pytest.importorskip("mlflow.tracking").MlflowClient()


def steps_in_mlflow(client: Any) -> list[list[int]]:  # noqa: ANN401
    """The rounds of each run of the experiment, the first run first."""
    runs = client.search_runs([client.get_experiment_by_name("mine").experiment_id], order_by=["start_time"])
    assert {run.info.status for run in runs} == {"FINISHED"}
    return [[m.step for m in client.get_metric_history(run.info.run_id, "accuracy/micro")] for run in runs]


def play_with_mlflow(folder: Path, *rounds: int) -> None:
    with open_trackers("mlflow:mine", folder, {"num-rounds": rounds[-1]}) as tell:
        for number in rounds:
            tell(round_event(number, 0.5))


def test_a_run_that_goes_on_is_one_run_of_mlflow(tmp_path: Path, mlflow: Any) -> None:  # noqa: ANN401
    play_with_mlflow(tmp_path, 1, 2, 3)
    play_with_mlflow(tmp_path, 2, 3, 4)  # from the checkpoint of round 1
    assert steps_in_mlflow(mlflow) == [[1, 2, 3, 4]]
    play_with_mlflow(tmp_path, 1, 2)  # begun anew
    assert steps_in_mlflow(mlflow) == [[1, 2, 3, 4], [1, 2]]


@pytest.mark.parametrize("lost", ["deleted", "damaged", "elsewhere"])
def test_a_run_whose_beginning_mlflow_does_not_have_gets_a_new_one(tmp_path: Path, mlflow: Any, lost: str) -> None:  # noqa: ANN401
    play_with_mlflow(tmp_path, 1, 2)
    kept = tmp_path / "mlflow.json"
    if lost == "deleted":
        mlflow.delete_run(json.loads(kept.read_text())["fesem"])
    else:
        kept.write_text("{" if lost == "damaged" else json.dumps({"fesem": "0" * 32}))
    play_with_mlflow(tmp_path, 3)
    assert steps_in_mlflow(mlflow)[-1] == [3]


def test_a_folder_that_cannot_be_written_does_not_make_a_run_of_each_round(
    tmp_path: Path,
    mlflow: Any,  # noqa: ANN401
    caplog: pytest.LogCaptureFixture,
) -> None:
    play_with_mlflow(tmp_path / "gone", 1, 2)
    assert steps_in_mlflow(mlflow) == [[1, 2]]
    assert [record.getMessage().partition("mlflow.json ")[2][:17] for record in caplog.records] == ["cannot be written"]


def test_prometheus_reads_the_last_round_until_the_run_ends(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    with open_trackers(f"prometheus:{port}", tmp_path, {}) as tell:
        tell(round_event(1, 0.25))
        tell(round_event(2, 0.5))
        text = scrape(port, "fedcenters_round{", 2)
        with pytest.raises(NetworkError, match="cannot listen"), open_trackers(f"prometheus:{port}", tmp_path, {}):
            pass
    assert 'fedcenters_round_value{name="accuracy/micro",run="fesem"} 0.5' in text
    assert 'fedcenters_round{run="fesem"} 2.0' in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=PATIENCE_S)


def test_prometheus_at_a_port_that_is_none_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with pytest.raises(ConfigError, match="prometheus:94640"), open_trackers("prometheus:94640", tmp_path, {}):
        pass


def test_prometheus_forgets_centers_that_are_no_more_and_keeps_the_scores_of_the_last_test(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    with open_trackers(f"prometheus:{port}", tmp_path, {}) as tell:
        tell({**round_event(1, 0.25), "per_center": [0.1, 0.2, 0.3]})
        tell({**round_event(2, 0.5), "per_center": [0.4, 0.6]})
        tell(
            {
                "event": "round",
                "run": "fesem",
                "round": 3,
                "accuracy": {"micro": None},
                "per_center": [],
                "seconds": 1.5,
            }
        )
        text = scrape(port, "fedcenters_round{", 3)
    found = {line.split('"')[1]: float(line.split()[-1]) for line in text.splitlines() if "round_value{" in line}
    assert {name: found.get(name) for name in ("accuracy/micro", "seconds", "center_accuracy/1")} == {
        "accuracy/micro": 0.5,
        "seconds": 1.5,
        "center_accuracy/1": 0.6,
    }
    assert "center_accuracy/2" not in found


class ScriptedTracker(Tracker):
    """Fails in the rounds of `refused`, and waits in round 1 until `go`."""

    refused: tuple[int, ...] = ()

    def __init__(self, *_: object) -> None:
        self.go, self.entered, self.taken = threading.Event(), threading.Event(), list[int]()
        made.append(self)

    def log_round(self, _run: str, step: int, _numbers: object) -> None:
        self.entered.set()
        if step == 1:
            self.go.wait()
        if step in self.refused:
            raise OSError("no server")
        self.taken.append(step)

    def close(self) -> None:
        self.taken.append(0)


class BrokenTracker(ScriptedTracker):
    refused = (2, 3)


made: list[ScriptedTracker] = []


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedTracker]:
    made.clear()
    monkeypatch.setattr(experiment_trackers, "TRACKERS", {"good": ScriptedTracker, "broken": BrokenTracker})
    return made


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_tracker_that_fails_lacks_those_rounds_alone_and_says_so_once(
    tmp_path: Path, scripted: list[ScriptedTracker], caplog: pytest.LogCaptureFixture
) -> None:
    with open_trackers("broken,good", tmp_path, {}) as tell:
        for tracker in scripted:
            tracker.go.set()
        for number in range(1, 6):
            tell(round_event(number, 0.1))
    assert [tracker.taken for tracker in scripted] == [[1, 4, 5, 0], [1, 2, 3, 4, 5, 0]]
    refused, again = warnings_in(caplog)
    assert refused.startswith("logger broken does not take round 2 of fesem: OSError: no server; the training goes on")
    assert again == "logger broken takes rounds again; it lacks 2"


def test_a_slow_tracker_holds_up_no_round_and_takes_the_first_ones(
    tmp_path: Path, scripted: list[ScriptedTracker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(experiment_trackers, "MAX_WAITING", 2)
    with open_trackers("good", tmp_path, {}) as tell:
        tell(round_event(1, 0.1))
        scripted[0].entered.wait()
        for number in range(2, 7):
            tell(round_event(number, 0.1))
        scripted[0].go.set()
    assert scripted[0].taken == [1, 2, 3, 0]
    assert "does not take round 4 of fesem: 2 earlier ones wait for its server" in warnings_in(caplog)[0]


def test_a_tracker_that_does_not_answer_is_left_at_the_end(
    tmp_path: Path, scripted: list[ScriptedTracker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(experiment_trackers, "PATIENCE_S", 0.01)
    with open_trackers("good", tmp_path, {}) as tell:
        tell(round_event(1, 0.1))
        scripted[0].entered.wait()
    scripted[0].go.set()
    assert warnings_in(caplog) == [
        "logger good does not answer, so its last rounds are not there; metrics.jsonl has all"
    ]


def test_an_mlflow_server_that_is_away_holds_up_neither_the_start_nor_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with open_trackers("mlflow", tmp_path, {}) as tell:
        tell(round_event(1, 0.1))
    assert "logger mlflow does not take round 1 of fesem: MlflowException" in caplog.text


def test_an_unknown_tracker_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown logger 'wandbb'"), open_trackers("wandbb", tmp_path, {}):
        pass


def test_mlflow_without_a_server_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    pytest.importorskip("mlflow.tracking")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI is not set"), open_trackers("mlflow", tmp_path, {}):
        pass


def test_no_tracker_is_imported_unless_it_is_asked_for() -> None:
    names = "{'tensorboard', 'mlflow', 'prometheus_client'}"
    code = f"import sys, coordinator.runtime.server, emulator.simulate; print(sorted({names} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
