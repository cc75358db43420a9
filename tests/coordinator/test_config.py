from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from coordinator.config import (
    _KEYS,
    _SECTIONS,
    CoordinatorConfig,
    _file_fields,
    config_from_table,
    overrides_from_environment,
    read_config,
)
from edge_client.errors import ConfigError
from tests.support.virtual_federation import Anything

MINIMAL: dict[str, Any] = {
    "federation": "demo",
    "broker": "mqtt://127.0.0.1:1883",
    "folder": "run",
    "model": {"name": "digits-mlp"},
    "runs": [{"method": "fesem", "num-rounds": 5, "clusters": 3}, {"method": "fedavg", "num-rounds": 2}],
}


def table(**changes: Anything) -> dict[str, Any]:
    return MINIMAL | {key.replace("_", "-"): value for key, value in changes.items()}


def test_each_field_has_a_key_of_its_own_and_a_type_by_which_the_reader_knows_texts_paths_and_lists() -> None:
    types = [f.type for _, f in _file_fields()]
    assert len(types) == len(_KEYS)
    assert set(types) == {"str", "Path", "Path | None", "tuple[str, ...]", "bool", "int", "int | None", "float"}


def test_a_minimal_file_is_enough_and_the_defaults_are_filled_in(tmp_path: Path) -> None:
    config = config_from_table(MINIMAL, base=tmp_path)
    assert config.folder == tmp_path / "run"
    assert [run.name for run in config.runs] == ["fesem", "fedavg"]
    assert config.runs[0].settings == {"clusters": 3}
    assert config.served_run == "fesem"
    assert config.model.engines == ("onnx", "litert", "pt2")


def test_a_run_of_a_class_is_named_as_simulate_names_it(tmp_path: Path) -> None:
    runs = [{"method": "angles:My_Angles", "num-rounds": 1}, {"method": "fesem-ma", "num-rounds": 1}]
    assert [run.name for run in config_from_table(table(runs=runs), base=tmp_path).runs] == ["my-angles", "fesem-ma"]


def test_what_is_written_down_is_read_back_as_the_same_configuration(tmp_path: Path) -> None:
    config = config_from_table(table(deadline_s=5, formats=["onnx"], reference="x.npz", quorum=1.0), base=tmp_path)
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(config.to_toml()))
    assert read_config(path, environ={}) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_device": 3}, "unknown key min-device\n\nhint: did you mean min-devices?"),
        ({"secure": "updates"}, "unknown key secure\n\nhint: secure belongs below [[runs]]"),
        ({"num_rounds": 3}, "unknown key num-rounds\n\nhint: num-rounds belongs below [[runs]]"),
        ({"federation": "Demo"}, "federation"),
        ({"quorum": 1.5}, "quorum is a share"),
        ({"fraction_connected": "all"}, "fraction-connected is a share of the fleet"),
        ({"over_select": 0.9}, "over-select is 1 or more"),
        ({"in_flight_mib": 0}, "in-flight-mib must be a whole number"),
        ({"task_window": 0}, "task-window must be a whole number"),
        ({"evaluate_every": 0}, "evaluate-every must be a whole number"),
        ({"fraction_evaluate": 0}, "fraction-evaluate must be a positive number"),
        ({"fraction_evaluate": 1.5}, "fraction-evaluate is 1.5"),
        ({"block": 5000}, "multiple of 4096"),
        ({"block": True}, "block"),
        ({"block": 65536.0}, "block is 65536.0"),
        ({"keep_rounds": False}, "keep-rounds is False"),
        ({"seed": -1}, "seed is 0 to"),
        ({"codec": "f8"}, "codec is 'f8'"),
        ({"deadline_s": "soon"}, "deadline-s must be a positive number"),
        ({"deadline_s": 0}, "deadline-s must be a positive number"),
        ({"min_devices": 1.5}, "min-devices must be a whole number"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"min_devices": 20_000}, "set max-devices to 20000 or more"),
        ({"concurrency": 1.5}, "concurrency is 1.5"),
        ({"exit_when_done": "False"}, "exit-when-done is 'False'"),
        ({"dashboard": 8080}, 'dashboard must be a text, as dashboard = "..."'),
        ({"reference": ""}, "reference is empty"),
        ({"folder": ""}, "folder is empty"),
        ({"formats": ["tflight"]}, "formats is 'tflight'"),
        ({"formats": "onnx"}, "formats must be a list"),
        ({"runs": {"method": "fesem", "num-rounds": 1}}, "write [[runs]] for each run"),
        ({"class_names": "walking"}, "class-names must be a list"),
        ({"class_names": [1]}, "class-names holds what is no text"),
        ({"below_quorum": "retry"}, "use some of: stop, continue"),
        ({"bundle_run": "other"}, "bundle-run is 'other'"),
        ({"runs": []}, "at least one [[runs]]"),
        ({"runs": [{"method": "fedavg"}]}, "needs method and num-rounds"),
        ({"runs": [{"method": "fedavg", "num-rounds": 0}]}, "runs.num-rounds"),
        ({"runs": [{"method": "fedavg", "num-rounds": 1, "name": "../x"}]}, "names a folder"),
        ({"runs": [{"method": "fedavg", "num-rounds": 1, "name": "a" * 65}]}, "at most 64"),
        ({"runs": [{"method": f"mine:{'A' * 65}", "num-rounds": 1}]}, "at most 64"),
        ({"runs": [{"method": "fedavg", "num-rounds": 1}] * 2}, "each with its own name"),
        ({"model": {"name": "digits-mlp", "engines": []}}, "model.engines is empty"),
        ({"model": {"name": "digits-mlp", "batchsize": 3}}, "did you mean model.batch-size?"),
        ({"model": {}}, "'name' of [model] is missing"),
        ({"model": {"name": 3}}, "model.name must be a text"),
    ],
)
def test_what_is_wrong_is_named_with_a_hint(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from_table(table(**changes), base=tmp_path)
    assert message in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize("key", ["federation", "broker", "folder", "model", "runs"])
def test_what_is_needed_is_asked_for(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is missing"):
        config_from_table({k: v for k, v in MINIMAL.items() if k != key}, base=tmp_path)


def test_a_flag_wins_over_the_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(tomli_w.dumps(MINIMAL | {"seed": 1}))
    environ = {"FEDCENTERS_BROKER": "mqtt://env:1", "FEDCENTERS_SEED": "7"}
    assert read_config(path, environ=environ).broker == "mqtt://env:1"
    assert read_config(path, environ=environ, broker="mqtt://flag:1").broker == "mqtt://flag:1"
    assert read_config(path, environ=environ).seed == 7


@pytest.mark.parametrize("key", _KEYS)
def test_a_table_in_place_of_a_value_is_refused(tmp_path: Path, key: str) -> None:
    """`broker`, `dashboard`, `loggers` and `web-broker` took any value, and `serve` ended in a traceback."""
    with pytest.raises(ConfigError):
        config_from_table(MINIMAL | {key: {"a": 1}}, base=tmp_path)


def test_a_variable_for_a_text_is_a_text_though_it_looks_like_a_number(tmp_path: Path) -> None:
    environ = {"FEDCENTERS_DASHBOARD": "8080", "FEDCENTERS_FOLDER": "2026", "FEDCENTERS_BROKER": '"embedded"'}
    found = config_from_table(MINIMAL | overrides_from_environment(environ), base=tmp_path)
    assert (found.dashboard.address, found.folder, found.broker) == ("8080", tmp_path / "2026", "embedded")


def test_every_field_of_every_section_is_set_by_one_key_of_the_file() -> None:
    own = {field.name for field in fields(CoordinatorConfig)} - {"model", "runs", *_SECTIONS}
    nested = {(name, field.name) for name, made in _SECTIONS.items() for field in fields(made)}
    assert sorted(_KEYS.values()) == sorted({("", name) for name in own} | nested)


def test_variables_that_are_not_ours_are_left_alone() -> None:
    assert overrides_from_environment({"FEDCENTERS_DATA": "x", "HOME": "/"}) == {}


def test_a_mistyped_variable_is_told_with_the_nearest_one(caplog: pytest.LogCaptureFixture) -> None:
    assert overrides_from_environment({"FEDCENTERS_DEADLINE": "5"}) == {}
    assert caplog.messages == ["FEDCENTERS_DEADLINE is not read: did you mean FEDCENTERS_DEADLINE_S?"]


def test_files_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(ConfigError, match="is no TOML file"):
        read_config(tmp_path / "bad.toml")


def test_a_file_of_a_windows_editor_is_read_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_bytes(b"\xef\xbb\xbf" + tomli_w.dumps(MINIMAL).replace("\n", "\r\n").encode())
    assert read_config(path) == config_from_table(MINIMAL, base=tmp_path)


def test_the_fingerprint_holds_what_decides_results_and_nothing_else(tmp_path: Path) -> None:
    def fingerprint(**changes: Anything) -> dict[str, Any]:
        return config_from_table(table(**changes), base=tmp_path).fingerprint()

    assert fingerprint() == fingerprint(broker="mqtt://elsewhere:1", deadline_s=3, folder="other")
    assert fingerprint() != fingerprint(seed=2)
    assert fingerprint() != fingerprint(codec="f32")
    assert fingerprint() != fingerprint(runs=[{"method": "fesem", "num-rounds": 5, "clusters": 4}])


def test_a_configuration_cannot_be_built_around_its_checks(tmp_path: Path) -> None:
    good = config_from_table(MINIMAL, base=tmp_path)
    with pytest.raises(ConfigError):
        CoordinatorConfig(federation="a/b", broker=good.broker, folder=good.folder, model=good.model, runs=good.runs)


def test_who_is_tested_belongs_to_the_fingerprint_only_where_a_device_is_left_out(tmp_path: Path) -> None:
    """A folder from before these keys goes on; one whose exchanges would be others does not."""
    usual, seldom = (
        config_from_table(t, base=tmp_path) for t in (MINIMAL, table(evaluate_every=3, fraction_evaluate=0.5))
    )
    assert not {"evaluate-every", "fraction-evaluate"} & usual.fingerprint().keys()
    assert (seldom.fingerprint()["evaluate-every"], seldom.fingerprint()["fraction-evaluate"]) == (3, 0.5)
    assert (seldom.round.evaluation.every, seldom.round.evaluation.fraction) == (3, 0.5)


@pytest.mark.parametrize(("formats", "compiled"), [(["onnx"], ("onnx", "pt2")), ([], ("onnx",))])
def test_the_program_for_pt2_is_compiled_where_the_bundle_needs_it(
    formats: list[str], compiled: tuple[str, ...], tmp_path: Path
) -> None:
    given = table(formats=formats, model={"name": "digits-mlp", "engines": ["onnx"]})
    config = config_from_table(given, base=tmp_path)
    assert config.compiled_engines == compiled
