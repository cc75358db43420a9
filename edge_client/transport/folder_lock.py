"""A lock on a folder that one process at a time may use: a device's state or cache, the coordinator's store."""

from __future__ import annotations

import fcntl
import logging
from pathlib import Path
from typing import IO

from edge_client.errors import ConfigError

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
