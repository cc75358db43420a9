"""The TOML file of a simulated run: flat kebab-case keys, the method's settings among them.

    method = "fesem"
    data-set = "digits"
    num-rounds = 10
    learning-rate = 0.05    # a setting of the method

`-c key=value` and the command's options win over the file. A run's own config.toml is such a file, so a run can be
repeated, changed or resumed from it. An unknown key is refused with the nearest valid one.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from coordinator.strategies.base import Strategy
from coordinator.strategies.common.method_value import forgotten_decorator
from coordinator.strategies.common.representation import annotate_representations
from coordinator.strategies.documentation import setting_words
from coordinator.strategies.registry import kept_settings, make_method, method_settings
from edge_client import __version__
from edge_client.errors import ConfigError, UsageError
from edge_client.toml_files import read_toml
from emulator.options import OPTIONS, Option, SimulateArgs
from export.plugins import nearest_name_hint

CONFIG_FILE = "simulate.toml"  # what was asked of a run over MQTT, whose config.toml is the coordinator's
GROUPS_FILE = "groups.json"  # the true group of each device, beside it
FLEET_FILE = "fleet.json"  # the devices of a simulated run, and by what it is known again
STATE_FILE = "state.safetensors"  # beside the centers, where no checkpoint has the state of the last round
TREE_FILE = "tree.npz"  # beside the centers: edges and models of coordinator/strategies/common/center_tree.py
GUIDE_FILE = "newcomers/guide.json"  # what devices of the user's own samples taught `nearest`


def read_table(path: Path) -> dict[str, Any]:
    """The file's table, not checked yet."""
    command = "`fedcenters-emulator init`"
    hint = f"name the file in it, {path / 'config.toml'}" if path.is_dir() else f"write one with {command}"
    table = read_toml(path, hint=hint, syntax_hint=f"compare it with what {command} writes")
    if "federation" in table:
        repeated = path.with_name(CONFIG_FILE)
        again = f"; {repeated} repeats the run" if repeated.is_file() else ""
        hint = f"fedcenters-coordinator serve {path} goes on with its run (--broker embedded: on this machine){again}"
        raise ConfigError(f"{path} is a coordinator's file", hint=hint)
    return table


def parse_pairs(texts: Sequence[str]) -> dict[str, str]:
    """["lam=0.1"] -> {"lam": "0.1"}; each value is read in its setting's own type later."""
    settings: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"-c {text!r} is no setting", hint="write it as -c local-steps=20")
        settings[key] = value
    return settings


def make_args(*tables: Mapping[str, Any], strategy: Strategy | None = None) -> SimulateArgs:
    """The options of these tables; a later table wins. Raises UsageError, ConfigError for what is not valid.

    `strategy` is the method itself, where the caller has it and its name need not be found.
    """
    table: dict[str, Any] = {}
    for one in tables:
        table |= {key: value for key, value in one.items() if value is not None}
    method = str(table.get("method", SimulateArgs.method))
    made = make_method(method) if strategy is None else strategy
    valid = method_settings(made)
    values, settings = {}, {}
    for key, value in table.items():
        if key in OPTIONS:
            values[OPTIONS[key].name] = _value(OPTIONS[key], value)
        elif key in valid:
            settings[key] = value
        else:
            hint = forgotten_decorator(type(made)) or nearest_name_hint(key, {*OPTIONS, *valid})
            raise ConfigError(f"unknown key {key!r}", hint=hint)
    if strategy is None:
        make_method(method, **settings)
    return SimulateArgs(**values, settings=settings)


def resolved_table(args: SimulateArgs, strategy: Strategy) -> dict[str, Any]:
    """A run's config.toml: every key that has a value, and every setting of the method, defaults included.

    Raises UsageError for a setting that a file cannot hold.
    """
    values = {key: getattr(args, row.name) for key, row in OPTIONS.items()}
    plain = {key: str(v) if isinstance(v, Path) else v for key, v in values.items() if v is not None and v != ""}
    return plain | kept_settings(args.method, strategy)


def made_with() -> dict[str, str]:
    """The versions that the numbers of a run depend on, beside its settings; no key for what is not installed."""
    found = {"fedcenters": __version__, "python": platform.python_version()}
    for package in ("numpy", "torch"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def fingerprint(table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `resolved_table` that decide the numbers of a run."""
    return {key: value for key, value in table.items() if key not in OPTIONS or OPTIONS[key].fingerprint}


def example_config(method: str) -> str:
    """A commented file with every key at its default, for `init`."""
    import tomli_w

    args, strategy = SimulateArgs(method=method), make_method(method)
    table = resolved_table(args, strategy)
    lines = ["# A simulated run: fedcenters-emulator simulate FILE. Keys that stand behind # have no value here."]
    for key, row in OPTIONS.items():
        known = tomli_w.dumps({key: table[key]}).strip() if key in table else f'# {key} = ""'
        lines += ["", f"# {row.help}", known]
    lines += ["", f"# Settings of {method}; docs/methods.md has more about them."]
    for key in (key for key in table if key not in OPTIONS):
        lines += ["", *_help_line(setting_words(type(strategy), key.replace("-", "_")), table)]
        lines.append(tomli_w.dumps({key: table[key]}).strip())
    return annotate_representations("\n".join(lines) + "\n")


def _help_line(words: str, keys: Iterable[str]) -> list[str]:
    """A comment with what a setting means, in the file's names; none where nothing is known."""
    for key in keys:
        words = words.replace(key.replace("-", "_"), key)
    return [f"# {words[0].upper()}{words[1:]}."] if words else []


def _value(row: Option, value: Any) -> Any:  # noqa: ANN401 - TOML values
    """In the option's own type; a text (of the command line) is parsed, a number never becomes a text."""
    number = row.kind in (int, float)
    wrong = ConfigError(f"{row.key} is {value!r}", hint=f"{row.key} is {'a number' if number else 'a text'}")
    if isinstance(value, bool) or not (number or isinstance(value, (str, Path))):
        raise wrong
    try:
        found = row.kind(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
    if not isinstance(value, (str, Path)) and found != value:
        raise wrong
    return found
