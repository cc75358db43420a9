"""What is raised can be told to the other side."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from edge_client.errors import Malformed, describe_error


def test_a_refusal_has_one_word_as_its_code_and_its_message_begins_with_it() -> None:
    refused = Malformed("bad_field", "n is 0")
    assert (refused.code, refused.message) == ("bad_field", "bad_field: n is 0")
    with pytest.raises(ValueError, match="'n is 0' is no code"):
        Malformed("n is 0", "bad_field")


def test_what_the_operating_system_refuses_has_a_hint_that_fits(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        (tmp_path / "nope" / "x.html").write_text("")
    assert describe_error(missing.value).endswith("x.html'\n\nhint: make the folder, or correct the path")
    with pytest.raises(IsADirectoryError) as folder:
        tmp_path.write_text("")
    assert describe_error(folder.value).endswith("hint: that is a folder: name a file")
    full = OSError(errno.ENOSPC, "No space left on device")
    assert describe_error(full) == "this machine: [Errno 28] No space left on device\n\nhint: free disk space"
    assert "hint: free disk space, or check the rights" in describe_error(OSError("of a library"))


def test_ipython_shows_what_is_wrong_without_frames_of_ours(tmp_path: Path) -> None:
    """In a notebook twenty of them stood above the message."""
    shell = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "--ipython-dir", str(tmp_path)]
    ours = "def ours(): raise ConfigError('no broker', hint='start it')"
    cell = f"from edge_client.errors import ConfigError\n{ours}\nours()"
    done = subprocess.run([*shell, "-c", cell], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == "ConfigError: no broker\n\nhint: start it\n"


def test_ipython_shows_the_users_line_of_an_error_of_no_kind(tmp_path: Path) -> None:
    """As of a metric of the user's that failed in a worker: the message alone was shown."""
    shell = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "--ipython-dir", str(tmp_path)]
    cell = "from edge_client.errors import FedcentersError\ndef mine():\n    raise FedcentersError('failed')\nmine()"
    done = subprocess.run([*shell, "-c", cell], capture_output=True, text=True, check=False)
    assert "line 3, in mine\n    raise FedcentersError('failed')" in done.stdout + done.stderr


def test_too_little_memory_is_no_bug() -> None:
    assert describe_error(MemoryError()).startswith("this machine: too little memory\n\nhint: use fewer")
