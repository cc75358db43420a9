"""Progress is alive everywhere, and colour is for terminals only."""

from __future__ import annotations

import io

import pytest

from emulator.console import REPEAT_INTERVAL_S, ConsoleProgress


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
