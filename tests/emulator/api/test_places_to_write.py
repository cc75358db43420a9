"""What the operating system refuses while a result is written is a UsageError that names the place."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedcenters as fc
from edge_client.errors import UsageError
from export.cli import app as export_app

MOST_BYTES = 8_192  # of a file; a center's have 20,000


@contextmanager
def small_files() -> Iterator[None]:
    """The system refuses to write more into a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def result() -> fc.Result:
    return fc.simulate(fc.FedAvg(local_steps=1), fleet=fc.fleets.digits(devices=3, groups=1), rounds=1)


def test_a_disk_that_takes_no_more_is_told_alike_by_export_and_save(result: fc.Result, tmp_path: Path) -> None:
    result.export(tmp_path / "before", formats=("onnx",))  # so that the cache of programs has it
    for write in (lambda place: result.export(place, formats=("onnx",)), result.save):
        with small_files(), pytest.raises(UsageError, match=f"cannot write to {tmp_path / 'out'}: File too large"):
            write(tmp_path / "out")


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
