"""Signals that ask this process to end, delivered at safe moments."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to leave; `exit_code` is 128 + its number, 130 for Ctrl-C."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class DeferredSignals:
    """The `signals` raise `Interrupted` in the main thread, once, and never inside `hold()`.

    A second signal must not interrupt the cleanup that the first one started. One that was ignored before, as SIGHUP
    under nohup, stays ignored.
    """

    def __init__(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self._signals = signals
        self._depth, self._waiting, self._leaving = 0, 0, False
        self._before: dict[int, Any] = {}
        self._hook = sys.unraisablehook

    def __enter__(self) -> DeferredSignals:  # noqa: PYI034 - typing.Self needs 3.11
        if threading.current_thread() is not threading.main_thread():  # Python hands signals to that one alone
            return self
        heard = [s for s in self._signals if signal.getsignal(s) is not signal.SIG_IGN]
        self._before = {s: signal.signal(s, self._on_signal) for s in heard}
        self._hook, sys.unraisablehook = sys.unraisablehook, self._on_ignored
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:  # else the hook is another thread's
            sys.unraisablehook = self._hook
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._depth:
            self._waiting = signum
        elif not self._leaving:
            self._leaving = True
            raise Interrupted(signum)

    def _on_ignored(self, ignored: sys.UnraisableHookArgs) -> None:
        """The signal came inside a destructor, where Python drops what is raised; `run_cli` repeats it."""
        self._leaving &= not issubclass(ignored.exc_type, Interrupted)
        self._hook(ignored)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Work that must not stop half-way; a signal that came meanwhile is raised at the end."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._waiting and not self._depth:
            signum, self._waiting = self._waiting, 0
            self._on_signal(signum, None)
