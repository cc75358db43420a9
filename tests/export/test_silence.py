"""What an exporter prints is silenced, and what other threads say meanwhile is not."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from export import silence
from export.silence import suppress_output, write_stderr


def test_a_line_of_another_thread_comes_through_the_silence(capfd: pytest.CaptureFixture[str]) -> None:
    silent, said = threading.Event(), threading.Event()

    def export() -> None:
        with suppress_output(), suppress_output():
            silent.set()
            os.write(2, b"a library talks\n")
            said.wait(30)
        os.write(2, b"afterwards\n")

    thread = threading.Thread(target=export)
    thread.start()
    silent.wait(30)
    write_stderr("pi-1 joined")
    said.set()
    thread.join()
    write_stderr("done")
    assert capfd.readouterr().err == "pi-1 joined\nafterwards\ndone\n"


def test_other_loggers_are_heard_while_libraries_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    with suppress_output():
        with suppress_output():
            logging.getLogger().warning("a library talks")
        logging.getLogger("coordinator.runtime").warning("pi-1 left")
        logging.getLogger("torch.onnx.exporter").warning("a library talks")
        logging.getLogger().warning("a library talks")
    logging.getLogger().warning("afterwards")
    assert caplog.messages == ["pi-1 left", "afterwards"]


def test_a_silence_empties_what_the_loggers_remember_once_and_once_more_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own: Callable[[], None] = logging.root.manager._clear_cache  # type: ignore[attr-defined]
    emptied = list[None]()
    monkeypatch.setattr(logging.root.manager, "_clear_cache", lambda: emptied.append(own()), raising=False)  # type: ignore[func-returns-value]
    with suppress_output():
        assert not logging.getLogger("torch.onnx.exporter").isEnabledFor(logging.ERROR)
        assert len(emptied) == 1
    assert logging.getLogger("torch.onnx.exporter").isEnabledFor(logging.ERROR)
    assert len(emptied) == 2


def test_a_thread_that_waits_for_another_one_leaves_the_levels_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lock:
        def __enter__(self) -> None:
            waits.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def export() -> None:
        with suppress_output():
            pass

    waits, lock, log = threading.Event(), threading.RLock(), logging.getLogger("torch.onnx")
    monkeypatch.setattr(silence, "_one_at_a_time", Lock())
    before, second = log.level, threading.Thread(target=export)
    with suppress_output():
        waits.clear()
        second.start()
        waits.wait(30)
    second.join()
    assert log.level == before


def test_two_threads_that_export_at_once_leave_the_descriptors_as_they_were(capfd: pytest.CaptureFixture[str]) -> None:
    together = threading.Barrier(2)

    def export() -> None:
        together.wait()
        for _ in range(20):
            with suppress_output():
                os.write(1, b"a library talks\n")

    threads = [threading.Thread(target=export) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(1, b"afterwards\n")
    assert capfd.readouterr().out == "afterwards\n"


def test_progress_is_told_once_also_where_a_library_gave_the_root_logger_a_handler() -> None:
    code = (
        "import logging; from export.silence import show_progress; show_progress('export');"
        "logging.basicConfig(); logging.getLogger('export.bundle.writer').info('writing center 1 of 2')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "writing center 1 of 2\n"


def test_no_library_takes_the_warnings_of_a_command_away_or_lets_control_characters_into_them() -> None:
    code = """if True:
        import logging
        from export.command_line import make_app
        from export.silence import suppress_output
        app = make_app("a", "b")
        app.command("it")(lambda: None)
        app(["it"], standalone_mode=False)
        with suppress_output():
            logging.info("litert's libraries say this, which gives the root logger a handler")
            logging.getLogger("another.library").warning("a library talks")
            logging.getLogger("coordinator.runtime").warning("the broker is gone")
        logging.getLogger("edge_client.runtime").warning("pi-1 says \x1b[2J")
    """
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stderr == "the broker is gone\npi-1 says \\x1b[2J\n"


CLOSED = """
import os, sys
os.close(2)
sys.stderr = None
from export.silence import suppress_output
with suppress_output():
    os.write(1, b"a library talks")
print("heard")
"""
NO_STDOUT = """
import sys
sys.stdout = None
from export.silence import suppress_output
with suppress_output():
    pass
"""


@pytest.mark.parametrize(("program", "heard"), [(CLOSED, "heard\n"), (NO_STDOUT, "")])
def test_a_program_without_standard_streams_can_silence_a_library(program: str, heard: str) -> None:
    """Where stderr was closed, stdout became the null device for good."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (heard, "")
