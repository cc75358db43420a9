"""Make a virtual environment and install into it: python .ci/install.py ENVIRONMENT REQUIREMENT...

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
import venv
from pathlib import Path

CONSTRAINTS = ["-c", "constraints.txt"]
TORCH = ("torch==2.13.0+cpu", "torch==2.13.0")  # the first that can be had


def main() -> int:
    if sys.version_info < (3, 10):  # noqa: UP036 - whatever Python the user has starts this
        sys.stderr.write("fedcenters needs Python 3.10 or newer; pass PYTHON=python3.12\n")
        return 3
    folder, asked = Path(sys.argv[1]), sys.argv[2:]
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if with_uv(pip, python, asked):
        return 0
    sys.stderr.write("uv cannot install here; pip does, which takes some minutes\n")
    return any(run([*pip, "install", "-qq", *CONSTRAINTS, *wanted]) for wanted in (TORCH[-1:], asked))


def with_uv(pip: list[str], python: Path, asked: list[str]) -> bool:
    """Whether uv could be brought in and has installed everything."""
    if run([*pip, "install", "-qq", *CONSTRAINTS, "uv"]):
        return False
    options, env = settings(pip)
    command = [str(python), "-m", "uv", "--quiet", "pip", "install", "--python", str(python)]
    *first, last = ([*command, *options, *CONSTRAINTS, torch, *asked] for torch in TORCH)
    return any(subprocess.run(other, env=env, check=False, capture_output=True).returncode == 0 for other in first) or (
        run(last, env) == 0
    )


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
