"""The progress of a run, and of other long work: one line in a terminal or below a notebook's cell.

Where neither is, as in a script whose output goes into a file, lines on stderr: `PlainLines`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from coordinator.rounds.round_record import reached_in_words
from emulator.console import ConsoleProgress, Repeater
from export.silence import write_stderr

if TYPE_CHECKING:
    from typing_extensions import Self

    from emulator.run.execute import SimulationResult

WIDTH = 24  # characters of the bar
RECENT = 5  # rounds whose median seconds tell how long the others will take
SHOWN_IN_MINUTES_S = 100
SILENCE_S = 10.0  # the longest one of work that neither a terminal nor a notebook shows
_ONE_AT_A_TIME = threading.Lock()
_listened: dict[str, tuple[tuple[list[logging.Handler], int, bool], list[logging.Handler]]] = {}  # before, and by whom


class RunProgress:
    """Shows how far a run of `rounds` rounds is: a bar in a terminal and in a notebook, elsewhere `PlainLines`.

    `name` stands at the front of the line. `shown` False: nothing.
    """

    def __init__(self, name: str, rounds: int, *, shown: bool | None) -> None:
        self._name, self._rounds = name, rounds
        self._shown = shown is None or shown
        self._plain = not in_bar_place()
        self._line: NotebookLine | ConsoleProgress | PlainLines
        if self._plain:
            self._line = PlainLines(name)
        else:
            self._line = NotebookLine() if in_notebook() else ConsoleProgress()

    def __enter__(self) -> Self:
        if self._shown and isinstance(self._line, PlainLines):
            self._line.start()
        return self

    def begin(self) -> None:
        """One of several runs begins; a bar says it by itself."""
        if self._plain:
            self.say(f"{self._name}: begun")

    def end(self, run: SimulationResult) -> None:
        """One of several runs has ended."""
        if self._plain:
            words = reached_in_words(run.records[-1]) if run.records else ""
            self.say(", ".join(part for part in (f"{self._name}: done", words) if part))

    def busy(self, what: str) -> None:
        """What is prepared before the first round, or written after the last one."""
        if self._shown:
            self._line.busy(f"{self._name}  {what}")

    def say(self, text: str) -> None:
        """A line that stays, as about a folder that is used again."""
        if self._shown:
            self._line.say(text)

    def show(self, run: SimulationResult) -> None:
        """The bar after a round."""
        if self._shown:
            self._line.busy(self.text(run))

    def text(self, run: SimulationResult) -> str:
        """Method, bar, round, scores and the time that remains; the first round is no measure of the others.

        Scores of an earlier round, where this one was not tested, have its number.
        """
        done = len(run.records)
        last = sorted(run.real_seconds[1:][-RECENT:])
        full = round(WIDTH * done / self._rounds)
        found = ((i, reached_in_words(run.records[i])) for i in reversed(range(done)))
        at, told = next((one for one in found if one[1]), (0, ""))
        words = f"  {told}{'' if at == done - 1 else f' in round {at + 1}'}" if told else ""
        left = last[len(last) // 2] * (self._rounds - done) if last else 0.0
        shown = f"{left:.0f} s" if left < SHOWN_IN_MINUTES_S else f"{left / 60:.0f} min"
        rest = f"  {shown} left" if last and done < self._rounds else ""
        bar = "round" if self._plain else f"{'█' * full}{'░' * (WIDTH - full)} "
        return f"{self._name}  {bar} {done}/{self._rounds}{words}{rest}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()


@contextmanager
def show_work(title: str, *, shown: bool | None = None) -> Iterator[Callable[[str], None]]:
    """Show `title` and what our loggers tell, or what the caller gives to the function that is yielded.

    `shown` None: in a terminal and in a notebook; elsewhere `PlainLines` tells that the work goes on.
    """
    if shown is False:
        yield lambda _: None
        return
    with ExitStack() as stack:
        line: NotebookLine | ConsoleProgress | PlainLines
        if in_notebook():
            line = NotebookLine()
        elif (shown or in_bar_place()) and (place := _descriptor_of_stderr()) is not None:
            line = ConsoleProgress(stream=stack.enter_context(os.fdopen(place, "w", encoding="utf-8")))
        else:
            line = PlainLines(title)
            line.start()
        stack.callback(line.close)

        told: list[str] = []

        def busy(what: str) -> None:
            told.append(what)
            line.busy(f"{title}  {what}")

        for room in ("emulator", "export", "export.bundle"):  # a coordinator in this process tells of the last alone
            stack.enter_context(_listening(logging.getLogger(room), busy, line.say))
        yield busy
        if told:  # quick work shows nothing
            busy("done")


@contextmanager
def _listening(log: logging.Logger, busy: Callable[[str], None], say: Callable[[str], None]) -> Iterator[None]:
    """Give the messages of a logger to `busy`, its warnings to `say`, and to no other handler.

    Of several that listen, as in two threads, the last that began hears them; the logger is as before when all ended.
    """
    handler = logging.Handler()
    handler.emit = lambda record: (say if record.levelno >= logging.WARNING else busy)(record.getMessage())  # type: ignore[method-assign]
    with _ONE_AT_A_TIME:
        before, listeners = _listened.setdefault(log.name, ((log.handlers, log.level, log.propagate), []))
        listeners.append(handler)
        log.handlers = [handler]
        log.setLevel(logging.INFO)
        log.propagate = False  # litert's libraries give the root logger a handler, which would repeat each line
    try:
        yield
    finally:
        with _ONE_AT_A_TIME:
            listeners.remove(handler)
            log.handlers = listeners[-1:]
            if not listeners:
                log.handlers, level, log.propagate = before
                log.setLevel(level)
                del _listened[log.name]


class PlainLines:
    """Lines on stderr: what is said, and from `start` to `close` every SILENCE_S what goes on."""

    def __init__(self, text: str) -> None:
        self._text, self._began_s = text, time.monotonic()
        self._repeater = Repeater(SILENCE_S, self._tell)

    def start(self) -> None:
        self._repeater.start()

    def say(self, text: str) -> None:
        write_stderr(text)

    def busy(self, text: str) -> None:
        """What goes on now."""
        self._text = text

    def close(self) -> None:
        """Print no more. Idempotent."""
        self._repeater.stop()

    def _tell(self) -> None:
        self.say(f"{self._text}  (since {time.monotonic() - self._began_s:.0f} s)")


class NotebookLine:
    """One output of a notebook's cell that is written anew. See `ConsoleProgress`."""

    def __init__(self) -> None:
        self._handle: Any = None

    def say(self, text: str, *, mark: str = "") -> None:
        print(f"{mark} {text}".strip())  # noqa: T201 - in a notebook this is the cell's output

    def busy(self, text: str) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = cast("Any", display)({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)

    def close(self) -> None:
        """Leave the last line."""


def _descriptor_of_stderr() -> int | None:
    """One of our own: libraries are silenced by closing standard error for a while. None where it is no file."""
    try:
        return os.dup(sys.stderr.fileno())
    except (AttributeError, OSError):  # of a program without a console, or of a test that reads what is written
        return None


def in_bar_place() -> bool:
    """Whether a line that is written anew is seen: in a terminal and in a notebook."""
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
