"""The script behind `make install` and `make demo`: nothing long is silent, and an activated environment is kept."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "install.py"


class Heard(io.StringIO):
    """A stream that tells when it has been written to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        self.written.set()


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_while_something_is_installed_stderr_says_what_goes_on_and_since_when(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    monkeypatch.setattr(script, "TELL_EVERY_S", 0.01)
    with script.told("uv installs into .demo"):
        assert heard.written.wait(30)
    first = heard.getvalue().splitlines()[0]
    assert re.fullmatch(r"\.\.\. uv installs into \.demo, since \d\d:\d\d:\d\d \(\d+ s\)", first)


def test_an_activated_environment_is_not_made_over_its_running_python(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying Python over itself fails with "Text file busy"."""
    made: list[Path] = []
    monkeypatch.setattr(script.venv, "create", lambda folder, **_: made.append(folder))
    monkeypatch.setattr(script, "with_uv", lambda *_: True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "here"))
    assert [script.install(tmp_path / name, []) for name in ("here", "there")] == [0, 0]
    assert made == [tmp_path / "there"]
