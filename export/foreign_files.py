"""Files in a folder that may come from other people: plain files alone, and no more of them than is expected."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for its writer; Windows has no pipes in folders


def read_plain_file(path: Path, most: int) -> bytes:
    """A file's bytes; of one that has more than `most`, so many and one.

    Raises OSError, also for a pipe or a device, which might never end.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | NO_WAIT)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        return file.read(min(found.st_size, most) + 1)
