"""A lock on a folder that one process at a time may use: a device's state or cache, the coordinator's store."""

from __future__ import annotations

import errno
import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from edge_client.errors import ConfigError, DiskFull

log = logging.getLogger(__name__)


def lock_folder(
    folder: Path, *, by: str, hint: str = "stop that one, or use another folder", wait: bool = False
) -> IO[str]:
    """Lock `folder`/lock until the file is closed; the kernel releases the lock when the process dies.

    Makes the folder. Where it is locked already, by another `by`, it says so and waits, or else raises ConfigError;
    OSError when it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("w")
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as taken:
            if not wait:
                raise ConfigError(f"{folder} is in use by another {by}", hint=hint) from taken
            log.warning("%s is in use by another %s: waiting for its end", folder, by)
            fcntl.flock(file, fcntl.LOCK_EX)
    except (ConfigError, OSError):
        file.close()
        raise
    return file


def lock_state(folder: Path) -> IO[str]:
    """Keep the state folder for this process until the file is closed. Raises ConfigError."""
    with refuse_unwritable():
        hint = "stop that one first: a broker keeps one connection per device; or name another --state to visit a site"
        return lock_folder(folder, by="client of this device", hint=hint)


def lock_cache(folder: Path) -> IO[str]:
    """Keep the state folder's cache for this visit of a site, after other visits. Raises ConfigError."""
    with refuse_unwritable():
        return lock_folder(folder / "cache", by="nearest", wait=True)


@contextmanager
def refuse_unwritable() -> Iterator[None]:
    """An OSError inside becomes DiskFull or ConfigError, of the state folder."""
    try:
        yield
    except OSError as wrong:
        told = f"cannot write to the state folder: {wrong}"
        if wrong.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(told, hint="free disk space") from wrong
        raise ConfigError(told, hint="set `state` to a folder that this user may write to") from wrong
