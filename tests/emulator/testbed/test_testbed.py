"""A finished run is reported, however its processes end."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coordinator.local_broker import Broker
from edge_client.errors import NetworkError
from edge_client.protocol.topics import check_federation
from emulator.console import ConsoleProgress
from emulator.stop_signals import Interrupted
from emulator.testbed import testbed, testbed_files
from emulator.testbed.monitor import FileTail
from emulator.testbed.processes import ChildProcess
from emulator.testbed.simulate_over_mqtt import federation_name
from emulator.testbed.testbed import run_testbed
from tests.support.patience import patience

PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, {handler})
print('up', flush=True)
time.sleep(1000)
"""
STAYS = PROGRAM.format(handler="signal.SIG_IGN")
FAILS = PROGRAM.format(handler="lambda *_: sys.exit(3)")
INTERRUPTS = PROGRAM.format(handler="lambda *_: os.kill(os.getppid(), signal.SIGINT) or sys.exit(0)")
# Like the coordinator: it takes a moment to leave, and a second signal ends it at once with an error.
LEAVES = PROGRAM.format(
    handler="lambda *_: signal.signal(signal.SIGTERM, lambda *_: os._exit(3)) and time.sleep(0.5) or sys.exit(0)"
)
PATIENCE_S = patience(200.0)


def started(it: testbed.Testbed, name: str, program: str) -> ChildProcess:
    """A process that has set its handler."""
    child = it.children.python(name, "-c", program)
    until_s = time.monotonic() + PATIENCE_S
    while "up" not in child.log.read_text() and time.monotonic() < until_s:
        pass
    return child


def test_results_come_before_the_end_of_the_processes_and_one_that_stays_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testbed, "LEAVE_TIMEOUT_S", 0.5)
    said = io.StringIO()

    def play(it: testbed.Testbed) -> str:
        left = started(it, "devices-onnx", FAILS)
        it.children.ask_to_leave([left])
        left.process.wait(PATIENCE_S)  # else it is killed as the other is
        started(it, "coordinator", STAYS)
        (it.folder / "summary.json").write_text("{}")
        it.progress.say("the table")
        return "done"

    result = run_testbed(tmp_path / "run", "embedded", ConsoleProgress(stream=said), play, federation="test")
    assert result == "done"
    table, warning = said.getvalue().index("the table"), said.getvalue().index("warning: ")
    assert table < warning
    assert "devices-onnx left with exit code 3" in said.getvalue()
    assert "coordinator was killed by SIGKILL" in said.getvalue()
    assert "The results are complete" in said.getvalue()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"summary.json", "logs"}
    assert (tmp_path / "run" / "logs" / "coordinator.log").read_text() == "up\n"


def test_a_process_that_is_leaving_gets_no_second_signal(tmp_path: Path) -> None:
    said = io.StringIO()

    def play(it: testbed.Testbed) -> None:
        started(it, "devices-onnx", LEAVES)
        started(it, "coordinator", LEAVES.replace("0.5", "2"))  # still leaving when the other has left

    run_testbed(tmp_path / "run", "embedded", ConsoleProgress(stream=said), play, federation="test")
    assert "warning" not in said.getvalue()


def test_a_signal_after_the_results_does_not_delete_them(tmp_path: Path) -> None:
    def play(it: testbed.Testbed) -> None:
        (it.folder / "summary.json").write_text("{}")
        started(it, "coordinator", INTERRUPTS)

    with pytest.raises(Interrupted):
        run_testbed(tmp_path / "run", "embedded", ConsoleProgress(stream=io.StringIO()), play, federation="test")
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_signal_that_came_while_the_broker_started_leaves_no_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []

    def start(folder: Path, prefer: str) -> Broker:
        os.kill(os.getpid(), signal.SIGINT)
        return Broker(url="mqtt://127.0.0.1:1", kind=f"{prefer} in {folder}", _stop=lambda: stopped.append(prefer))

    monkeypatch.setattr(testbed, "start_broker", start)
    with pytest.raises(Interrupted):
        run_testbed(tmp_path / "run", "here", ConsoleProgress(stream=io.StringIO()), lambda _: None, federation="test")
    assert stopped == ["here"]


@pytest.mark.broker
def test_a_broker_that_ends_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """The coordinator and the devices waited for it until the silence was too long: an hour of `simulate --broker`."""

    def play(it: testbed.Testbed) -> None:
        assert it.broker.pid is not None
        os.kill(it.broker.pid, signal.SIGKILL)
        it.follow(FileTail(it.folder / "metrics.jsonl"), "done", doing="waiting", silence_s=PATIENCE_S)

    with pytest.raises(NetworkError, match="mosquitto has ended"):
        run_testbed(tmp_path / "run", "mosquitto", ConsoleProgress(stream=io.StringIO()), play, federation="test")


@pytest.mark.parametrize("wrote", [True, False])
def test_an_interrupted_run_says_at_once_that_it_stops_and_where_its_rounds_are(tmp_path: Path, *, wrote: bool) -> None:
    """The key of a coordinator that never started stayed, and took the run's name."""
    said = io.StringIO()

    def play(it: testbed.Testbed) -> None:
        assert it.key
        testbed_files.write_reference(it.folder, np.zeros((1, 2)))
        if wrote:
            (it.folder / "metrics.jsonl").write_text("{}\n")
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run_testbed(tmp_path / "run", "embedded", ConsoleProgress(stream=said), play, federation="test")
    assert "interrupted: stopping what was started" in said.getvalue()
    assert (f"what was done is kept in {tmp_path / 'run'}" in said.getvalue()) == wrote
    kept = ["metrics.jsonl", "reference.npz", "signing.key", "signing.pub"] if wrote else []
    assert sorted(path.name for path in tmp_path.glob("run/*")) == kept
    assert (tmp_path / "run").exists() == wrote


def federation_of(folder: Path, broker: str, federation: str | Callable[[str], str]) -> str:
    """The federation of a run there."""

    def play(it: testbed.Testbed) -> str:
        (it.folder / "summary.json").write_text("{}")
        return it.federation

    return run_testbed(folder, broker, ConsoleProgress(stream=io.StringIO()), play, federation=federation)


def test_a_run_whose_folder_got_a_number_has_a_federation_of_its_own(tmp_path: Path) -> None:
    names = [federation_of(tmp_path / "run", "embedded", federation_name) for _ in range(2)]
    assert names == ["run", "run-2"]


@pytest.mark.parametrize("federation", ["demo", federation_name])
def test_runs_at_a_broker_that_is_there_already_have_federations_of_their_own(
    amqtt_broker: Broker, tmp_path: Path, federation: str | Callable[[str], str]
) -> None:
    """Two demos, or two runs of one name in other folders, cut each other's devices off."""
    names = {federation_of(tmp_path / where / "run", amqtt_broker.url, federation) for where in ("here", "there")}
    assert len(set(map(check_federation, names))) == 2
