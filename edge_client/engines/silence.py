"""A quiet descriptor 2 for runtimes that greet on it and have no switch for that."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()  # one descriptor for all threads


@contextmanager
def silence_stderr() -> Iterator[None]:
    """What is written on file descriptor 2 meanwhile goes nowhere."""
    with _LOCK:
        kept = os.dup(2)
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(null)
