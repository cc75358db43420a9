"""What a child process does once the process that started it has ended: a process that is killed ends no child."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

PARENT_CHECK_S = 1.0


def stop_with_parent(parent: int, *others: int) -> None:
    """Send SIGTERM to `others` and to this process once its parent has ended, which gives it another parent."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    for pid in (*others, os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
