"""`join` ends its clients whenever a signal comes."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import pytest

from edge_client.errors import EXIT_INTERRUPTED, EXIT_OK
from edge_client.join import run_clients
from edge_client.runtime.client import Client

Trace = Callable[[FrameType, str, Any], Any]
MOST_LINES = 500
MOMENT_S = 0.2


class InterruptedClient:
    """Sends a thread of the process, by default the main one, a signal, and lives until it is stopped."""

    config = None

    def __init__(self, number: int, taker: Callable[[], threading.Thread] = threading.main_thread) -> None:
        self._number, self._taker, self._over = number, taker, threading.Event()

    def run(self) -> None:
        if self._taker is not threading.main_thread:
            self._over.wait(MOMENT_S)  # in which the main thread begins to wait
        signal.pthread_kill(self._taker().ident or 0, self._number)
        self._over.wait()

    def stop(self) -> None:
        self._over.set()


def signal_at(nth: int, number: int, sent: list[int]) -> Trace:
    """A trace that sends a signal before the nth line that the main thread runs with a handler of `join` in place."""
    lines, before = itertools.count(), signal.getsignal(number)

    def trace(_frame: FrameType, event: str, _value: Any) -> Trace:  # noqa: ANN401 - see sys.settrace
        if event == "line" and signal.getsignal(number) != before and next(lines) == nth:
            sent.append(nth)
            signal.raise_signal(number)
        return trace

    return trace


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, EXIT_OK), (signal.SIGINT, EXIT_INTERRUPTED)])
def test_a_signal_at_any_moment_ends_the_clients(number: int, code: int) -> None:
    """Where it came as the process began to wait, its handler waited for a lock of that very thread, for ever."""
    for nth in range(MOST_LINES):
        client, sent = cast("Client", InterruptedClient(number)), list[int]()
        before = sys.gettrace()
        sys.settrace(signal_at(nth, number, sent))
        try:
            found = run_clients([client], quiet=True)
        finally:
            sys.settrace(before)
        assert found == code
        if not sent:
            break  # it was over before
    assert 10 < nth < MOST_LINES - 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, EXIT_OK), (signal.SIGINT, EXIT_INTERRUPTED)])
def test_a_signal_that_another_thread_takes_ends_the_clients(number: int, code: int) -> None:
    """Python calls the handler in the main thread, and does not wake it."""
    client = cast("Client", InterruptedClient(number, threading.current_thread))
    assert run_clients([client], quiet=True) == code
