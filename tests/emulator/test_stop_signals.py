"""A signal never stops work half-way, and is never lost."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from edge_client.run_cli import run_cli
from emulator.stop_signals import DeferredSignals, Interrupted


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_with_its_exit_code(signum: signal.Signals) -> None:
    before = signal.signal(signum, signal.SIG_DFL)  # under nohup SIGHUP is ignored
    try:
        with DeferredSignals(), pytest.raises(Interrupted) as raised:
            os.kill(os.getpid(), signum)
    finally:
        signal.signal(signum, before)
    assert raised.value.exit_code == 128 + signum


def test_a_signal_waits_for_the_end_of_held_work() -> None:
    done = []
    with DeferredSignals() as signals, pytest.raises(Interrupted):  # noqa: PT012 - the order is the promise
        with signals.hold():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("work")
        done.append("more")
    assert done == ["work"]


def test_a_second_signal_does_not_disturb_the_leaving() -> None:
    with DeferredSignals():
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with DeferredSignals():
        pass
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """A run over MQTT that nohup began ended with the terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with DeferredSignals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class StoppedDestructor:
    """An object whose destructor meets a SIGTERM."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_inside_a_destructor_is_not_lost() -> None:
    def action() -> None:
        with DeferredSignals():
            StoppedDestructor()
            threading.Event().wait(60)

    assert run_cli(action) == 128 + signal.SIGTERM
