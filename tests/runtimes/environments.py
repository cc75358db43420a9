"""Python environments made by uv, kept below .runtimes and made anew when what they are asked for has changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.runtimes.rows import LOWEST_SERVER, Row

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".runtimes"
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}") or "uv"
EXTRAS = "onnx,litert,images"
SHOWN = ("onnxruntime", "ai-edge-litert", "numpy", "cryptography", "safetensors", "paho-mqtt")


class Missing(Exception):
    """No interpreter of a Python is on this machine."""


def interpreter(python: str) -> Path:
    """One that runs: on PATH, or in a folder of pyenv or of uv. Raises Missing."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = shutil.which(f"python{python}")
    for path in [*([Path(found)] if found else []), *sorted(pyenv.glob(f"{python}.*/bin/python"))]:
        if subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:  # pyenv's may not run
            return path
    done = _uv("python", "find", "--no-python-downloads", python, check=False)
    if done.returncode:
        raise Missing(f"no Python {python} here; `uv python install {python}` fetches one")
    return Path(done.stdout.strip())


def made(row: Row) -> Path:
    """The row's interpreter, with our client, both runtimes and pytest."""
    folder, base = HOME / row.name, interpreter(row.python)
    asked = hashlib.sha256(f"{base} {row} {EXTRAS} {(ROOT / 'pyproject.toml').read_text()}".encode()).hexdigest()
    python, mark = folder / "bin" / "python", folder / ".asked"
    if not (mark.exists() and mark.read_text() == asked):
        shutil.rmtree(folder, ignore_errors=True)
        _uv("venv", "--python", str(base), str(folder))
        ways = ["--resolution", "lowest-direct"] if row.lowest else []
        _uv("pip", "install", "--python", str(python), "--no-build", *ways, "-e", f".[{EXTRAS}]", *row.asks)
        _uv("pip", "install", "--python", str(python), "--no-build", "pytest>=8.3")
        mark.write_text(asked)
    return python


def lowest_server() -> Path:
    """A server's environment with the lowest of everything that the demo needs."""
    python = HOME / "server-lowest" / "bin" / "python"
    shutil.rmtree(HOME / "server-lowest", ignore_errors=True)
    _uv("venv", "--python", str(interpreter(LOWEST_SERVER)), str(HOME / "server-lowest"))
    _uv(
        "pip",
        "install",
        "--python",
        str(python),
        "--no-build",
        "--resolution",
        "lowest-direct",
        "-e",
        ".[emulator,images]",
    )
    return python


def versions(python: Path) -> Mapping[str, str]:
    """What the environment holds of what matters."""
    listed = json.loads(_uv("pip", "list", "--python", str(python), "--format", "json").stdout)
    return {p["name"]: p["version"] for p in listed if p["name"] in SHOWN}


def resolves(python: str, *options: str) -> str:
    """Nothing when pip could install it on this Python from wheels alone, else why it could not."""
    done = _uv(
        "pip",
        "compile",
        "--python-version",
        python,
        "--no-build",
        "--no-header",
        *options,
        "pyproject.toml",
        check=False,
    )
    return "" if done.returncode == 0 else " ".join(done.stderr.split())


def _uv(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    env = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")} | os.environ  # uv reads nothing of pip's
    done = subprocess.run(
        [UV, "--quiet", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(f"uv {' '.join(arguments)}\n{done.stderr}")
    return done
