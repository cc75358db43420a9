"""One process at a time has a folder: a kernel's lock, which ends with the process and leaves no file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked_folder(folder: Path, *, wait: bool, shared: bool = False) -> Iterator[None]:
    """Hold a folder that is there, and `wait` for the process that has it, or else raise BlockingIOError.

    Several may hold it `shared`, while no process has it alone.
    Where the system or the file system cannot lock a folder, nothing is held.
    """
    if os.name != "posix":  # elsewhere a folder cannot be opened
        yield
        return
    import fcntl

    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(opened)
