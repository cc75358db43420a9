"""The progress of a run, and of other long work: one line in a terminal or below a notebook's cell."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from coordinator.rounds.round_record import reached_in_words
from emulator.console import ConsoleProgress

if TYPE_CHECKING:
    from typing_extensions import Self

    from emulator.run.execute import SimulationResult

WIDTH = 24  # characters of the bar
RECENT = 5  # rounds whose median seconds tell how long the others will take
SHOWN_IN_MINUTES_S = 100


class RunProgress:
    """Shows how far a run of `rounds` rounds is. `shown` None: in a terminal and in a notebook.

    `name` stands at the front of the line.
    """

    def __init__(self, name: str, rounds: int, *, shown: bool | None) -> None:
        self._name, self._rounds = name, rounds
        notebook = in_notebook()
        self._shown = (notebook or sys.stderr.isatty()) if shown is None else shown
        self._line: NotebookLine | ConsoleProgress = NotebookLine() if notebook else ConsoleProgress()

    def __enter__(self) -> Self:
        return self

    def busy(self, what: str) -> None:
        """What is prepared, before the first round."""
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
        """Method, bar, round, scores and the time that remains; the first round is no measure of the others."""
        done = len(run.records)
        last = sorted(run.real_seconds[1:][-RECENT:])
        full = round(WIDTH * done / self._rounds)
        found = (reached_in_words(run.records[i]) for i in reversed(range(done)))
        words = next((f"  {one}" for one in found if one), "")
        left = last[len(last) // 2] * (self._rounds - done) if last else 0.0
        shown = f"{left:.0f} s" if left < SHOWN_IN_MINUTES_S else f"{left / 60:.0f} min"
        rest = f"  {shown} left" if last and done < self._rounds else ""
        return f"{self._name}  {'█' * full}{'░' * (WIDTH - full)}  {done}/{self._rounds}{words}{rest}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()


@contextmanager
def show_work(title: str, *, shown: bool | None = None) -> Iterator[Callable[[str], None]]:
    """Show `title` and what our loggers tell, or what the caller gives to the function that is yielded.

    `shown` None: in a terminal and in a notebook.
    """
    notebook = in_notebook()
    if not ((notebook or sys.stderr.isatty()) if shown is None else shown):
        yield lambda _: None
        return
    with ExitStack() as stack:
        line: NotebookLine | ConsoleProgress = NotebookLine()
        if not notebook:  # a descriptor of its own: libraries are silenced by closing standard error for a while
            stream = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8")
            line = ConsoleProgress(stream=stack.enter_context(stream))
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
    """Give the messages of a logger to `busy`, its warnings to `say`, and to no other handler."""
    handler, before, propagate, handlers = logging.Handler(), log.level, log.propagate, log.handlers
    handler.emit = lambda record: (say if record.levelno >= logging.WARNING else busy)(record.getMessage())  # type: ignore[method-assign]
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False  # litert's libraries give the root logger a handler, which would repeat each line
    try:
        yield
    finally:
        log.handlers = handlers
        log.setLevel(before)
        log.propagate = propagate


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


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
