"""pytest in a fork of a process that has imported the libraries already: `python -m tests.mutants.forks`.

Importing torch alone takes longer than most tests. The server reads lines of JSON from stdin, each a run:
`arguments` for pytest, `limit_s`, hypothesis' `profile` (tests/conftest.py), and `traced`, the files whose executed
lines the run reports, with their modules' names. It answers each with one line: `status` (pytest's, or 1 after
`limit_s` seconds) and, of each test that passed, its `seconds` and `lines` by module. What a run has imported of
LIBRARIES, the runs after it find imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

# what takes long to import and starts no thread
LIBRARIES = (
    *("numpy", "torch", "torch.export", "scipy.stats", "sklearn.cluster", "hypothesis.extra.numpy", "asyncio"),
    *("cryptography.x509", "paho.mqtt.client", "safetensors.numpy", "hypothesis"),
)
POLL_S = 0.02
BORING = 5_000  # lines of a function that were seen before: a test executes no others of it, and runs on untraced


class Lines:
    """A pytest plugin: which lines of some files each test executes, in any thread of this process."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files
        self._now: dict[str, set[int]] = defaultdict(set)
        self._old_news: Counter[int] = Counter()
        self._began = 0.0
        self.tests: dict[str, dict[str, Any]] = {}

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401 - a trace function
        name = self._files.get(frame.f_code.co_filename)
        if name is None or self._old_news[id(frame.f_code)] > BORING:
            return None
        if event == "line":
            if frame.f_lineno in self._now[name]:
                self._old_news[id(frame.f_code)] += 1
            else:
                self._now[name].add(frame.f_lineno)
                self._old_news[id(frame.f_code)] = 0
        return self._trace

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:  # noqa: ANN401 - what pytest hands on
        self._now.clear()
        self._old_news.clear()
        self._began = time.monotonic()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            if item.nodeid in self.tests:
                lines = {name: sorted(found) for name, found in self._now.items()}
                self.tests[item.nodeid] = {"seconds": time.monotonic() - self._began, "lines": lines}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.tests[report.nodeid] = {}
        elif report.failed:
            self.tests.pop(report.nodeid, None)


def run(arguments: list[str], traced: dict[str, str], answer: Path) -> int:
    """In the fork."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    lines = Lines(traced)
    early = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis was imported before pytest began
    status = int(pytest.main([*early, *arguments], plugins=[lines] if traced else []))
    answer.write_text(json.dumps([lines.tests, [name for name in LIBRARIES if name in sys.modules]]), encoding="utf-8")
    return status


def forked(arguments: list[str], limit_s: float, profile: str, traced: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = os.fork()
        if not child:
            status = 3
            os.environ["HYPOTHESIS_PROFILE"] = profile
            with contextlib.suppress(BaseException):
                status = run(arguments, traced, answer)
            os._exit(status)
        end = time.monotonic() + limit_s
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > end:
                break
            time.sleep(POLL_S)
        with contextlib.suppress(ProcessLookupError):  # what a test has started, too
            os.killpg(child, signal.SIGKILL)
        if not ended[0]:
            os.waitpid(child, 0)
            return {"status": 1, "tests": {}}
        tests, libraries = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else ({}, [])
        for name in libraries:
            importlib.import_module(name)
        return {"status": os.waitstatus_to_exitcode(ended[1]), "tests": tests}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        sys.stdout.write(json.dumps(forked(**asked)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
