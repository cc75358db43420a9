"""Every command explains itself and gives an example."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache

import pytest
from typer.testing import CliRunner

import coordinator.cli
import emulator.cli
import export.cli
from edge_client import __version__
from edge_client import cli as edge

APPS = {"coordinator": coordinator.cli.app, "emulator": emulator.cli.app, "export": export.cli.app}


def edge_commands() -> dict[str, argparse.ArgumentParser]:
    (sub,) = (a for a in edge._parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(sub.choices)


def commands() -> Iterator[str]:
    """The name of every command."""
    for room, app in APPS.items():
        for command in app.registered_commands:
            assert command.callback is not None
            yield f"fedcenters-{room} {command.name or command.callback.__name__.replace('_', '-')}"
    yield from (f"fedcenters-edge {name}" for name in edge_commands())


@cache
def help_of(command: str) -> str:
    """What `--help` prints about a command, in one line."""
    program, name = command.split()
    room = program.removeprefix("fedcenters-")
    if room == "edge":
        text = edge_commands()[name].format_help()
    else:
        text = CliRunner().invoke(APPS[room], [name, "--help"], env={"COLUMNS": "200"}).stdout
    return " ".join(text.split())


@pytest.mark.parametrize("command", list(commands()))
def test_a_command_has_an_example_of_itself(command: str) -> None:
    assert f"xample: {command}" in help_of(command)


def test_a_command_of_the_device_says_in_its_own_help_what_it_does() -> None:
    every = " ".join(edge._parser().format_help().split())
    for name, parser in edge_commands().items():
        words = " ".join((parser.description or "-").rstrip(".").split())
        assert f"{name} {words[0].lower()}{words[1:]}" in every
        assert words in help_of(f"fedcenters-edge {name}")


def test_help_names_no_source_file_and_no_default_of_0_that_stands_for_another() -> None:
    texts = {name: help_of(name) for name in commands()}
    provision = texts["fedcenters-coordinator provision"]
    for port in ("8883", "8443", "8884"):
        assert f"at first {port}" in provision
    assert "port; at first 8883. [default: 0" not in provision
    assert "profile_files.py" not in texts["fedcenters-emulator simulate"]
    assert "docs/emulate-a-fleet.md" in texts["fedcenters-emulator simulate"].replace(
        " ", ""
    )  # a line ends at a hyphen
    assert "; the data set's own" not in "".join(texts.values())
    assert "repeat it for several devices" in texts["fedcenters-edge join"]


def test_long_help_is_in_groups_of_plain_text_that_fit_eighty_columns() -> None:
    wide = [("emulator", "simulate"), ("coordinator", "provision"), ("export", "program"), ("export", "bundle")]
    for room, name in wide:
        text = CliRunner().invoke(APPS[room], [name, "--help"], env={"COLUMNS": "80", "FORCE_COLOR": "1"}).stdout
        headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
        assert len(headings) >= 4, headings
        assert headings[-1] == "Options:"
        assert text.isascii()
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) <= 80


def test_each_command_line_prints_its_version_from_one_place() -> None:
    for app in APPS.values():
        assert CliRunner().invoke(app, ["--version"]).stdout == f"fedcenters {__version__}\n"
