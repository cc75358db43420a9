"""The progress bar of a run: one line in a terminal or below a notebook's cell."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from emulator.console import ConsoleProgress

if TYPE_CHECKING:
    from typing_extensions import Self

    from emulator.api.result import Result

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

    def show(self, result: Result) -> None:
        """The bar after a round."""
        if self._shown:
            self._line.busy(self.text(result))

    def text(self, result: Result) -> str:
        """Method, bar, round, accuracy and the time that remains; the first round is no measure of the others."""
        done = len(result.run.records)
        last = sorted(result.run.real_seconds[1:][-RECENT:])
        full = round(WIDTH * done / self._rounds)
        accuracy = "" if result.accuracy is None else f"  accuracy {result.accuracy:.1%}"
        left = last[len(last) // 2] * (self._rounds - done) if last else 0.0
        shown = f"{left:.0f} s" if left < SHOWN_IN_MINUTES_S else f"{left / 60:.0f} min"
        rest = f"  {shown} left" if last and done < self._rounds else ""
        return f"{self._name}  {'█' * full}{'░' * (WIDTH - full)}  {done}/{self._rounds}{accuracy}{rest}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()


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
