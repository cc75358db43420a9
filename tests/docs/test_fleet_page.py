"""docs/emulate-a-fleet.md tells the truth: its commands run as they stand, and it lists every engine and every key."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emulator.cli import app
from emulator.engines.registry import ENGINES
from emulator.simulation.profile_files import PROFILE_KEYS, read_profiles

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "emulate-a-fleet.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
PROFILES = next(text for kind, text in BLOCKS if kind == "toml")
COMMANDS = [text.removeprefix("$ ").strip() for kind, text in BLOCKS if kind == "console"]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs_as_it_stands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles.toml").write_text(PROFILES, encoding="utf-8")
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert "4 rounds" in result.output


def test_the_profiles_of_the_page_have_every_key_once_at_least(tmp_path: Path) -> None:
    (tmp_path / "profiles.toml").write_text(PROFILES, encoding="utf-8")
    assert [kind.name for kind in read_profiles(tmp_path / "profiles.toml")] == ["solar sensor", "mains"]
    assert PROFILE_KEYS.keys() <= set(re.findall(r"^([\w-]+) = ", PROFILES, flags=re.MULTILINE))


def test_every_engine_has_its_row() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(ENGINES)


@pytest.mark.parametrize("link", re.findall(r"\]\((\.\./[\w/.]+)\)", PAGE))
def test_each_linked_file_exists(link: str) -> None:
    assert (ROOT / "docs" / link).is_file()
