"""What a child process does once the process that started it has ended: a process that is killed ends no child."""

from __future__ import annotations

import os
import signal
import time

PARENT_CHECK_S = 1.0


def stop_with_parent(parent: int) -> None:
    """Send SIGTERM to this process once its parent has ended, which gives it another parent."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os.kill(os.getpid(), signal.SIGTERM)
