"""Starts on a board that lacks something: a broker, a clock, room on the disk, or a part of a release."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_client.board.pack import pack_release
from edge_client.errors import ConfigError, NetworkError, ProtocolError
from edge_client.join import start_patiently
from edge_client.update import launcher
from edge_client.update.launcher import ReleaseRecord
from edge_client.update.self_update import TRIAL_PATIENCE_S, SelfUpdater
from tests.support.virtual_time import VirtualClock

OLD, NEW = "0.1.0", "0.2.0"
SYSTEMD_S = 300  # a start may take so long: TimeoutStartSec of the service


class BoardAtBoot:
    """`away_s`: until then a start fails with `wrong`, after ten seconds."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.folder, self.starts, self.away_s = VirtualClock(), folder, list[float](), 0.0
        self.wrong: Exception = NetworkError("no broker")
        launcher.write_record(folder, ReleaseRecord(good=OLD, trial=NEW, starts=1))

    def begin(self, updates: SelfUpdater) -> int:
        self.clock.time_s, self.starts = 0.0, []
        return start_patiently(self._start, updates, self.clock, wait=self._pass)

    def _start(self) -> int:
        self.starts.append(self.clock.time_s)
        if self.clock.time_s >= self.away_s:
            return 0
        self._pass(10.0)
        raise self.wrong

    def _pass(self, seconds: float) -> None:
        self.clock.time_s += seconds


@pytest.fixture
def board(tmp_path: Path) -> BoardAtBoot:
    return BoardAtBoot(tmp_path)


@pytest.mark.parametrize("wrong", [NetworkError("no broker"), ConfigError("the certificate is not yet valid")])
def test_a_broker_or_a_clock_that_comes_late_ends_no_trial(board: BoardAtBoot, wrong: Exception) -> None:
    """Three starts of ten seconds each are over before a server has booted."""
    board.wrong, board.away_s = wrong, 120.0
    assert board.begin(SelfUpdater(board.folder, running=NEW)) == 0
    assert launcher.read_record(board.folder).starts == 1


def test_one_that_does_not_come_ends_the_start_before_systemd_does(board: BoardAtBoot) -> None:
    board.away_s = 1e9
    with pytest.raises(NetworkError):
        board.begin(SelfUpdater(board.folder, running=NEW))
    assert board.starts[-1] > TRIAL_PATIENCE_S - 30
    assert board.clock.time_s < SYSTEMD_S - 30


def test_a_full_disk_makes_no_release_fail_that_has_heard_its_coordinator(board: BoardAtBoot) -> None:
    blocked = board.folder / f"{launcher.RECORD_FILE}.new"
    blocked.mkdir()  # where the record would be written
    updates = SelfUpdater(board.folder, running=NEW)
    updates.confirm()
    assert not updates.overdue(0.0)
    assert not updates.overdue(900.0)
    assert launcher.read_record(board.folder).trial == NEW
    blocked.rmdir()
    assert not updates.overdue(900.0)
    assert launcher.read_record(board.folder) == ReleaseRecord(good=NEW)


def test_what_is_not_on_trial_and_what_no_time_mends_ends_at_once(board: BoardAtBoot) -> None:
    board.away_s = 1e9
    for updates in (SelfUpdater(board.folder, running=OLD), SelfUpdater(None)):
        with pytest.raises(NetworkError):
            board.begin(updates)
        assert len(board.starts) == 1
    board.wrong = ProtocolError("another version")
    with pytest.raises(ProtocolError):
        board.begin(SelfUpdater(board.folder, running=NEW))
    assert len(board.starts) == 1


def flashed(folder: Path) -> Callable[[], str]:
    """A board with a flashed client and a newer good release; -> starts it and tells the version that runs."""
    site, releases = folder / "site" / "edge_client", folder / "state" / "releases"
    site.mkdir(parents=True)
    (folder / "launch.py").write_bytes(Path(launcher.__file__).read_bytes())
    code = b"from edge_client import __version__, part\nprint(__version__)\n"
    texts = {version: f'__version__ = "{version}"\n'.encode() for version in (OLD, NEW)}
    files = {"cli.py": code, "part.py": b"a = 1\n"}
    for name, data in {**files, "__init__.py": texts[OLD]}.items():
        (site / name).write_bytes(data)
    release = {f"edge_client/{name}": data for name, data in {**files, "__init__.py": texts[NEW]}.items()}
    SelfUpdater(releases, running=OLD).install(pack_release(release, NEW), NEW)
    launcher.write_record(releases, ReleaseRecord(good=NEW))

    def start() -> str:
        command = [sys.executable, str(folder / "launch.py")]
        env = {"STATE_DIRECTORY": str(folder / "state"), "PATH": os.environ["PATH"]}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd="/").stdout.strip()

    return start


@pytest.mark.parametrize("damage", ["lost", "cut", "changed", "list"])
def test_a_release_that_a_bad_card_damaged_gives_way_and_is_fetched_again(tmp_path: Path, damage: str) -> None:
    """It was good, so nothing else would ever end its failing starts."""
    start, releases = flashed(tmp_path), tmp_path / "state" / "releases"
    assert start() == NEW
    part = releases / NEW / "edge_client" / "part.py"
    damages: dict[str, Callable[[], object]] = {
        "lost": part.unlink,
        "cut": lambda: part.write_bytes(b""),
        "changed": lambda: part.write_bytes(b"\0 = 1\n"),
        "list": lambda: (releases / NEW / launcher.HASHES_FILE).write_bytes(b"\0\0"),
    }
    damages[damage]()
    assert start() == OLD
    assert SelfUpdater(releases, running=OLD).wanted(NEW)


@pytest.mark.parametrize("text", [None, b"", b"\xff", b'__version__ = "new"\n'])
def test_a_release_starts_also_where_the_flashed_client_lost_its_version(tmp_path: Path, text: bytes | None) -> None:
    """A bad card may damage that file, too; the board would start nothing at all."""
    start, flashed_version = flashed(tmp_path), tmp_path / "site" / "edge_client" / "__init__.py"
    flashed_version.unlink()
    if text is not None:
        flashed_version.write_bytes(text)
    assert start() == NEW


def test_a_release_that_cannot_be_written_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    """A file whose name is that of another one's folder fails as a full disk does, after a part was written."""
    names = ("edge_client/cli.py", "edge_client/part", "edge_client/part/a.py")
    with pytest.raises(OSError, match="part"):
        SelfUpdater(tmp_path, running=OLD).install(pack_release(dict.fromkeys(names, b"1"), NEW), NEW)
    assert list(tmp_path.iterdir()) == []
