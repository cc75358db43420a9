"""Ctrl-C before a command begins, while its modules are imported: it ends at once, without a word.

Raised as KeyboardInterrupt there, it would end in a traceback of Python's imports, or be lost inside one of them.
This module is the first that a console script imports, and imports nothing of ours.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 130


def leave_at_once() -> None:
    """Let Ctrl-C end this process at once, until `interrupts_raise`; where it is ignored, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def interrupts_raise() -> None:
    """The command begins: Ctrl-C raises KeyboardInterrupt again, so that it can clean up."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)  # nothing is made yet that needs an end
