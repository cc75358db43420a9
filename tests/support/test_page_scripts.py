"""A page's scripts run in one process as each would in its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.page_scripts import PageScripts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[PageScripts]:
    found = PageScripts(tmp_path, os.environ | {"PYTHONPATH": str(ROOT)})
    yield found
    found.leave()


def test_a_script_has_its_words_and_its_own_streams_and_exit_code(scripts: PageScripts) -> None:
    text = 'import os, sys\nprint(sys.argv[1])\nprint("wrong", file=sys.stderr)\nos.system("echo below")\nsys.exit(3)\n'
    (scripts.folder / "one.py").write_text(text)
    (scripts.folder / "two.py").write_text("print(__name__)\n")
    code, out, err = scripts.run(["one.py", "word"])
    assert (code, sorted(out.split()), err) == (3, ["below", "word"], "wrong\n")
    assert scripts.run(["two.py"]) == (0, "__main__\n", "")
    assert {path.name for path in scripts.folder.iterdir()} == {"one.py", "two.py"}


def test_an_error_is_told_as_python_does_and_the_next_script_runs(scripts: PageScripts) -> None:
    (scripts.folder / "one.py").write_text("1 / 0\n")
    (scripts.folder / "two.py").write_text("print(2)\n")
    code, out, err = scripts.run(["one.py"])
    assert (code, out, err.splitlines()[-1]) == (1, "", "ZeroDivisionError: division by zero")
    assert scripts.run(["two.py"]) == (0, "2\n", "")


def test_a_module_of_the_folder_that_was_written_anew_is_read_anew(scripts: PageScripts) -> None:
    (scripts.folder / "one.py").write_text("import mine\nprint(mine.VALUE)\n")
    (scripts.folder / "mine.py").write_text("VALUE = 1\n")
    assert scripts.run(["one.py"]) == (0, "1\n", "")
    (scripts.folder / "mine.py").write_text("VALUE = 'another'\n")
    assert scripts.run(["one.py"]) == (0, "another\n", "")


def test_a_script_that_ends_the_process_is_an_error_with_what_it_said(scripts: PageScripts) -> None:
    (scripts.folder / "one.py").write_text('import os\nprint("before", flush=True)\nos._exit(0)\n')
    code, out, _ = scripts.run(["one.py"])
    assert (code, out) == (1, "before\n")
