"""docs/flash-a-board.md is right: what needs no board runs as it stands, and each setting and file is one."""

from __future__ import annotations

import re
import shlex
import tarfile
from pathlib import Path

import pytest

from edge_client import config as configs
from edge_client.board.profiles import BOARD_PROFILES
from edge_client.board.systemd_unit import SERVICE_NAME
from edge_client.cli import main
from edge_client.data.dataset import load_folder
from tests.support.doc_pages import followed
from tests.support.flash_workstation import rootfs, stocked

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flash-a-board.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
ON_HARDWARE = [text for kind, text in BLOCKS if kind == "sh"]


def test_the_commands_of_the_page_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rootfs(tmp_path / "card", BOARD_PROFILES["raspberry-pi-5"])
    for board in ("raspberry-pi-5", "generic-arm64"):
        stocked(tmp_path / "cache" / "fedcenters" / "wheels", BOARD_PROFILES[board])
    with followed("flash-a-board.md", tmp_path) as reader:
        assert len(reader.printed) == 5
    assert (tmp_path / "card" / "etc" / "systemd" / "system" / SERVICE_NAME).is_file()
    assert (tmp_path / "porch.tar").is_file()
    assert (tmp_path / "client.tar").stat().st_size < 1e6
    assert "the client's own code, under a megabyte" in PAGE
    with tarfile.open(tmp_path / "porch.tar") as archive:
        files = [f"/{member.name}" for member in archive if not member.isdir()]
    table = PAGE.split("## What is on the board then")[1].split("\n\n")[1]
    (removal,) = (text for kind, text in BLOCKS if kind == "sh" and "userdel" in text)
    link = f"/etc/systemd/system/multi-user.target.wants/{SERVICE_NAME}"  # `systemctl disable` removes it
    for listed in (re.findall(r"`(/[\w./@-]+)`", table), re.findall(r" (/[\w./-]+)", removal)):
        assert [path for path in files if not any(f"{path}/".startswith(f"{place}/") for place in listed)] == [link]


@pytest.mark.parametrize("block", [block for block in ON_HARDWARE if "fedcenters-edge flash" in block])
def test_a_command_that_needs_a_board_is_one_that_is_understood(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gets as far as the identity that is not there, or the interpreter that was not given."""
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(block.removeprefix("sudo "))[1:]
    assert main(arguments) == 3
    assert "nothing was provisioned for porch" in capsys.readouterr().err


def test_every_board_and_every_setting_of_the_page_is_one() -> None:
    named = set(re.findall(r"`([a-z0-9-]+)`", PAGE.partition("\n\nThe Python that")[0]))
    assert named >= set(BOARD_PROFILES)
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \| (?:on a|when|with|within)", PAGE, flags=re.MULTILINE))
    assert sorted(rows) == sorted(
        ["min-battery-percent", "max-temperature", "min-free-memory-mib", "allow-metered", "quiet-hours"]
    )
    for key, told in rows.items():
        default = getattr(configs.ClientConfig, key.replace("-", "_"))
        assert told.partition(";")[0].strip() == {"": "none", False: "false"}.get(default, str(default))


def test_the_schema_of_the_page_reads_a_table_as_it_says(tmp_path: Path) -> None:
    (schema,) = [text for kind, text in BLOCKS if kind == "toml"]
    (tmp_path / "schema.toml").write_text(schema)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.csv").write_text("kind,length,width\nhigh,6.2,3.1\n")
    train = load_folder(tmp_path).train
    assert train.x.round(5).tolist() == [[1.0, 1.0]]
    assert train.y.tolist() == [1]
