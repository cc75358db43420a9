"""The script behind `make install` and `make demo`: nothing long is silent."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
import threading
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "install.py"


class Heard(io.StringIO):
    """A stream that tells when it has been written to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        self.written.set()


def test_while_something_is_installed_stderr_says_what_goes_on_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("install_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    monkeypatch.setattr(script, "TELL_EVERY_S", 0.01)
    with script.told("uv installs into .demo"):
        assert heard.written.wait(30)
    first = heard.getvalue().splitlines()[0]
    assert re.fullmatch(r"\.\.\. uv installs into \.demo, since \d\d:\d\d:\d\d \(\d+ s\)", first)
