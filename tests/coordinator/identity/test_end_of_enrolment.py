"""`enrol` ends whenever a signal comes, also while it begins to answer a request."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from coordinator.identity.enrolment_server import run_enrolment_server
from coordinator.identity.provision_plan import ProvisionPlan
from coordinator.identity.provisioning import Provisioner
from coordinator.local_broker import free_port
from tests.support.guarded_broker import FEDERATION, HOSTS, now

Trace = Callable[[FrameType, str, Any], Any]
MOST_LINES = 100


def signal_in_a_start(nth: int, sent: list[int]) -> Trace:
    """A trace that sends SIGTERM before the nth line of Thread.start that the main thread runs under a new handler."""
    lines, before = iter(range(MOST_LINES)), signal.getsignal(signal.SIGTERM)

    def trace(frame: FrameType, event: str, _value: Any) -> Trace:  # noqa: ANN401 - see sys.settrace
        inside = frame.f_code is threading.Thread.start.__code__
        if inside and event == "line" and signal.getsignal(signal.SIGTERM) != before and next(lines) == nth:
            sent.append(nth)
            signal.raise_signal(signal.SIGTERM)
        return trace

    return trace


def ask_and_end(port: int) -> None:
    """A request that is no TLS, and a SIGTERM once it is over."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as link:
        link.sendall(b"no TLS")
        while link.recv(1024):
            pass
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def begin(client: threading.Thread, trace: Trace, _told: str) -> None:
    """The listener says that it serves: its client comes, and the trace begins."""
    client.start()
    sys.settrace(trace)


@pytest.mark.timeout(60)
def test_a_signal_while_a_request_begins_ends_the_listener(tmp_path: Path) -> None:
    """Its handler notes the signal alone, so that it waits for no lock of the thread that is being started."""
    port = free_port()
    plan = ProvisionPlan(federation=FEDERATION, hosts=HOSTS, enrol_port=port)
    Provisioner(folder=tmp_path, plan=plan, now=now()).write_infrastructure()
    for nth in range(MOST_LINES):
        sent, client = list[int](), threading.Thread(target=ask_and_end, args=(port,), daemon=True)
        before, handler = sys.gettrace(), signal.getsignal(signal.SIGTERM)
        try:
            run_enrolment_server(tmp_path, "127.0.0.1", tell=partial(begin, client, signal_in_a_start(nth, sent)))
        finally:
            sys.settrace(before)
        client.join()
        signal.signal(signal.SIGTERM, handler)
        if not sent:
            break  # the request had begun before
    assert 5 < nth < MOST_LINES - 1
