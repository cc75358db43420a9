"""What a simulated run or a table had on its disk stays there, when the disk is full or the power fails in a write."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from emulator.api.kept_model import keep_parts
from emulator.experiments.cells import CellRun, CellStorage, read_finished, run_cells
from emulator.experiments.plan import parse_plan
from emulator.experiments.table import replace_section
from emulator.run.folder import FILE, write_settings
from tests.support.router_guides import GUIDE
from tests.support.sample_messages import SCHEMA

TABLE = """
title = "A table of digits"
source = "none"
metrics = ["accuracy"]
rounds = 1
seeds = 1
[[columns]]
name = "digits"
data-set = "digits"
partition = "iid"
model = "digits-mlp"
devices = 2
[[rows]]
name = "FedAvg"
method = "fedavg"
paper = ["1"]
"""


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process may grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        (FILE, lambda path: write_settings(path.parent, {"rounds": 20})),
        ("RESULTS.md", lambda path: replace_section(path, "mine", "| 1 |")),
    ],
    ids=["settings of a run", "table in a document"],
)
def test_a_full_disk_leaves_what_a_file_had(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    """A run that went on to more rounds lost its settings, and a user's document became an empty file."""
    path = tmp_path / name
    path.write_text("kept = 1\n")
    with no_room(), pytest.raises(OSError, match="too large"):
        write(path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "kept = 1\n")]


def test_a_table_in_a_linked_document_is_written_where_the_link_leads(tmp_path: Path) -> None:
    (tmp_path / "linked.md").symlink_to(tmp_path / "RESULTS.md")
    replace_section(tmp_path / "linked.md", "mine", "| 1 |")
    assert "| 1 |" in (tmp_path / "RESULTS.md").read_text()


def test_a_document_keeps_its_rights_and_a_new_one_has_the_usual(tmp_path: Path) -> None:
    """A document that only its owner could read became one for all."""
    kept, new, usual = (tmp_path / name for name in ("kept.md", "new.md", "usual.md"))
    usual.touch()
    kept.touch()
    kept.chmod(0o600)
    for document in (kept, new):
        replace_section(document, "mine", "| 1 |")
    assert [stat.S_IMODE(file.stat().st_mode) for file in (kept, new)] == [0o600, stat.S_IMODE(usual.stat().st_mode)]


def test_a_full_disk_leaves_no_half_of_what_devices_teach(tmp_path: Path) -> None:
    """A run that went on would have taken it for a file that was written to its end."""
    with no_room(), pytest.raises(OSError, match="too large"):
        keep_parts(tmp_path, named=False, model=None, schema=SCHEMA, guide=lambda: GUIDE)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_cell_is_on_the_disk_before_its_checkpoint_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut soon after leaves an empty file, and the hours of the cell are lost."""
    job, place = CellRun(cell=parse_plan("t", TABLE).cells[0], seed=0), CellStorage(data=None, out=tmp_path)
    flushed, sync = dict[int, bool](), os.fsync  # inode -> whether there was the checkpoint then

    def noted(descriptor: int) -> None:
        flushed[os.fstat(descriptor).st_ino] = job.started(place).is_dir()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    assert run_cells([job], place, ["accuracy"], lambda *_: None) == {}
    assert read_finished(job, place) is not None
    assert [flushed.get(file.stat().st_ino) for file in (job.path(place), job.path(place).parent)] == [True, True]
    assert not job.started(place).exists()
