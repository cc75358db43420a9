"""A newer client: installed whole or not at all, and given up when it does not report in."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import edge_client
from coordinator.identity.release_signature import release_version
from edge_client.board.pack import pack_release
from edge_client.cli import main
from edge_client.errors import Malformed
from edge_client.update import launcher
from edge_client.update.launcher import ReleaseRecord, choose_release
from edge_client.update.self_update import SelfUpdater, unpack_release
from tests.support.releases import NEW, OLD, ROOT, site


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A flashed board: launch.py and site, and a state folder."""
    for name, data in site(OLD).items():
        path = tmp_path / "opt" / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "opt" / "launch.py").write_bytes((ROOT / "edge_client/update/launcher.py").read_bytes())
    return tmp_path


def start(home: Path) -> str:
    """One start of the service; -> the version that ran."""
    command = [sys.executable, str(home / "opt" / "launch.py")]
    env = {"STATE_DIRECTORY": str(home / "state"), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd="/")
    assert done.stdout, done.stderr
    return done.stdout.strip()


# -- which release starts


def test_a_release_that_reports_in_stays_and_one_that_does_not_gives_way(home: Path) -> None:
    assert start(home) == OLD
    updates = SelfUpdater(home / "state" / "releases", running=OLD)
    updates.install(pack_release(site(NEW), NEW), NEW)
    assert [start(home) for _ in range(5)] == [NEW] * 5
    after = SelfUpdater(home / "state" / "releases", running=NEW)
    after.install(pack_release(site("0.3.0", works=False), "0.3.0"), "0.3.0")
    assert [start(home) for _ in range(5)] == ["0.3.0"] * 3 + [NEW] * 2
    assert not after.wanted("0.3.0")
    assert after.wanted("0.4.0")


def test_a_release_on_trial_that_loses_a_byte_on_the_card_is_fetched_again_and_not_for_ever(home: Path) -> None:
    """It was noted as failed at the first start; then it was fetched once more when no start was left to it."""
    updates = SelfUpdater(releases := home / "state" / "releases", running=OLD)

    def install(version: str, *, damaged: bool) -> None:
        assert updates.wanted(version)
        updates.install(pack_release(site(version), version), version)
        if damaged:
            (releases / version / "edge_client" / "cli.py").write_bytes(b"")

    for version in ("0.3.0", "0.3.0", "0.3.0", NEW):  # a trial has three starts
        install(version, damaged=True)
        assert start(home) == OLD
    assert not updates.wanted("0.3.0")
    install(NEW, damaged=False)
    assert start(home) == NEW


@pytest.mark.parametrize("flashed", ["0.5.0", NEW])
def test_what_was_flashed_since_starts_in_place_of_an_older_or_equal_release(home: Path, flashed: str) -> None:
    SelfUpdater(home / "state" / "releases", running=OLD).install(pack_release(site(NEW), NEW), NEW)
    assert start(home) == NEW
    (home / "opt/site/edge_client/__init__.py").write_text(f'__version__ = "{flashed}"\n')
    (home / "opt/site/edge_client/cli.py").write_text("print('flashed')\n")
    assert start(home) == "flashed"


@pytest.mark.parametrize("damage", ["", "{", '{"good": 1}', '{"good":"../x","trial":"../../x","starts":0,"failed":[]}'])
def test_a_damaged_record_starts_the_flashed_client(home: Path, damage: str) -> None:
    (home / "state" / "releases").mkdir(parents=True)
    (home / "state" / "releases" / launcher.RECORD_FILE).write_text(damage)
    assert start(home) == OLD


def test_a_trial_that_cannot_be_counted_does_not_begin_and_what_is_known_to_work_starts(home: Path) -> None:
    releases = home / "state" / "releases"
    SelfUpdater(releases, running=OLD).install(pack_release(site(NEW), NEW), NEW)
    assert start(home) == NEW
    SelfUpdater(releases, running=NEW).install(pack_release(site("0.3.0"), "0.3.0"), "0.3.0")
    (releases / f"{launcher.RECORD_FILE}.new").mkdir()  # where the record would be written
    assert start(home) == NEW
    (releases / NEW / "edge_client" / "cli.py").unlink()
    assert start(home) == OLD


VERSIONS = st.sampled_from(["", "1", "2", "3"])
RECORDS = st.builds(ReleaseRecord, good=VERSIONS, trial=VERSIONS, starts=st.integers(0, 5))


@given(record=RECORDS, here=st.sets(VERSIONS))
def test_what_is_started_is_there_and_a_trial_ends(record: ReleaseRecord, here: set[str]) -> None:
    for _ in range(4):
        chosen, record = choose_release(record, here.__contains__)
        assert chosen == "" or chosen in here
    assert record.trial == ""
    assert chosen in ("", record.good)
    assert choose_release(record, here.__contains__) == (chosen, record)


# -- killed at any step

KILLED = """
import os, signal, sys
from pathlib import Path
from edge_client.update.self_update import SelfUpdater
archive, root = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
left = 0

def mortal(function):
    def step(*arguments, **more):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **more)
    return step

os.fsync, os.mkdir, os.open, os.replace = map(mortal, (os.fsync, os.mkdir, os.open, os.replace))
Path.replace, Path.open = mortal(Path.replace), mortal(Path.open)
for number in range(1, 100):
    child = os.fork()
    if child == 0:  # one board, killed before the step of this number
        left = number
        SelfUpdater(root / f"{number:02}", running="0.1.0").install(archive, "0.2.0")
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        print(number)
        break
"""


def test_a_board_killed_at_any_step_of_an_installation_starts_and_can_install_again(tmp_path: Path) -> None:
    archive, boards = tmp_path / "release.tar", tmp_path / "boards"
    archive.write_bytes(pack_release(site(NEW), NEW))
    boards.mkdir()
    command = [sys.executable, "-c", KILLED, str(archive), str(boards)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    folders = [boards / f"{number:02}" for number in range(1, int(done.stdout) + 1)]
    chosen = []
    for folder in folders:
        here = {path.parent.parent.name for path in folder.glob("*/edge_client/cli.py")}
        chosen.append(choose_release(launcher.read_record(folder), here.__contains__)[0])
        if chosen[-1] == NEW:
            assert sorted(p.name for p in (folder / NEW / "edge_client").iterdir()) == ["__init__.py", "cli.py"]
        SelfUpdater(folder, running=OLD).install(archive.read_bytes(), NEW)
        assert launcher.read_record(folder).trial == NEW
    assert len(chosen) > 10  # otherwise nothing was killed
    assert chosen == sorted(chosen)  # the old one, and from one step on the new one
    assert (chosen[0], chosen[-1]) == ("", NEW)


# -- what a release may be


def tar(**members: bytes | tarfile.TarInfo) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as out:
        for name, content in members.items():
            header = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name.replace("__", "/"))
            data = b"" if isinstance(content, tarfile.TarInfo) else content
            header.size = len(data)
            out.addfile(header, io.BytesIO(data))
    return made.getvalue()


def special(name: str, kind: bytes) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, "/etc/passwd"
    return header


NOTE = json.dumps({"version": NEW}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no tar" * 200,
        tar(RELEASE=NOTE),
        tar(edge_client__cli=b""),
        tar(RELEASE=b"{}", x=special("edge_client/cli.py", tarfile.REGTYPE)),
        tar(RELEASE=b'{"version": "1;rm"}', x=special("edge_client/cli.py", tarfile.REGTYPE)),
        tar(RELEASE=NOTE, x=special("edge_client/cli.py", tarfile.SYMTYPE)),
        tar(RELEASE=NOTE, x=special("edge_client/cli.py", tarfile.LNKTYPE)),
        tar(RELEASE=NOTE, x=special("edge_client/../../cli.py", tarfile.REGTYPE)),
        tar(RELEASE=NOTE, x=special("/etc/passwd", tarfile.REGTYPE)),
        tar(RELEASE=NOTE, x=special("sitecustomize.py", tarfile.REGTYPE)),
        pack_release(site(NEW), NEW)[:1_000],
    ],
)
def test_what_is_no_release_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(Malformed, match="bad_program"):
        unpack_release(data)
    with pytest.raises(Malformed):
        SelfUpdater(tmp_path, running=OLD).install(data, NEW)
    assert launcher.read_record(tmp_path) == ReleaseRecord()


@pytest.mark.parametrize(
    "member",
    [
        special("edge_client/more.py", tarfile.SYMTYPE),
        special("edge_client/more.py", tarfile.LNKTYPE),
        special("edge_client/more", tarfile.DIRTYPE),
        special("edge_client/more", tarfile.FIFOTYPE),
        special("edge_client/../more.py", tarfile.REGTYPE),
        special("edge_client/../../../../etc/cron.d/more", tarfile.REGTYPE),
    ],
    ids=lambda member: f"{member.name} {member.type.decode()}",
)
def test_a_whole_release_with_one_member_more_is_refused_for_that_member(member: tarfile.TarInfo) -> None:
    release = {"RELEASE": NOTE, "edge_client__cli.py": b""}
    assert "edge_client/cli.py" in unpack_release(tar(**release))
    with pytest.raises(Malformed, match="has no place in it"):
        unpack_release(tar(**release, more=member))


def test_a_release_under_another_version_than_it_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Malformed, match=r"not version 0\.3\.0"):
        SelfUpdater(tmp_path, running=OLD).install(pack_release(site(NEW), NEW), "0.3.0")


def test_the_command_packs_this_client_the_same_twice(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        assert main(["release", str(tmp_path / name)]) == 0
    data = (tmp_path / "a.tar").read_bytes()
    assert data == (tmp_path / "b.tar").read_bytes()
    assert release_version(data) == edge_client.__version__
    found = unpack_release(data)
    assert found["edge_client/runtime/client.py"] == (ROOT / "edge_client" / "runtime" / "client.py").read_bytes()
    assert "edge_client/board/flash.py" not in found


def test_a_record_is_on_the_disk_before_it_has_its_name_and_so_is_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, record = [], tmp_path / launcher.RECORD_FILE
    seen = lambda fd: flushed.append((Path(f"/proc/self/fd/{fd}").readlink().name, record.exists()))  # noqa: E731
    monkeypatch.setattr(os, "fsync", seen)
    launcher.write_record(tmp_path, ReleaseRecord(good=OLD))
    assert flushed == [(record.name + ".new", False), (tmp_path.name, True)]


def test_without_a_launcher_there_are_no_updates() -> None:
    updates = SelfUpdater.from_environment({})
    assert not updates.wanted("99")
    updates.confirm()
    assert not updates.overdue(1e9)
    assert SelfUpdater.from_environment({launcher.RELEASES_VARIABLE: "/nonexistent"}).wanted("99")
