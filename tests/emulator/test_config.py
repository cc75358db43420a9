"""One flat file for a simulated run: known keys only, later tables win, and a run's own file repeats it."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import fedcenters as fc
from coordinator.strategies.registry import METHODS, make_method, method_settings
from edge_client.errors import ConfigError, FedcentersError, UsageError
from emulator.config import example_config, fingerprint, make_args, parse_pairs, read_table, resolved_table
from emulator.options import OPTIONS, SimulateArgs


def test_every_field_has_a_row_with_an_explanation() -> None:
    assert {row.name for row in OPTIONS.values()} | {"settings"} == {f.name for f in fields(SimulateArgs)}
    assert all(row.help for row in OPTIONS.values())


def test_a_checkpoint_is_bound_to_what_decides_the_numbers() -> None:
    decides = {
        "method",
        "data-set",
        "model",
        "partition",
        "devices",
        "groups",
        "seed",
        "data-seed",
        "profiles",
        "codec",
    }
    decides |= {"hostile", "concurrency", "buffer", "max-staleness"}
    table = resolved_table(SimulateArgs(devices=4, workers=2), make_method("fedsgd"))
    assert {key for key, row in OPTIONS.items() if row.fingerprint} == decides
    settings = method_settings(make_method("fedsgd"))
    assert fingerprint(table) == {key: table[key] for key in table.keys() & {*decides, *settings}}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_setting_of_a_method_hides_a_key_of_the_run(method: str) -> None:
    assert not set(method_settings(make_method(method))) & set(OPTIONS)


@pytest.mark.parametrize("method", ["fesem", "fedsoft"])
def test_the_example_is_the_default(method: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(example_config(method))
    args = make_args(read_table(tmp_path / "run.toml"))
    made = method_settings(make_method(method))
    assert args == SimulateArgs(method=method, settings=made)
    assert all(f"# {row.help}" in example_config(method) for row in OPTIONS.values())
    lines = example_config(method).splitlines()
    bare = [line for before, line in pairwise(lines) if re.match(r"[\w-]+ = ", line) and not before.startswith("# ")]
    assert bare == []


def test_a_runs_own_file_gives_the_same_run(tmp_path: Path) -> None:
    import tomli_w

    args = make_args({"method": "wecfl", "num-rounds": 3, "data": "/data", "learning-rate": 0.5, "devices": 7})
    strategy = make_method(args.method, **args.settings)
    (tmp_path / "config.toml").write_text(tomli_w.dumps(resolved_table(args, strategy)))
    again = make_args(read_table(tmp_path / "config.toml"))
    assert resolved_table(again, make_method(again.method, **again.settings)) == resolved_table(args, strategy)
    assert (again.rounds, again.devices, again.settings["learning-rate"]) == (3, 7, 0.5)


def test_options_win_over_texts_and_texts_over_the_file() -> None:
    args = make_args(
        {"num-rounds": 5, "seed": 1, "local-steps": 3}, parse_pairs(["seed=2", "local-steps=4"]), {"seed": 3}
    )
    assert (args.rounds, args.seed, args.settings) == (5, 3, {"local-steps": "4"})


@pytest.mark.parametrize(
    ("table", "error", "said"),
    [
        ({"num-round": 3}, ConfigError, "did you mean 'num-rounds'"),
        ({"learning-rat": 3}, ConfigError, "did you mean 'learning-rate'"),
        ({"rounds": 3}, ConfigError, "did you mean 'num-rounds'"),
        ({"clusters": 3, "method": "fedavg"}, ConfigError, "unknown key 'clusters'"),
        ({"num-rounds": "three"}, ConfigError, "num-rounds is 'three'"),
        ({"num-rounds": 2.5}, ConfigError, "num-rounds is 2.5"),
        ({"num-rounds": True}, ConfigError, "num-rounds is True"),
        ({"codec": 8}, ConfigError, "codec is 8"),
        ({"learning-rate": "fast"}, ConfigError, "learning-rate is 'fast'"),
        ({"method": "fedavgg"}, UsageError, "did you mean 'fedavg'"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_hint(
    table: dict[str, Any], error: type[FedcentersError], said: str
) -> None:
    with pytest.raises(error) as wrong:
        make_args(table)
    assert said in f"{wrong.value} {wrong.value.hint}"


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot read"), ("a = ", "is no TOML file"), ('federation = "home"', "is a coordinator's file")],
)
def test_a_file_that_cannot_be_read_says_what_to_write(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_table(tmp_path / "run.toml")


class Undecorated(fc.FedAvg):
    """A method of the user, without `@dataclass` above it."""

    share: float = 0.5


def test_a_setting_of_a_class_that_is_no_dataclass_is_told_to_need_one() -> None:
    method, told = f"{__name__}:Undecorated", r"(?s)share.*write @dataclass.* above class Undecorated"
    with pytest.raises(ConfigError, match=told):
        make_args({"method": method, "share": "0.3"})
    with pytest.raises(ConfigError, match=told):
        make_method(method, share=0.3)


def test_the_folder_of_a_run_in_place_of_its_file_is_told_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)hint: name the file in it, .*config\.toml"):
        read_table(tmp_path)
