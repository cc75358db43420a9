"""Make a virtual environment and install into it: python .ci/install.py ENVIRONMENT REQUIREMENT...

Every ten seconds stderr has a line that says what still goes on, and since when.

uv installs, and pip where uv cannot be had or fails. uv takes about a third of pip's time and shares files between
environments, but it reads nothing of pip's settings: its find-links, indexes and certificate are passed on. Torch's CPU
build is taken where these offer it: the CUDA build is ten times as large. UV_TORCH_BACKEND=cpu has uv look for it in
torch's own index.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TELL_EVERY_S = 10.0
CONSTRAINTS = ["-c", "constraints.txt"]
TORCH = ("torch==2.13.0+cpu", "torch==2.13.0")  # the first that can be had


def main() -> int:
    if sys.version_info < (3, 10):  # noqa: UP036 - whatever Python the user has starts this
        sys.stderr.write("fedcenters needs Python 3.10 or newer; pass PYTHON=python3.12\n")
        return 3
    try:
        return install(Path(sys.argv[1]), sys.argv[2:])
    except KeyboardInterrupt:
        return 130


def install(folder: Path, asked: list[str]) -> int:
    """The exit code of the installation."""
    if Path(sys.prefix).resolve() != folder.resolve():  # else it is activated: it exists, and its Python runs this
        with told(f"making the environment {folder}"):
            venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if with_uv(pip, python, folder, asked):
        return 0
    sys.stderr.write("uv cannot install here; pip does, which takes some minutes\n")
    with told(f"pip installs into {folder}"):
        return any(run([*pip, "install", "-qq", *CONSTRAINTS, *wanted]) for wanted in (TORCH[-1:], asked))


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say on stderr every TELL_EVERY_S that this still goes on, and since when."""
    began, clock, over = time.monotonic(), time.strftime("%H:%M:%S"), threading.Event()

    def tell() -> None:
        while not over.wait(TELL_EVERY_S):
            sys.stderr.write(f"... {what}, since {clock} ({time.monotonic() - began:.0f} s)\n")
            sys.stderr.flush()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def with_uv(pip: list[str], python: Path, folder: Path, asked: list[str]) -> bool:
    """Whether uv could be brought in and has installed everything."""
    with told("pip installs uv"):
        if run([*pip, "install", "-qq", *CONSTRAINTS, "uv"]):
            return False
    options, env = settings(pip)
    command = [str(python), "-m", "uv", "--quiet", "pip", "install", "--python", str(python)]
    *first, last = ([*command, *options, *CONSTRAINTS, torch, *asked] for torch in TORCH)
    with told(f"uv installs into {folder}"):
        tried = (subprocess.run(other, env=env, check=False, capture_output=True).returncode for other in first)
        return 0 in tried or run(last, env) == 0


def settings(pip: list[str]) -> tuple[list[str], dict[str, str]]:
    """Pip's settings as uv's options and environment; pip looks into all indexes alike, and uv is told to."""
    told = subprocess.run([*pip, "config", "list"], check=True, capture_output=True, text=True).stdout
    found: dict[str, list[str]] = {}
    for line in told.splitlines():
        key, _, value = line.partition("=")
        found.setdefault(key.rpartition(".")[2], []).extend(str(ast.literal_eval(value)).split())
    options = ["--index-strategy", "unsafe-best-match"]
    for name, option in (("find-links", "--find-links"), ("extra-index-url", "--index")):
        options += [text for value in dict.fromkeys(found.get(name, ())) for text in (option, value)]
    options += ["--default-index", found["index-url"][-1]] if "index-url" in found else []
    options += ["--no-index"] if found.get("no-index", ["false"])[-1].lower() in ("1", "true", "yes", "on") else []
    return options, dict(os.environ) | ({"SSL_CERT_FILE": found["cert"][-1]} if "cert" in found else {})


def run(command: list[str], env: dict[str, str] | None = None) -> int:
    return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
