"""Pages of the documentation: their blocks, a reader who follows one from top to bottom, and figures between marks.

A block is followed by its kind: a file (its first line is a comment with its name) is written, the commands of a
`console` block are run in their order. What a reader's machine lacks is told to the reader, never written in a page.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.page_scripts import PageScripts
from tests.support.patience import patience

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FILES = ("python", "toml", "html", "ini")
WORDS = ("text", "json", "mermaid", "kotlin")  # what a command prints or an app holds, not what a reader types
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.+\n)+")
PATIENCE_S = patience(200)  # a process that imports torch, on a machine that may be busy
TYPED = re.compile(r"\$ |[\w./-]*(?:fedcenters-\w+|pip|podman|docker|python|make|sudo|apt|mosquitto|curl|ssh)(?![\w/])")


@dataclass(frozen=True, kw_only=True)
class PageBlock:
    """A fenced block: its language and what is in it."""

    kind: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines that a reader types; a line of a `console` block begins with "$ "."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        return [line.removeprefix("$ ") for line in lines]


def blocks(page: Path) -> list[PageBlock]:
    """Every block of a page in its order. A command that is set in by four spaces counts as kind `sh`."""
    text = page.read_text(encoding="utf-8")
    fenced = [(m.start(), PageBlock(kind=m[1], text=m[2])) for m in FENCE.finditer(text)]
    plain = FENCE.sub(lambda m: re.sub(r"[^\n]", "`", m[0]), text)
    loose = [(m.start(), m[0]) for m in INDENTED.finditer(plain) if TYPED.match(m[0].strip())]
    return [block for _, block in sorted(fenced + [(at, _typed(found)) for at, found in loose], key=lambda f: f[0])]


def _typed(lines: str) -> PageBlock:
    whole = re.sub(r"\\\n\s*", "", lines)
    return PageBlock(kind="sh", text="".join(f"{line.strip()}\n" for line in whole.splitlines()))


def links(page: Path) -> list[str]:
    """The files that a page points to, from its own folder; no address, no anchor."""
    found = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return sorted({link for link in found if "://" not in link})


class BackgroundCommand:
    """A command that goes on, as with `&` in a shell; it is there when it has said its first word.

    A thread reads its output: a program whose pipe is full stops.
    """

    def __init__(self, words: list[str], folder: Path) -> None:
        self.said: list[str] = []
        self._began = threading.Event()
        out: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(_as_process(words), cwd=folder, env=_environment(), **out)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self._began.wait(PATIENCE_S), f"{shlex.join(words)} says nothing"

    def over(self) -> None:
        """Wait for its end, after it was asked to end."""
        self.process.wait(timeout=PATIENCE_S)
        self._listener.join()

    def _listen(self) -> None:
        with self.process.stdout or io.StringIO() as lines:
            for line in lines:
                self.said.append(line)
                self._began.set()
        self._began.set()


@dataclass
class PageReader:
    """A reader in an empty folder who follows a page; `printed` has the stdout of each command.

    `here` is what this machine needs instead: {"embedded": "embedded:40123"}.
    """

    folder: Path
    here: Mapping[str, str] = field(default_factory=dict)
    printed: dict[str, str] = field(default_factory=dict)
    _jobs: list[BackgroundCommand] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._scripts = PageScripts(self.folder, _environment())

    def follow(self, page: Path) -> None:
        """Do everything that the page says. Fails with the command's own words."""
        for block in blocks(page):
            if block.kind in FILES:
                self.write(block.text)
            elif block.kind == "console":
                for command in block.commands:
                    self.run(command)

    def leave(self) -> None:
        """End what is still running."""
        self._scripts.leave()
        for job in self._jobs:
            job.process.terminate()
        for job in self._jobs:
            job.over()

    def write(self, text: str) -> None:
        """Put a block with a name in its first line where that says."""
        name = re.sub(r"^(# |<!-- |; )| -->$", "", text.splitlines()[0])
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._translated(text), encoding="utf-8")

    def _translated(self, text: str) -> str:
        for said, meant in self.here.items():
            text = text.replace(said, meant)
        return text

    def run(self, command: str) -> None:
        """Do what a line says. Fails with the command's own words."""
        words = shlex.split(self._translated(command), comments=True)
        if words[0] == "kill":
            self._jobs[int(words[1].removeprefix("%")) - 1].process.terminate()
        elif words[-1] == "&":
            self._jobs.append(BackgroundCommand(words[:-1], self.folder))
        elif words[0].startswith("fedcenters-"):
            self.printed[command] = _in_this_process(words, self.folder)
        elif words[0] == "python":
            code, self.printed[command], err = self._scripts.run(words[1:])
            assert code == 0, f"{command}\n{self.printed[command]}\n{err}\n{self._failed()}"
        else:
            done = subprocess.run(
                _as_process(words), cwd=self.folder, env=_environment(), capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{self._failed()}"
            self.printed[command] = done.stdout

    def _failed(self) -> str:
        """What commands that were to go on said before they ended with an error."""
        return "".join(line for job in self._jobs if (job.process.poll() or 0) > 0 for line in job.said)


def _environment() -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith("FEDCENTERS_") or k == "FEDCENTERS_CACHE"}
    return ours | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def _as_process(words: list[str]) -> list[str]:
    if words[0].startswith("fedcenters-"):
        return [sys.executable, "-m", _room(words[0]), *words[1:]]
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def _entry(program: str) -> Callable[[], int | None]:
    """What the console script of this name calls."""
    main: Callable[[], int | None] = import_module(f"{_room(program)}.cli").main
    return main


def _room(program: str) -> str:
    return {"fedcenters-edge": "edge_client"}.get(program, program.removeprefix("fedcenters-"))


def _in_this_process(words: list[str], folder: Path) -> str:
    """A command of ours without the seconds that a fresh process takes to import torch; -> its stdout."""
    out, err, before = io.StringIO(), io.StringIO(), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(folder)
        patch.delenv("FEDCENTERS_DATA", raising=False)
        patch.setenv("COLUMNS", "200")
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "path", [*sys.path])
        try:
            code = _entry(words[0])()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) or left.code is None else 1
    for name in set(sys.modules) - before:  # the next page may have a module of the same name
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
    assert not code, f"{shlex.join(words)}\n{out.getvalue()}\n{err.getvalue()}"
    return out.getvalue()


@contextlib.contextmanager
def followed(page: str, folder: Path, *, here: Mapping[str, str] | None = None) -> Iterator[PageReader]:
    """A reader who followed docs/`page`; what still runs ends with the context."""
    reader = PageReader(folder=folder, here=here or {})
    try:
        reader.follow(DOCS / page)
        yield reader
    finally:
        reader.leave()


def put(page: Path, target: str, text: str) -> None:
    """Replace the figures of `make target`. Raises ValueError for a page without the marks."""
    begin, end = f"<!-- figures: make {target} -->\n", "<!-- end of figures -->\n"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no figures of make {target}")
    page.write_text(f"{before}{begin}{text.rstrip()}\n{end}{after}", encoding="utf-8")


def machine() -> str:
    """What the figures were made with."""
    return f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
