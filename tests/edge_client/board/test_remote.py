"""A running board over ssh: a program called `ssh` on PATH runs what it is told on this machine, in a folder."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from edge_client.board import remote
from edge_client.board.flash import PACKAGE
from edge_client.board.profiles import BOARD_PROFILES
from edge_client.board.remote import BoardInfo, RemoteBoard, check_board
from edge_client.errors import ConfigError, NetworkError
from tests.edge_client.board.test_flash import use_up
from tests.support.flash_workstation import FlashSetup

pytestmark = pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
SSH = """#!/bin/sh
while test "$1" != board; do shift; done
shift
echo "Welcome to aarch64! --fedcenters--"  # as a login shell's own file may
exec sh -c "$*"
"""
TOOL = """#!/bin/sh
echo "$(basename $0) $*" >> {log}
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlashSetup:
    """`board` is a folder; systemd's programs only note what they are told."""
    tools = tmp_path / "tools"
    tools.mkdir()
    log = tmp_path / "log"
    log.touch()
    texts = {"ssh": SSH, "sudo": '#!/bin/sh\nshift\nexec "$@"\n', "uname": "#!/bin/sh\necho aarch64\n"}
    texts |= dict.fromkeys(("systemctl", "systemd-sysusers", "systemd-tmpfiles", "chown"), TOOL.format(log=log))
    texts["python3"] = "#!/bin/sh\necho 3.11\n"
    seen = "LC_ALL=C ls -dA opt/fedcenters/.new-* etc/fedcenters"
    texts["sync"] = f"#!/bin/sh\ncd {tmp_path}/board && echo sync $({seen}) >> {log}\n"
    for name, text in texts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin")
    root = tmp_path / "board"
    (root / "etc").mkdir(parents=True)
    monkeypatch.setattr(remote.RemoteBoard, "__init__", _rooted(str(root)))
    return FlashSetup(tmp_path)


def _rooted(root: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
    def init(self: RemoteBoard, *, host: str) -> None:
        object.__setattr__(self, "host", host)
        object.__setattr__(self, "root", root)

    return init


def told(context: FlashSetup) -> list[str]:
    log = context.folder / "log"
    lines = log.read_text().splitlines()
    log.write_text("")
    return lines


def test_a_board_is_flashed_started_and_left_alone_the_second_time(
    desk: FlashSetup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.flash("--ssh", "board") == 0
    root = desk.folder / "board"
    assert (root / "opt/fedcenters/site/edge_client/cli.py").read_bytes() == (PACKAGE / "cli.py").read_bytes()
    assert (root / "etc/fedcenters/device.key").stat().st_mode & 0o777 == 0o600
    assert [line for line in told(desk) if "sync" in line or "systemctl" in line] == [
        "sync etc/fedcenters opt/fedcenters/.new-MANIFEST opt/fedcenters/.new-launch.py opt/fedcenters/.new-site",
        "sync etc/fedcenters",
        "systemctl daemon-reload",
        "systemctl enable fedcenters-edge.service",
        "systemctl restart fedcenters-edge.service",
    ]
    assert desk.flash("--ssh", "board") == 0
    assert told(desk) == []
    assert "nothing to change" in capsys.readouterr().err


def test_a_file_that_was_damaged_on_the_board_is_seen_and_an_update_repairs_it(
    desk: FlashSetup, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert desk.flash("--ssh", "board") == 0
    damaged = desk.folder / "board/opt/fedcenters/site/edge_client/cli.py"
    damaged.write_text("damaged")
    assert desk.flash("--ssh", "board") == 3
    assert "flash --update" in capsys.readouterr().err
    from edge_client.board import wheels

    text = next((desk.cache / "locks").iterdir()).read_text()
    monkeypatch.setattr(wheels, "lock_wheels", lambda *_args, **_more: text)
    state = desk.folder / "board/var/lib/fedcenters/state.json"
    state.parent.mkdir(parents=True)
    state.write_text("learned")
    assert desk.flash("--ssh", "board", "--update") == 0
    assert damaged.read_bytes() == (PACKAGE / "cli.py").read_bytes()
    assert state.read_text() == "learned"


@pytest.mark.parametrize("before", ["used", "waits"])
def test_a_new_token_gets_onto_a_board_that_had_one(desk: FlashSetup, before: str) -> None:
    assert desk.flash("--ssh", "board", device="shed") == 0
    token = desk.folder / "board/var/lib/fedcenters/identity/token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert desk.flash("--ssh", "board", device="shed") == 0
    if before == "used":
        use_up(token)
        told(desk)
        assert desk.flash("--ssh", "board", device="shed") == 0
        assert not token.exists()
        assert not told(desk)  # not restarted
    (desk.keys / "devices" / "shed" / "token").write_text("another\n")
    assert desk.flash("--ssh", "board", device="shed") == 0
    assert token.read_text() == "another\n"
    assert token.stat().st_mode & 0o777 == 0o600


def test_a_board_that_does_not_answer_is_a_matter_of_the_network(
    desk: FlashSetup, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk.folder / "tools" / "ssh").write_text("#!/bin/sh\necho 'connection refused' >&2\nexit 255\n")
    assert desk.flash("--ssh", "board") == NetworkError.exit_code
    assert "connection refused" in capsys.readouterr().err


def test_a_login_that_runs_no_command_is_told(desk: FlashSetup, capsys: pytest.CaptureFixture[str]) -> None:
    (desk.folder / "tools" / "ssh").write_text("#!/bin/sh\ncat > /dev/null\necho this account is for sftp\n")
    assert desk.flash("--ssh", "board") == NetworkError.exit_code
    assert "board ran no command" in capsys.readouterr().err


def test_another_device_is_not_put_over_one_that_is_there(desk: FlashSetup, capsys: pytest.CaptureFixture[str]) -> None:
    assert desk.flash("--ssh", "board") == 0
    assert desk.flash("--ssh", "board", device="shed") == 3
    assert "is porch of home" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["-oProxyCommand=evil", "a b", "", "x;y"])
def test_what_is_no_host_never_reaches_ssh(host: str) -> None:
    with pytest.raises(ConfigError, match="is no user@host"):
        RemoteBoard(host=host)


@pytest.mark.parametrize(
    ("board", "profile", "says"),
    [
        ({"machine": "x86_64"}, "raspberry-pi-5", "is a system for x86_64"),
        ({}, "jetson-orin", "is no Jetson"),
        ({"python": "3.8"}, "raspberry-pi-5", "has Python 3.8"),
        ({"python": "none"}, "raspberry-pi-5", "has no Python 3"),
    ],
)
def test_a_board_of_another_kind_is_refused(board: dict[str, str], profile: str, says: str) -> None:
    usual = BoardInfo(machine="aarch64", python="3.11", tegra=False, root=True, config=b"", manifest=b"")
    found = replace(usual, **board)  # type: ignore[arg-type]  # two of its texts
    with pytest.raises(ConfigError, match=says) as refused:
        check_board(found, BOARD_PROFILES[profile], "pi@board", own_python=False)
    assert refused.value.hint
