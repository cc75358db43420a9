"""New files of a run in the place of those in its folder: all of them, or none.

They are written into folder/.new/, which becomes folder/.whole/ once it is on the disk: by this one name the run is
replaced. Its files go to their places then, and `finish_replacing` moves those that a process left that was killed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from edge_client.durable_files import sync_files, sync_folder
from emulator.config import GUIDE_FILE
from export.folder_lock import locked_folder
from export.output_paths import writing_to

WHOLE, ASIDE = ".whole", ".replaced"


@contextmanager
def replaced_files(folder: Path) -> Iterator[Path]:
    """A place for new files of a run, which replace those in its folder; the caller holds the folder."""
    new = folder / ".new"
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    try:
        new.mkdir()
        yield new
        (new / GUIDE_FILE).parent.mkdir(exist_ok=True)  # a guide that is there is of the centers that go
        for there in (folder / made.name for made in new.iterdir()):
            if there.is_dir() and not there.is_symlink() and not os.access(there, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))  # it could not be moved
        sync_files(new)
        new.rename(folder / WHOLE)
        finish_replacing(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def finish_replacing(folder: Path) -> None:
    """Move the files of folder/.whole/, if it is there, to their places; the caller holds the folder."""
    whole = folder / WHOLE
    if not whole.is_dir():
        return
    sync_folder(folder)
    for left in folder.glob(f"{ASIDE}*"):
        shutil.rmtree(left, ignore_errors=True)
    aside = Path(mkdtemp(prefix=ASIDE, dir=folder))  # another where one cannot be removed, as of protected folders
    for made in sorted(whole.iterdir()):
        there = folder / made.name
        if there.is_dir() or (made.is_dir() and os.path.lexists(there)):  # no rename replaces it
            there.replace(aside / made.name)
        made.replace(there)
    with suppress(OSError):  # it has a guide
        (folder / GUIDE_FILE).parent.rmdir()
    sync_folder(folder)
    whole.rmdir()
    shutil.rmtree(aside, ignore_errors=True)


def finish_replaced_run(folder: Path) -> None:
    """Finish what a save that was killed left; another process that saves is waited for. Raises UsageError."""
    if (folder / WHOLE).is_dir():
        with writing_to(folder), locked_folder(folder, wait=True):
            finish_replacing(folder)
