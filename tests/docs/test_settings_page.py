"""docs/settings.md is right: every key of both files with its default, the variables, and the exit codes."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields

import pytest

from coordinator import cli
from coordinator import config as coordinators
from coordinator.config_sections import ModelConfig
from coordinator.identity.cli import WEB_PORT
from coordinator.identity.provision_plan import ENROL_PORT
from coordinator.local_broker import DEFAULT_PORT
from coordinator.phone.vendored_files import FOLDER_VARIABLE
from coordinator.rounds.asynchronous.options import Asynchronous
from coordinator.storage.experiment_trackers import PROMETHEUS_PORT
from edge_client import config as devices
from edge_client import errors
from edge_client.transport.mqtt import PORTS
from export import bundle_cli
from export.compiler.container_cache import VARIABLE
from tests.support.doc_pages import DOCS

PAGE = (DOCS / "settings.md").read_text(encoding="utf-8")
OTHER_ROWS = {"buffer": Asynchronous, "max-staleness": Asynchronous}  # keys that count beside another one only


def rows(section: str, heading: str = "key") -> dict[str, str]:
    """The default of each key of a section's table; several keys of a row have theirs in their order."""
    text = PAGE.split(f"\n## {section}\n")[1]
    table = text.split(f"\n| {heading} | default | what it says |\n")[1].split("\n\n")[0]
    found: dict[str, str] = {}
    for line in table.splitlines()[1:]:
        first, told, _ = (cell.strip() for cell in line.strip("|").split(" | ", 2))
        keys = re.findall(r"`([\w-]+)`", first)
        defaults = told.split(", ") if len(keys) > 1 else [told]
        found |= dict(zip(keys, defaults if len(defaults) == len(keys) else defaults * len(keys), strict=True))
    return found


def written(default: object) -> str:
    """A default as the page has it."""
    if default is MISSING:
        return "needed"
    if default is None or default == math.inf or default in ("", ()):
        return "-"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, (int, float)):
        return f"{default:,g}" if default < 1e5 else f"{default:,}"
    return ", ".join(default) if isinstance(default, tuple) else str(default)


def defaults_of(kind: type) -> Mapping[str, object]:
    """The default of each field."""
    known: Mapping[str, Field[object]] = {f.name: f for f in fields(kind)}
    return {name: f.default for name, f in known.items()}


def test_every_key_of_the_coordinators_file_has_its_default() -> None:
    expected = {}
    for key, (section, name) in coordinators._KEYS.items():
        kind = coordinators._SECTIONS[section] if section else coordinators.CoordinatorConfig
        expected[key] = written(defaults_of(OTHER_ROWS.get(key, kind))[name])
    assert rows("coordinator.toml") == expected


def test_every_key_of_the_model_has_its_default() -> None:
    assert rows("coordinator.toml", "key of `[model]`") == {
        name.replace("_", "-"): written(default) for name, default in defaults_of(ModelConfig).items()
    }


def test_every_key_of_a_devices_file_has_its_default() -> None:
    expected = {name.replace("_", "-"): written(value) for name, value in defaults_of(devices.ClientConfig).items()}
    assert rows("client.toml") == expected
    assert set(expected) == set(devices._KEYS)


@pytest.mark.parametrize(("key", "value"), [("deadline-s", "60"), ("exit-when-done", "true")])
def test_a_variable_replaces_a_key_of_the_coordinators_file(key: str, value: str) -> None:
    variable = f"FEDCENTERS_{key.upper().replace('-', '_')}"
    assert set(coordinators.overrides_from_environment({variable: value})) == {key}


def test_the_variables_of_the_page_are_read() -> None:
    listed = set(re.findall(r"^\| `(FEDCENTERS_\w+)` \|", PAGE, flags=re.MULTILINE))
    assert listed == {devices.DATA_VARIABLE, devices.EMULATOR_VARIABLE, VARIABLE, FOLDER_VARIABLE}
    replaced = devices._overrides({"FEDCENTERS_MIN_BATTERY_PERCENT": "0", devices.DATA_VARIABLE: "here"})
    assert replaced == {"min-battery-percent": "0", "data": "here"}


def test_the_ports_of_the_page_are_those_of_the_code() -> None:
    listed = {int(port) for port in re.findall(r"^\| (\d{4}) \|", PAGE.split("## Ports")[1], flags=re.MULTILINE)}
    phone = inspect.signature(cli.phone).parameters["listen"].default
    served = inspect.signature(bundle_cli.serve).parameters["port"].default
    assert listed == {
        *(PORTS["mqtts"], WEB_PORT, DEFAULT_PORT, ENROL_PORT, PROMETHEUS_PORT),
        *(int(phone.rpartition(":")[2]), served),
    }


def test_every_exit_code_of_an_error_is_on_the_page() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.split("## Exit codes")[1], flags=re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    of_errors = {kind.exit_code for kind in kinds if issubclass(kind, errors.FedcentersError)}
    inside = {errors.DeviceRefused.exit_code}  # a client tells it to its coordinator, and goes on
    assert listed == (of_errors - inside) | {errors.EXIT_OK, errors.EXIT_INTERRUPTED}
