"""One process at a time writes a run's folder: two that did would mix their checkpoints, or remove each other's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_client.errors import ConfigError


class FolderInUse(ConfigError):
    """Another run writes the folder."""


@contextmanager
def hold_folder(folder: Path, *, hint: str) -> Iterator[None]:
    """Hold a folder that is there; the kernel lets it go when the process dies, and no file is left in it.

    Where the file system cannot lock a folder, nothing is held. Raises FolderInUse when another run holds it.
    """
    if os.name != "posix":  # elsewhere a folder cannot be opened
        yield
        return
    import fcntl

    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as taken:
                raise FolderInUse(f"{folder} is in use by a run that has not ended", hint=hint) from taken
        yield
    finally:
        os.close(opened)
