"""A newer client: fetched when it is signed, installed whole or not at all, and given up when it does not report in."""

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
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.update import launcher
from edge_client.update.launcher import ReleaseRecord, choose_release
from edge_client.update.self_update import SelfUpdater, unpack_release
from tests.support.scripted_coordinator import DeviceStage, Script

ROOT = Path(__file__).parents[3]
OLD, NEW = "0.1.0", "0.2.0"


def site(version: str, *, works: bool = True) -> dict[str, bytes]:
    """A client that says its version, and reports in, if it works."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom edge_client import __version__\n"
        "folder = Path(os.environ['FEDCENTERS_RELEASES'])\nprint(__version__)\n"
    )
    if works:
        code += (
            f"sys.path.append({str(ROOT)!r})\n"
            "import importlib.util\n"
            f"file = {str(ROOT / 'edge_client/update/launcher.py')!r}\n"
            "spec = importlib.util.spec_from_file_location('launcher', file)\n"
            "launcher = importlib.util.module_from_spec(spec)\nsys.modules['launcher'] = launcher\n"
            "spec.loader.exec_module(launcher)\nrecord = launcher.read_record(folder)\n"
            "if record.trial == __version__: launcher.write_record(folder, launcher.ReleaseRecord(good=__version__))\n"
        )
    return {"edge_client/__init__.py": f'__version__ = "{version}"\n'.encode(), "edge_client/cli.py": code.encode()}


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


# -- how a device comes by it


@pytest.fixture
def stage(tmp_path: Path) -> DeviceStage:
    return DeviceStage(tmp_path, updates=SelfUpdater(tmp_path / "releases", running=OLD))


def offer(
    stage: DeviceStage, version: str = NEW, *, data: bytes | None = None, manifest: Manifest | None = None
) -> None:
    blob = pack_release(site(version), version) if data is None else data
    stage.lead(1, release={"version": version, "file": manifest or stage.blob(blob, "release")})


def recorded(stage: DeviceStage) -> ReleaseRecord:
    return launcher.read_record(stage.folder / "releases")


def test_a_signed_newer_release_is_fetched_put_on_trial_and_the_device_leaves(stage: DeviceStage) -> None:
    def script() -> Script:
        yield
        offer(stage)
        yield
        pytest.fail("the device did not leave")

    stage.play(script())
    assert recorded(stage) == ReleaseRecord(trial=NEW)
    assert (stage.folder / "releases" / NEW / "edge_client" / "cli.py").is_file()
    assert stage.last("st")["s"] == "off"


@pytest.mark.parametrize("case", ["older", "same", "unsigned", "failed", "other version", "no release", "no launcher"])
def test_anything_else_changes_nothing(stage: DeviceStage, case: str) -> None:
    def script() -> Script:
        yield
        data = pack_release(site(NEW), NEW)
        if case in ("older", "same"):
            offer(stage, {"older": "0.0.9", "same": OLD}[case])
        elif case == "unsigned":
            stage.blobs[manifest_of(data, "release", block=4096).sha256] = data
            offer(stage, manifest=manifest_of(data, "release", block=4096))
        elif case == "other version":
            offer(stage, "0.9.0", data=data)
        elif case == "no release":
            offer(stage, data=b"no release")
        else:
            offer(stage)
        yield 100
        stage.ask(stage.fit())
        yield

    if case == "failed":
        launcher.write_record(stage.folder / "releases", ReleaseRecord(failed=(NEW,)))
    if case == "no launcher":
        stage.updates = SelfUpdater(None, running=OLD)
    before = recorded(stage)
    stage.play(script())
    assert recorded(stage) == before
    assert stage.said("rdy")  # it lives on


def test_a_release_that_is_refused_is_told_once_and_not_with_each_record(
    stage: DeviceStage, caplog: pytest.LogCaptureFixture
) -> None:
    """A coordinator says its record in each round, and a broker may repeat it without an end."""
    unsigned = manifest_of(pack_release(site(NEW), NEW), "release", block=4096)
    stage.play_turns(*[lambda: offer(stage, manifest=unsigned)] * 3)
    told = [record.getMessage() for record in caplog.records if "cannot take release" in record.getMessage()]
    assert [line.partition(":")[0] for line in told] == [f"cannot take release {NEW}"]


def test_a_task_comes_before_a_release(stage: DeviceStage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        offer(stage)
        yield
        assert recorded(stage) == ReleaseRecord()
        stage.go()
        yield
        stage.ack("ok")
        yield
        pytest.fail("the device did not leave")

    stage.play(script())
    assert len(stage.said("rdy")) == 1
    assert recorded(stage) == ReleaseRecord(trial=NEW)


def test_a_round_that_ends_without_a_device_takes_nothing_of_the_release_that_it_fetches(stage: DeviceStage) -> None:
    """A slow device, which each round ended without, began to fetch it anew after each."""
    data = pack_release({**site(NEW), "edge_client/large.py": bytes(100_000)}, NEW)

    def script() -> Script:
        yield
        stage.serve = False
        offer(stage, data=data)
        yield
        stage.send_blocks(stage.last("get"))
        yield
        stage.ask(stage.fit())
        yield
        stage.tell("stop", run="r1", round=1, exchange=0)
        stage.serve = True
        yield 100
        pytest.fail("the device did not leave")

    stage.play(script())
    sha256 = manifest_of(data, "release").sha256
    assert [get["at"][0][0] for get in stage.said("get") if get["sha256"] == sha256].count(0) == 1
    assert recorded(stage) == ReleaseRecord(trial=NEW)


def test_a_release_on_trial_that_hears_its_coordinator_is_good_and_others_are_removed(stage: DeviceStage) -> None:
    """But no link to a folder, nor what it leads to."""
    folder, elsewhere = stage.folder / "releases", stage.folder / "elsewhere"
    for version in (OLD, NEW):
        (folder / version / "edge_client").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "linked").symlink_to(elsewhere)
    launcher.write_record(folder, ReleaseRecord(good=OLD, trial=NEW, starts=1))
    stage.updates = SelfUpdater(folder, running=NEW)
    stage.play(iter(()))
    assert recorded(stage) == ReleaseRecord(good=NEW)
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [NEW, "linked"]


def test_a_release_on_trial_gives_way_when_the_coordinator_stays_silent(tmp_path: Path) -> None:
    folder = tmp_path / "releases"
    launcher.write_record(folder, ReleaseRecord(trial=NEW, starts=1))
    updates = SelfUpdater(folder, running=NEW)
    assert not updates.overdue(0.0)
    assert not updates.overdue(899.0)
    assert updates.overdue(900.0)
    launcher.write_record(folder, ReleaseRecord(good=NEW))
    assert not updates.overdue(1_800.0)


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
