"""Shells can complete every command: what the scripts answer when a shell asks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("room", "typed", "offered"),
    [("coordinator", "ser", "serve"), ("export", "bun", "bundle"), ("emulator", "sim", "simulate")],
)
def test_a_command_is_completed_in_bash(room: str, typed: str, offered: str) -> None:
    name = f"fedcenters-{room}"
    asked = {f"_{name.replace('-', '_').upper()}_COMPLETE": "complete_bash"}
    asked |= {"COMP_WORDS": f"{name} {typed}", "COMP_CWORD": "1"}
    code = f"import sys; sys.argv = [{name!r}]; from {room}.cli import main; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [offered]


def test_the_devices_command_is_completed_too() -> None:
    pytest.importorskip("argcomplete")
    line = "fedcenters-edge nea"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    code = "import sys; sys.argv = ['fedcenters-edge']; from edge_client.cli import main; main()"
    shell = f'{sys.executable} -c "$CODE" 8>&1 9>&2'
    command = ["sh", "-c", shell]
    done = subprocess.run(command, env=os.environ | asked | {"CODE": code}, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "nearest"
