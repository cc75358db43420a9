"""The progress of a run: the bar's text, and the lines on stderr where no terminal is."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcenters as fc
from emulator.api import progress
from emulator.api.progress import RunProgress, show_work
from export.silence import show_progress, suppress_output


def test_the_bar_has_method_rounds_accuracy_and_the_seconds_that_remain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = fc.FedAvg(local_steps=2)
    runs = list(fc.rounds(method, fleet=fc.fleets.digits(devices=3), rounds=2))
    assert capsys.readouterr() == ("", "")  # no terminal, no notebook
    monkeypatch.setattr(progress, "in_bar_place", lambda: True)
    bar = RunProgress(repr(method), 4, shown=False)
    first, second = bar.text(runs[0].run), bar.text(runs[1].run)
    assert first.startswith("FedAvg(local_steps=2)  ██████░░░")
    assert first.endswith(f"1/4  accuracy {runs[0].accuracy:.1%}")  # the first round is no measure of the others
    assert "2/4" in second
    assert second.endswith(" s left")
    assert not second.startswith("FedAvg(local_steps=2)  ████████████████████████")
    whole = RunProgress(repr(method), 2, shown=False).text(runs[1].run)
    assert "█" * 24 in whole
    assert "left" not in whole


def test_a_score_of_an_earlier_round_is_not_told_as_that_of_this_one() -> None:
    facts: dict[str, Any] = {"fleet": fc.fleets.digits(devices=3), "rounds": 4, "evaluate_every": 2}
    told = [RunProgress("FedAvg", 4, shown=False).text(r.run) for r in fc.rounds(fc.FedAvg(local_steps=2), **facts)]
    assert "accuracy" not in told[0]
    assert "in round" not in told[1]
    assert re.search(r"3/4  accuracy \d+\.\d% in round 2  ", told[2])
    assert "in round" not in told[3]


def test_after_the_last_round_the_line_tells_that_the_folder_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a model of the user's own that takes seconds, in which the line stood at the last round."""
    told: list[str] = []
    monkeypatch.setattr(progress.PlainLines, "busy", lambda _, text: told.append(text))
    fc.simulate(fc.FedAvg(local_steps=1), fleet=fc.fleets.digits(devices=3), rounds=1, out=tmp_path)
    assert [text.split("  ")[1] for text in told[-3:]] == ["round 1/1", "writing the run's folder", "round 1/1"]


def test_the_devices_of_a_users_own_samples_are_told_to_teach_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(progress.PlainLines, "busy", lambda _, text: told.append(text))
    x, y = np.eye(8, dtype=np.float32)[np.arange(24) % 8], np.arange(24) % 2
    fleet = fc.fleet((x, y), by=np.arange(24) % 3, test=0.25)
    fc.simulate(fc.FedAvg(local_steps=1), fleet=fleet, rounds=1, out=tmp_path)
    assert "writing the run's folder, with what its devices teach `nearest`" in [text.split("  ")[1] for text in told]


def test_without_a_terminal_long_work_is_told_on_stderr_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENCE_S", 0.01)
    told: list[str] = []

    def until_told(so_far: fc.Result) -> None:
        words = f"FedAvg(local_steps=1)  round {len(so_far.history)}/2  accuracy {so_far.accuracy:.1%}"
        while words not in "".join(told):
            out, err = capfd.readouterr()
            assert out == ""
            told.append(err)

    fc.simulate(fc.FedAvg(local_steps=1), fleet=fc.fleets.digits(devices=3), rounds=2, on_round=until_told)
    with show_work("exporting centers"), suppress_output():
        while not re.search(r"exporting centers  \(since \d+ s\)", "".join(told)):
            told.append(capfd.readouterr().err)
    capfd.readouterr()
    fc.simulate(fc.FedAvg(local_steps=1), fleet=fc.fleets.digits(devices=3), rounds=1, progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_work_is_done_where_stderr_is_no_file(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program without a console has none; a reader of what is written may have no descriptor."""
    monkeypatch.setattr(sys, "stderr", stream)
    with show_work("compiling", shown=True) as busy:
        busy("the step")
    with RunProgress("FedAvg", 2, shown=None) as bar:
        bar.say("a folder is used again")
    assert stream is None or "a folder is used again" in stream.getvalue()


def test_without_a_terminal_the_line_names_the_part_that_is_worked_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENCE_S", 0.01)
    told: list[str] = []
    with show_work("exporting centers") as busy:
        busy("reading the centers")
        logging.getLogger("export.compiler.containers").info("compiling: %s", "litert step")
        while not re.search(r"exporting centers  compiling: litert step  \(since \d+ s\)", "".join(told)):
            told.append(capfd.readouterr().err)


def test_long_work_is_told_once_in_a_process_that_has_a_coordinator(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log, shown = logging.getLogger("export.bundle"), list[str]()
    for name, value in {"handlers": [], "propagate": True, "level": logging.NOTSET}.items():
        monkeypatch.setattr(log, name, value)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(progress.NotebookLine, "busy", lambda _, text: shown.append(text))
    show_progress("export.bundle")  # as a coordinator's service does
    with show_work("exporting"):
        logging.getLogger("export.bundle.writer").info("writing center %d of %d", 1, 3)
    assert shown == ["exporting  writing center 1 of 3", "exporting  done"]
    assert capfd.readouterr().err == ""
    assert len(log.handlers) == 1  # the service's own


def test_two_works_at_once_leave_the_loggers_as_they_were() -> None:
    """As two threads that compile: the first one ends before the second."""
    log = logging.getLogger("export")
    before = (list(log.handlers), log.level, log.propagate)
    first, second = show_work("one"), show_work("two")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert len(log.handlers) == 1  # the second one's
    second.__exit__(None, None, None)
    assert (list(log.handlers), log.level, log.propagate) == before


def test_long_work_tells_what_it_does_on_a_line_that_silenced_libraries_do_not_close(
    capfd: pytest.CaptureFixture[str],
) -> None:
    log = logging.getLogger("export")
    before = list(log.handlers)  # `fedcenters-export` in this process leaves its own
    with show_work("exporting centers", shown=True), suppress_output():
        logging.getLogger("export.bundle.writer").info("writing center %d of %d", 1, 3)
        logging.getLogger("export.bundle.writer").warning("too large")
    told = capfd.readouterr().err
    assert "too large" in told
    assert log.handlers == before


def test_a_notebook_keeps_one_output_of_long_work_and_none_of_quick_work(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(progress.NotebookLine, "busy", lambda _, text: shown.append(text))
    with show_work("nearest center"):
        pass
    assert shown == []
    with show_work("nearest center") as busy:
        busy("reading the centers")
        logging.getLogger("emulator.run_centers").info("the devices teach")
    assert shown == [f"nearest center  {what}" for what in ("reading the centers", "the devices teach", "done")]
