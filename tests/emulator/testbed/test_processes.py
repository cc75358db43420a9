"""Children never outlive their parent's wish, and a signal never stops work half-way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from coordinator.local_broker import terminate_process
from edge_client.errors import FedcentersError, NetworkError
from edge_client.run_cli import run_cli
from emulator.testbed.processes import ChildProcesses, DeferredSignals, Interrupted

FOREVER = "import time; print('up', flush=True); time.sleep(1000)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)"
)


def test_leaving_the_block_ends_every_child(tmp_path: Path) -> None:
    with DeferredSignals() as signals, ChildProcesses(tmp_path, signals) as children:
        pids = [children.python(f"child-{i}", "-c", FOREVER).process.pid for i in range(2)]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_thread_beside_the_main_one_may_start_children_too(tmp_path: Path) -> None:
    """`fc.federation` in a thread ended with Python's "signal only works in main thread"."""
    left: list[int] = []

    def work() -> None:
        with DeferredSignals() as signals, ChildProcesses(tmp_path, signals) as children:
            pid = children.python("child", "-c", FOREVER).process.pid
        left.append(int(psutil.pid_exists(pid)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert left == [0]


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()  # the handler is in place
    terminate_process(process, timeout_s=0.05)
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("code", "kind"), [(4, NetworkError), (1, FedcentersError)])
def test_a_child_that_fails_is_named_with_its_last_words(
    code: int, kind: type[FedcentersError], tmp_path: Path
) -> None:
    script = f"import sys; print('no broker there', file=sys.stderr); sys.exit({code})"
    with DeferredSignals() as signals, ChildProcesses(tmp_path, signals) as children:
        children.python("coordinator", "-c", script).process.wait()
        with pytest.raises(kind, match="coordinator left with exit code") as raised:
            children.check()
    assert "no broker there" in str(raised.value)
    assert "hint: " in str(raised.value)


def test_a_child_may_leave_in_good_order_where_that_is_allowed(tmp_path: Path) -> None:
    with DeferredSignals() as signals, ChildProcesses(tmp_path, signals) as children:
        child = children.python("short", "-c", "pass")
        child.process.wait()
        children.check(may_leave=[child])
        with pytest.raises(FedcentersError, match="exit code 0"):
            children.check()


def test_what_a_child_prints_goes_to_its_file(tmp_path: Path) -> None:
    with DeferredSignals() as signals, ChildProcesses(tmp_path, signals) as children:
        child = children.python("data", "-c", "print(6 * 7)", stdout=tmp_path / "out.json")
        child.process.wait()
    assert (tmp_path / "out.json").read_text() == "42\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_with_its_exit_code(signum: signal.Signals) -> None:
    with DeferredSignals(), pytest.raises(Interrupted) as raised:
        os.kill(os.getpid(), signum)
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
