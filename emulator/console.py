"""Progress of a long command on stderr: lines that stay, and one status line.

On a terminal the status line is a spinner with the elapsed time; elsewhere it is printed every few seconds. Colours are
used on a terminal only, and not with NO_COLOR; the text says the same as a colour.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from edge_client.printable import printable, printable_line
from export.silence import write_stderr

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

REPEAT_INTERVAL_S = 5.0  # without a terminal: the longest silence


class Repeater:
    """Calls `tell` every `seconds` in a thread, from `start` to `stop`: the work beside it may be one long call."""

    def __init__(self, seconds: float, tell: Callable[[], None]) -> None:
        self._seconds, self._tell, self._ended = seconds, tell, threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self._tell()


class ConsoleProgress:
    """Progress of one command, stamped with the seconds since its start."""

    def __init__(self, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock, self._start = clock, clock()
        self._last = self._start
        self._terminal = self._stream is not None and self._stream.isatty()  # a program without a console has none
        self._console: Console | None = None
        self._status: Status | None = None
        self._lock = threading.RLock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start

    def say(self, text: str, *, mark: str = "") -> None:
        """Print a line. `mark` is "", "ok" or "FAIL" and stands before the text."""
        with self._lock:
            self._last, text = self._clock(), printable(text)
            stamp, word = f"{self.elapsed_s:5.1f} s", f"{mark} " if mark else ""
            if not self._terminal:
                self._print(f"{stamp}  {word}{text}")
                return
            from rich.text import Text

            colour = {"ok": "bold green", "FAIL": "bold red"}.get(mark, "")
            self._screen().print(Text.assemble((stamp, "dim"), "  ", (word, colour), text))

    def busy(self, text: str) -> None:
        """Update the status line. Frequent calls are cheap."""
        with self._lock:
            if self._terminal:
                from rich.text import Text

                line = Text(f"{self.elapsed_s:5.1f} s  {printable_line(text)}")
                if self._status is None:
                    self._status = self._screen().status(line)
                    self._status.start()
                else:
                    self._status.update(line)
            elif self._clock() - self._last >= REPEAT_INTERVAL_S:
                self.say(f"... {text}")

    @contextmanager
    def during(self, text: str) -> Iterator[Callable[[str], None]]:
        """Say what one long call does now; a thread tells that it goes on. What is yielded changes the words."""
        doing = text

        def now(what: str) -> None:
            nonlocal doing
            doing = what
            self.busy(what)

        repeater = Repeater(REPEAT_INTERVAL_S, lambda: self.busy(doing))
        self.say(text)
        repeater.start()
        try:
            yield now
        finally:
            repeater.stop()
            self.close()

    def _print(self, line: str) -> None:
        if self._stream is sys.stderr:
            write_stderr(line)  # also while a compiler's own output is silenced
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the status line. Idempotent."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _screen(self) -> Console:
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=self._stream, highlight=False)
        return self._console
