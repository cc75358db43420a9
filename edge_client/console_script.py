"""How a console script begins and ends.

Ctrl-C before a command begins, while its modules are imported, ends it at once, without a word: raised as
KeyboardInterrupt there, it would end in a traceback of Python's imports, or be lost inside one of them.
After the command the process leaves when Python's own exit functions have run and what files hold back is written.
Ctrl-C then, as the second of two, shortens that, without a word.
Taking the interpreter apart costs half a second with torch and seconds with the libraries that write TFLite files, and
frees what the system frees anyway.
This module is the first that a console script imports, and imports nothing of ours.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn, TextIO

EXIT_INTERRUPTED = 130
EXIT_UNWRITTEN = 120  # Python's own code where stdout cannot be flushed at the end


def run_console_script(module: str) -> NoReturn:
    """Import `module`, call its `main`, and end the process with the code that it returns or raises by SystemExit."""
    leave_at_once()
    last, alone = _LastWord(), _is_the_whole_program()
    if alone:
        atexit.register(last.leave)  # the first that is registered is the last that is called, after threads have ended
    try:
        last.code = importlib.import_module(module).main() or 0
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        last.code = ended.code or 0
    except KeyboardInterrupt:  # the second of two, while the command told what it keeps
        last.code = EXIT_INTERRUPTED
    if alone and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, last.leave)
    sys.exit(last.code)


def _is_the_whole_program() -> bool:
    """Whether no other program has called the command, as a test or a profiler does, which ends with its own code."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - has no other name
    names = set[str]()
    while frame is not None:
        names.add(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return all(name in {__name__, "__main__", "runpy"} or name.endswith(".__main__") for name in names)


def leave_at_once() -> None:
    """Let Ctrl-C end this process at once, until `interrupts_raise`; where it is ignored, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def interrupts_raise() -> None:
    """The command begins: Ctrl-C raises KeyboardInterrupt again, so that it can clean up."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _LastWord:
    """Leaves the process with the command's code; without one (an exception) Python ends as it does."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._process = os.getpid()

    def leave(self, *_of_a_signal: object) -> None:
        if self.code is None or os.getpid() != self._process:  # a forked child has an end of its own
            return
        code = self.code
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda *_: os._exit(code))
        if sys.stdout is not None:
            with suppress(BrokenPipeError, ValueError):  # its reader has left, or it is closed
                self._flush_output(sys.stdout)
        for file in _open_files():
            with suppress(Exception):  # as of a log on a full disk, which changes no code
                file.flush()
        os._exit(self.code)

    def _flush_output(self, stream: TextIO) -> None:
        try:
            stream.flush()
        except BrokenPipeError:
            raise
        except OSError as wrong:  # a full disk
            self.code = EXIT_UNWRITTEN
            with suppress(OSError):
                os.write(2, f"error: what was printed is incomplete: {wrong}\n".encode())


def _open_files() -> list[io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom]:
    """The files that are still open, as those of a user's own method: what they hold back would be lost."""
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    return [each for each in gc.get_objects() if type(each) in kinds]


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)  # nothing is made yet that needs an end
