"""Files and names that last through a power cut."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path


def sync_files(folder: Path) -> None:
    """Make all files below a folder last, and their names in it."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            with (Path(root) / name).open("rb+") as file:
                os.fsync(file.fileno())
        sync_folder(Path(root))


def sync_folder(path: Path) -> None:
    """Make the names in a folder last."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_disk(read: Callable[..., bytes], *size: int) -> bytes:
    """What `read` gives; nothing of a bad sector: a check finds the damage."""
    try:
        return read(*size)
    except OSError as wrong:
        if wrong.errno != errno.EIO:
            raise
        return b""
