"""Ctrl-C while a command is still imported: quiet, with the exit code of Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edge_client.toml_files import parse_toml

ROOT = Path(__file__).parents[2]
SCRIPTS = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
INTERRUPTED_IMPORT = """
import signal, sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "edge_client.run_cli":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
sys.argv = ["command", "--help"]
from {module} import {name}
sys.exit({name}())
"""
LEAVING = "import signal; from edge_client.early_interrupts import leave_at_once; "
COMMAND = "from edge_client.run_cli import run_cli; import sys; sys.exit(run_cli({action}, interrupted='stopped'))"
INTERRUPT = "lambda: signal.raise_signal(signal.SIGINT)"


def ended(code: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_while_a_command_is_imported_ends_it_quietly_with_130(script: str) -> None:
    module, _, name = SCRIPTS[script].partition(":")
    assert ended(INTERRUPTED_IMPORT.format(module=module, name=name)) == (130, "", "")


def test_once_the_command_runs_ctrl_c_lets_it_clean_up() -> None:
    assert ended(f"{LEAVING} leave_at_once(); {COMMAND.format(action=INTERRUPT)}") == (130, "", "stopped\n")


def test_a_process_that_ignores_ctrl_c_goes_on_to_ignore_it() -> None:
    ignoring = "signal.signal(signal.SIGINT, signal.SIG_IGN); leave_at_once(); signal.raise_signal(signal.SIGINT); "
    assert ended(f"{LEAVING} {ignoring} {COMMAND.format(action=INTERRUPT)}") == (0, "", "")
