"""docs/train-on-a-phone-with-termux.md and docs/termux.sh: what they name is what the client has."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from edge_client.board.systemd_unit import CONFIG_PATH, INSTALL_FOLDER
from edge_client.cli import main
from edge_client.config import load_config
from edge_client.runtime.train_conditions import TERMUX_COMMANDS
from tests.edge_client.test_doctor import device
from tests.support.doc_pages import DOCS

PAGE = (DOCS / "train-on-a-phone-with-termux.md").read_text(encoding="utf-8")
SCRIPT = DOCS / "termux.sh"


def test_the_script_is_one_that_a_shell_reads_and_has_the_client_s_paths() -> None:
    subprocess.run(["/bin/sh", "-n", str(SCRIPT)], check=True)
    text = SCRIPT.read_text(encoding="utf-8")
    assert f"config={CONFIG_PATH}" in text
    assert f"{INSTALL_FOLDER}/launch.py" in text
    assert f"{INSTALL_FOLDER}/MANIFEST" in text


def test_the_archive_that_the_page_makes_is_one_for_flash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = re.findall(r"^\$ fedcenters-edge (flash .*)$", PAGE, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 3
    assert "nothing was provisioned for porch" in capsys.readouterr().err


def test_the_commands_and_the_setting_of_the_page_are_those_of_the_client(tmp_path: Path) -> None:
    assert all(f"`{name}`" in PAGE for name in TERMUX_COMMANDS)
    (name, value) = re.findall(r"`--env (\w+)=(\d+)`", PAGE)[0]
    assert f"--env {name}={value}" in SCRIPT.read_text(encoding="utf-8")
    config = load_config(device(tmp_path, "mqtt://127.0.0.1:1"), {name: value})
    assert config.min_battery_percent == 100
