"""A lock on a folder that one process at a time may use: a device's state, the coordinator's store."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from edge_client.errors import ConfigError


def lock_folder(
    folder: Path, *, by: str, hint: str = "stop that one, or use another folder", wait: bool = False
) -> IO[str]:
    """Lock `folder`/lock until the file is closed; the kernel releases the lock when the process dies.

    Makes the folder. Where it is locked already, by another `by`, it waits, or else raises ConfigError; OSError when it
    cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as taken:
        file.close()
        raise ConfigError(f"{folder} is in use by another {by}", hint=hint) from taken
    except OSError:
        file.close()
        raise
    return file
