"""How a console script begins and ends: Ctrl-C while it is imported, its exit code, what comes before it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_client.toml_files import parse_toml

ROOT = Path(__file__).parents[2]
SCRIPTS = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
INTERRUPTED_IMPORT = """
import signal, sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "edge_client.run_cli":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
sys.argv = ["command", "--help"]
from {module} import {name}
sys.exit({name}())
"""
LEAVING = "import signal; from edge_client.console_script import leave_at_once; "
COMMAND = "from edge_client.run_cli import run_cli; import sys; sys.exit(run_cli({action}, interrupted='stopped'))"
INTERRUPT = "lambda: signal.raise_signal(signal.SIGINT)"
FULL = Path("/dev/full")


def ended(code: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_while_a_command_is_imported_ends_it_quietly_with_130(script: str) -> None:
    module, _, name = SCRIPTS[script].partition(":")
    assert ended(INTERRUPTED_IMPORT.format(module=module, name=name)) == (130, "", "")


def test_once_the_command_runs_ctrl_c_lets_it_clean_up() -> None:
    assert ended(f"{LEAVING} leave_at_once(); {COMMAND.format(action=INTERRUPT)}") == (130, "", "stopped\n")


def test_a_process_that_ignores_ctrl_c_goes_on_to_ignore_it() -> None:
    ignoring = "signal.signal(signal.SIGINT, signal.SIG_IGN); leave_at_once(); signal.raise_signal(signal.SIGINT); "
    assert ended(f"{LEAVING} {ignoring} {COMMAND.format(action=INTERRUPT)}") == (0, "", "")


WORDS_AT_THE_END = """
import atexit, sys, threading, time
from edge_client.console_script import run_console_script

class LoudWhenFreed:
    def __del__(self):
        print("taken apart")

def main():
    main.kept = LoudWhenFreed()
    atexit.register(print, "exit function")
    print("command")
    threading.Thread(target=lambda: (threading.Event().wait(0.05), print("thread"))).start()
    {ending}

sys.modules["command"] = sys.modules["__main__"]
run_console_script("command")
"""


@pytest.mark.parametrize(
    ("ending", "code"), [("return 7", 7), ("return None", 0), ("sys.exit(3)", 3), ("sys.exit()", 0)]
)
def test_threads_and_exit_functions_come_before_the_end_and_nothing_is_taken_apart(ending: str, code: int) -> None:
    said = "command\nthread\nexit function\n"
    assert ended(WORDS_AT_THE_END.format(ending=ending)) == (code, said, "")


def test_a_word_in_place_of_a_code_and_an_error_end_as_python_ends_them() -> None:
    code, _, told = ended(WORDS_AT_THE_END.format(ending="sys.exit('a word')"))
    assert (code, told) == (1, "a word\n")
    code, _, told = ended(WORDS_AT_THE_END.format(ending="raise ValueError('wrong')"))
    assert code == 1
    assert told.rstrip().endswith("ValueError: wrong")


def test_a_file_that_a_users_own_code_left_open_is_written_whole(tmp_path: Path) -> None:
    """It was empty: nothing closes the files of a module where nothing is taken apart."""
    names = [tmp_path / "log.txt", tmp_path / "rows.bin"]
    opened = f"main.files = open({str(names[0])!r}, 'w'), open({str(names[1])!r}, 'wb')"
    ending = f"{opened}; main.files[0].write('a word'); main.files[1].write(b'bytes'); return 0"
    assert ended(WORDS_AT_THE_END.format(ending=ending))[0] == 0
    assert [name.read_bytes() for name in names] == [b"a word", b"bytes"]


HOST = """
import sys
from types import ModuleType

def main():
    return 0

sys.modules["command"] = sys.modules["__main__"]
host = ModuleType("host")
exec('''
from edge_client.console_script import run_console_script
try:
    run_console_script("command")
except SystemExit as ended:
    print(ended.code)
''', vars(host))
sys.exit(1)
"""


def test_a_program_that_calls_a_command_ends_with_a_code_of_its_own() -> None:
    """pytest with a failed test ended with 0, where another test had called a console script's function."""
    assert ended(HOST) == (1, "0\n", "")


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is a device of Linux")
def test_a_log_on_a_full_disk_changes_no_code() -> None:
    """It was 120: a coordinator that a service manager had stopped counted as failed."""
    telling = "from edge_client.printable import put_on_stderr; put_on_stderr('lost')"
    words = WORDS_AT_THE_END.format(ending=f"{telling}; return 7")
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", words], cwd=ROOT, stdout=subprocess.PIPE, stderr=full, text=True, check=False
        )
    assert (done.returncode, done.stdout) == (7, "command\nthread\nexit function\n")


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is a device of Linux")
def test_output_that_meets_a_full_disk_at_the_end_is_told_and_has_pythons_code() -> None:
    words = WORDS_AT_THE_END.format(ending="return 0")
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with FULL.open("w") as full:
        command = [sys.executable, "-c", words]
        done = subprocess.run(
            command, cwd=ROOT, env=buffered, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 120
    assert done.stderr.startswith("error: what was printed is incomplete: ")


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("atexit.register(signal.raise_signal, signal.SIGINT)", (7, "command\n", "")),  # the process leaves
        ("signal.raise_signal(signal.SIGINT)", (130, "command\n", "")),  # after the first one, outside of `run_cli`
        ("atexit.register(signal.raise_signal, signal.SIGINT); signal.signal(signal.SIGINT, signal.SIG_IGN)", None),
    ],
)
def test_ctrl_c_while_the_process_leaves_ends_it_with_its_code_and_without_a_word(
    action: str, said: tuple[int, str, str] | None
) -> None:
    code = "signal.signal(signal.SIGINT, signal.default_int_handler); print('command'); " + action + "; return 7"
    begin = f"import signal\n{WORDS_AT_THE_END}".split("    main.kept", maxsplit=1)[0]
    end = WORDS_AT_THE_END[WORDS_AT_THE_END.index("sys.modules") :]
    assert ended(f"{begin}    {code}\n\n{end}") == (said or (7, "command\n", ""))
