"""Children never outlive their parent's wish."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from coordinator.local_broker import terminate_process
from edge_client.errors import FedcentersError, NetworkError
from emulator.stop_signals import DeferredSignals
from emulator.testbed.processes import ChildProcesses

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
