"""The scripts of one page, one after another in one process of their own: each import of torch is paid for once.

As a program, it runs what it is told on stdin: a line of JSON for each script, [its words, a file for its stdout, one
for its stderr], answered by its exit code on a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class PageScripts:
    """The process, which begins with the first script; `folder` is where the scripts lie and run."""

    folder: Path
    environment: Mapping[str, str]
    _process: subprocess.Popen[str] | None = field(default=None, init=False)

    def run(self, words: Sequence[str]) -> tuple[int, str, str]:
        """A script and its arguments; -> its exit code, stdout and stderr."""
        if self._process is None:
            command = [sys.executable, "-m", "tests.support.page_scripts"]
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        told = [self.folder / f".{words[0]}.{stream}" for stream in ("out", "err")]
        print(json.dumps([words, *map(str, told)]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()  # nothing if the process died
        out, err = (path.read_text(encoding="utf-8") for path in told)
        for path in told:
            path.unlink()
        return int(answer) if answer else 1, out, err

    def leave(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


def _run(words: list[str]) -> int:
    """As `python` would run it in this folder, whose modules are forgotten: the page may write them anew."""
    sys.argv, folder = words, str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001 - as Python tells of it
        traceback.print_exc()
        return 1
    finally:
        sys.path.remove(folder)
        for name, module in [*sys.modules.items()]:
            if str(getattr(module, "__file__", "")).startswith(folder):
                del sys.modules[name]
    return 0


def main() -> None:
    """Run scripts until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        words, *files = json.loads(line)
        for stream, file in zip((1, 2), files, strict=True):
            with Path(file).open("wb") as opened:
                os.dup2(opened.fileno(), stream)
        code = _run(words)
        for printed in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError):  # closed by the script
                printed.flush()
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    main()
