"""What the operating system refuses while a result is written is a UsageError that names the place."""

from __future__ import annotations

import dataclasses
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedcenters as fc
from edge_client.errors import UsageError
from edge_client.protocol.nearest.router_file import write_router
from emulator.cli import app as emulator_app
from export.bundle.bundle_contents import find_run_reader
from export.cli import app as export_app
from tests.support.router_guides import GUIDE
from tests.support.size_limit import files_of_at_most

ROOT = Path(__file__).parents[3]
MOST_BYTES = 8_192  # of a file; a center's have 20,000


@pytest.fixture(scope="module")
def result() -> fc.Result:
    return fc.simulate(fc.FedAvg(local_steps=1), fleet=fc.fleets.digits(devices=3, groups=1), rounds=1)


def test_a_disk_that_takes_no_more_is_told_alike_by_export_and_save(result: fc.Result, tmp_path: Path) -> None:
    formats: Any = iter(["onnx"])  # which the bundle lacked, as a generator was read before
    assert "onnx" in repr(result.export(tmp_path / "before", formats=formats))  # so that the cache of programs has it
    for write in (lambda place: result.export(place, formats=("onnx",)), result.save):
        told = f"cannot write to {tmp_path / 'out'}: File too large"
        with files_of_at_most(MOST_BYTES), pytest.raises(UsageError, match=told):
            write(tmp_path / "out")


def test_a_run_that_does_not_fit_on_the_disk_leaves_the_saved_one_as_it_was(result: fc.Result, tmp_path: Path) -> None:
    """Its files were replaced one by one: the records were new, and the centers were gone."""
    place = result.save(tmp_path / "mine")
    before = contents_of(place)
    later = dataclasses.replace(result, seconds=99.0)
    with files_of_at_most(MOST_BYTES), pytest.raises(UsageError):
        later.save(place)
    assert contents_of(place) == before
    assert b'"seconds": 99.0' in contents_of(later.save(place))["fleet.json"]
    assert contents_of(place).keys() == before.keys()
    with files_of_at_most(MOST_BYTES), pytest.raises(UsageError):
        result.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_run_is_saved_over_one_of_which_a_folder_lies_on_another_disk(result: fc.Result, tmp_path: Path) -> None:
    """By a link, which only it replaces. That save ended with a run of which some files were new and some were gone."""
    place = result.save(tmp_path / "mine")
    before, there = contents_of(place), (place / "centers").replace(tmp_path / "disk")
    (place / "centers").symlink_to(there)
    assert contents_of(result.save(place)) == before
    assert not (place / "centers").is_symlink()
    assert list(there.iterdir())
    shutil.rmtree(place / "centers")
    (place / "centers").symlink_to(tmp_path / "away")  # that disk is gone
    assert contents_of(result.save(place)) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from shutil import copytree
from emulator.run.replaced_files import replaced_files
run, root, left = Path(sys.argv[1]), Path(sys.argv[2]), 0

def mortal(function):
    def step(*arguments, **more):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **more)
    return step

os.unlink, os.rmdir, os.mkdir = map(mortal, (os.unlink, os.rmdir, os.mkdir))
Path.rename, Path.replace, Path.rmdir = map(mortal, (Path.rename, Path.replace, Path.rmdir))
for number, place in enumerate(sorted(root.iterdir()), 1):
    child = os.fork()
    if child == 0:  # one save over a run, killed before the step of this number
        left = number
        with replaced_files(place) as new:
            copytree(run, new, dirs_exist_ok=True)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        print(number)
        break
"""


def draw(command: str, place: Path) -> None:
    assert CliRunner().invoke(emulator_app, [command, str(place)]).exit_code == 0


def test_a_save_that_is_killed_at_any_step_leaves_one_of_the_two_runs_whole(result: fc.Result, tmp_path: Path) -> None:
    """Between two of its seven renames it left a run without its checkpoint. A guide is of the first run alone."""
    new, old = dataclasses.replace(result, seconds=99.0).save(tmp_path / "new"), result.save(tmp_path / "old")
    (old / "newcomers").mkdir()
    (old / "newcomers" / "guide.json").write_bytes(write_router(GUIDE))
    before, after = contents_of(old), contents_of(new)
    places = [tmp_path / "runs" / f"{number:02}" for number in range(1, 60)]
    for place in places:
        shutil.copytree(old, place)
    command = [sys.executable, "-c", KILLED, str(new), str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    killed = places[: int(done.stdout)]
    half = [place for place in killed if (place / ".whole").is_dir()]
    drawers: list[Callable[[Path], object]] = [partial(draw, "report"), partial(draw, "figures")]
    readers = [find_run_reader, *drawers]  # they read a part of each run
    for number, read in enumerate(readers):
        place = shutil.copytree(half[len(half) // 2], tmp_path / f"read-{number}")
        read(place)
        assert contents_of(place).items() >= after.items()
    found = [fc.load(place).seconds for place in killed]
    for place, seconds in zip(killed, found, strict=True):
        there = {name: data for name, data in contents_of(place).items() if not name.startswith((".new", ".replaced"))}
        assert there == (after if seconds == 99.0 else before)
        assert contents_of(result.save(place)).keys() == after.keys()
    assert (found[0], found[-1]) == (result.seconds, 99.0)
    assert found == sorted(found)


def test_a_run_that_is_protected_from_writes_is_saved_as_one_that_is_not(result: fc.Result, tmp_path: Path) -> None:
    """The copies of its checkpoint were protected too: that save and each later one failed, but for root.

    So did the second save over a run of which a folder in a folder is protected, and each `fc.load` after it.
    """
    place = result.save(tmp_path / "mine")
    paths = [place, *place.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    copy = fc.load(place).save(tmp_path / "copy")
    for path in paths:
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    assert {path.name for path in copy.rglob("*")} >= {"checkpoint", "run.json"}
    assert all(path.stat().st_mode & stat.S_IWUSR for path in copy.rglob("*"))
    for number in (1.0, 2.0):
        for path in (copy / "centers").iterdir():
            path.chmod(0o555)
        dataclasses.replace(result, seconds=number).save(copy)
        assert fc.load(copy).seconds == number
    for path in copy.rglob("*"):  # what could not be removed
        path.chmod(path.stat().st_mode | stat.S_IRWXU)


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_without_a_folder_is_whole_where_its_last_checkpoint_has_no_room(
    result: fc.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A long run was lost at its end, with the disk of the temporary files full."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fill(so_far: fc.Result) -> bool:
        assert so_far.temporary is not None
        (so_far.temporary.path / "checkpoint.new").write_text("a file in the place of the folder")
        return True

    again = fc.simulate(
        fc.FedAvg(local_steps=1), fleet=fc.fleets.digits(devices=3, groups=1), rounds=3, on_round=fill, progress=False
    )
    assert (again.accuracy, len(again.run.records)) == (result.accuracy, 1)
    assert "no checkpoint could be written" in caplog.text
    assert fc.load(again.save(tmp_path / "saved")).accuracy == result.accuracy


def test_an_export_below_a_file_is_refused_before_anything_is_compiled(result: fc.Result, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UsageError, match=f"{tmp_path / 'file'} is no folder"):
        result.export(tmp_path / "file" / "centers")
    place = str(result.save(tmp_path / "run"))
    for command in (["bundle", place], ["quantize", place], ["site", place]):
        done = CliRunner().invoke(export_app, [*command, "--out", str(tmp_path / "file" / "x")])
        assert (done.exit_code, "is no folder" in done.stderr) == (2, True), done.output
    compile_it = ["program", "--model", "no:Net", "--input-shape", "4", "--classes", "2"]
    done = CliRunner().invoke(export_app, [*compile_it, "--out", str(tmp_path / "file" / "x")])
    assert (done.exit_code, "is no folder" in done.stderr) == (2, True), done.output


def test_a_run_in_a_relative_folder_keeps_its_place_when_the_working_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    fleet = fc.fleets.digits(devices=2, groups=1)
    asked: dict[str, Any] = {"fleet": fleet, "out": "runs", "name": "mine", "progress": False}
    rounds = fc.rounds(fc.Ditto(local_steps=1), rounds=2, **asked)
    next(rounds)
    monkeypatch.chdir("elsewhere")
    (result,) = rounds
    monkeypatch.chdir(tmp_path)
    again = fc.load("runs/mine")
    monkeypatch.chdir("elsewhere")
    test = fleet.cut(0).devices["device-00"].test
    assert test is not None
    x = test.x
    own = result.predict(x, device="device-00")
    assert own.tolist() == again.predict(x, device="device-00").tolist()
    assert again.split.devices["device-00"].train.x.shape == fleet.cut(0).devices["device-00"].train.x.shape
    assert list(Path().iterdir()) == []
    assert result.summary()["run"] == "runs/mine"


def test_a_refused_resume_leaves_the_settings_of_the_run(tmp_path: Path) -> None:
    fleet = fc.fleets.digits(devices=2, groups=1)
    asked: dict[str, Any] = {"fleet": fleet, "out": tmp_path, "name": "mine", "progress": False}
    method = fc.FedAvg(local_steps=1)
    fc.simulate(method, rounds=2, **asked)
    before = (tmp_path / "mine" / "config.toml").read_bytes()
    with pytest.raises(UsageError, match="has 2 rounds already, and this run shall have 1"):
        fc.simulate(method, rounds=1, resume=True, **asked)
    assert (tmp_path / "mine" / "config.toml").read_bytes() == before
    with pytest.raises(UsageError, match="has a run with num-rounds = 2, not 1"):
        fc.simulate(method, rounds=1, **asked)
    fc.simulate(method, rounds=3, resume=True, **asked)
    assert b"num-rounds = 3" in (tmp_path / "mine" / "config.toml").read_bytes()
