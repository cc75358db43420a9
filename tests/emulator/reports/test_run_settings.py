"""The settings of runs of different kinds beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coordinator.strategies.registry import make_method
from emulator.config import CONFIG_FILE, resolved_table
from emulator.options import SimulateArgs
from emulator.reports.run_settings import differing_settings, one_sided_settings, read_settings

COORDINATOR = {
    "broker": "mqtt://127.0.0.1:1883",
    "codec": "i8",
    "seed": 0,
    "model": {"name": "digits-mlp", "batch-size": 8, "engines": ["onnx"]},
    "runs": [{"name": "fesem", "method": "fesem", "num-rounds": 10, "clusters": 2}],
}


def test_a_coordinators_run_differs_from_a_simulated_one_in_what_both_have_a_word_for() -> None:
    table = resolved_table(SimulateArgs(model="digits-mlp"), make_method("fesem"))
    runs = [read_settings(Path("nowhere"), one, "fesem") for one in (table, COORDINATOR)]
    assert differing_settings(runs) == [["batch-size", "16", "8"], ["clusters", "3", "2"], ["codec", "f32", "i8"]]
    only = one_sided_settings(dict(zip(("virtual", "home"), runs, strict=True)))
    assert only == [
        "Only home has: broker, model.engines.",
        "Only virtual has: data-set, engine, evaluate-every, fraction-evaluate, workers.",
    ]


def test_a_methods_own_setting_called_runs_is_no_table_of_runs() -> None:
    """The report of fedavg-plus ended with a traceback."""
    table = resolved_table(SimulateArgs(method="fedavg-plus"), make_method("fedavg-plus", runs=2))
    assert read_settings(Path("nowhere"), table, "fedavg-plus") == table


def test_a_run_that_simulate_played_over_mqtt_has_the_settings_that_were_asked_for(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('data-set = "digits"\nbroker = "auto"\n')
    found = read_settings(tmp_path, COORDINATOR, "fesem")
    assert (found["data-set"], found["broker"], found["model.engines"]) == ("digits", "auto", ["onnx"])


def test_of_three_runs_a_value_that_two_have_and_not_alike_is_in_the_table() -> None:
    runs: dict[str, dict[str, Any]] = {
        "a": {"method": "fesem", "clusters": 2},
        "b": {"method": "fesem", "clusters": 3},
        "c": {"method": "fedavg"},
    }
    assert differing_settings(runs.values()) == [["clusters", "2", "3", ""], ["method", "fesem", "fesem", "fedavg"]]
    assert one_sided_settings(runs) == []


def test_a_method_that_cannot_be_found_here_has_the_settings_of_its_file() -> None:
    runs = [{"method": "gone:Method", "num-rounds": 3, "pull": 0.5}]
    found = read_settings(Path("nowhere"), {"broker": "embedded", "runs": runs}, "gone:Method")
    assert found == {"broker": "embedded", "method": "gone:Method", "num-rounds": 3, "pull": 0.5}
