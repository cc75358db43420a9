"""Ports of loopback for the tests.

The kernel gives a port to whatever asks for any, also one that a test has chosen and its process has not opened yet.
So these are below those that the kernel gives (Linux: from 32,768), and each worker of a test run has its own.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count

FIRST, EACH = 10_100, 1_400  # a browser opens no page at 10080
WORKERS = 16
_next = count(37 * os.getpid())  # two test runs on one machine begin at different places


def free_port() -> int:
    """One that nothing listens on, and that was not given before."""
    first = FIRST + EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS)
    while True:
        port = first + next(_next) % EACH
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
