"""Progress is alive everywhere, and colour is for terminals only."""

from __future__ import annotations

import io
import sys

import pytest

from emulator import console
from emulator.console import REPEAT_INTERVAL_S, ConsoleProgress
from export.silence import suppress_output


class TalkClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_stamped_with_the_seconds_since_the_start() -> None:
    out, clock = io.StringIO(), TalkClock()
    progress = ConsoleProgress(stream=out, clock=clock)
    clock.now_s += 2.5
    progress.say("ready", mark="ok")
    assert out.getvalue() == "  2.5 s  ok ready\n"


def test_without_a_terminal_long_work_is_mentioned_now_and_then() -> None:
    out, clock = io.StringIO(), TalkClock()
    progress = ConsoleProgress(stream=out, clock=clock)
    for _ in range(120):
        clock.now_s += 0.1
        progress.busy("compiling")
    assert out.getvalue().count("compiling") == int(12 / REPEAT_INTERVAL_S)


def test_progress_needs_no_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program without a console has none: `fc.federation` ended in an error of Python."""
    monkeypatch.setattr(sys, "stderr", None)
    progress = ConsoleProgress()
    with progress.during("compiling the model") as now:
        now("compiling the model: onnx step")
    progress.say("ready")


def test_one_long_call_is_told_at_once_and_again_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "REPEAT_INTERVAL_S", 0.001)
    out = io.StringIO()
    progress = ConsoleProgress(stream=out)
    with progress.during("compiling the model") as now:
        assert out.getvalue().splitlines()[0].endswith("  compiling the model")
        now("compiling the model: onnx step")
        while "... compiling the model: onnx step" not in out.getvalue():
            pass
    told = out.getvalue()
    progress.busy("the next")
    assert "onnx step" not in out.getvalue().removeprefix(told)


def test_a_line_is_seen_while_a_compiler_is_silenced(capfd: pytest.CaptureFixture[str]) -> None:
    with suppress_output():
        ConsoleProgress().say("still at work")
    assert "still at work" in capfd.readouterr().err


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colours_unless_no_color_is_set(
    no_color: str, *, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    out = Terminal()
    progress = ConsoleProgress(stream=out)
    progress.say("done", mark="ok")
    progress.busy("more")
    progress.close()
    progress.close()
    assert "done" in out.getvalue()
    assert ("\x1b[1;32m" in out.getvalue()) is coloured


def test_brackets_are_shown_as_they_are() -> None:
    out = Terminal()
    ConsoleProgress(stream=out).say("devices per center [4, 4, 4] [red]")
    assert "[4, 4, 4] [red]" in out.getvalue()
