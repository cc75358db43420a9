"""The table of the mend of 2026-11-23: accuracy of a simulation by onnxruntime and Python, without and with the mend.

    python -m tests.runtimes.before_and_after

`simulate --method fedavg --devices 3 --rounds 2 --engine onnx`, in the environments that `make runtimes` made for the
demo (.runtimes/server-*, and the one that runs this), each with another onnxruntime before its own on the path. Without
the mend means edge_client of the commit before it, from git.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.runtimes.environments import HOME, ROOT, UV

MENDED = "self._lent"  # in edge_client/engines/onnx.py since the mend
VERSIONS = ("1.19.2", "1.20.1", "1.23.2", "1.24.4", "1.27.0", "1.31.1", "1.32.0")
PYTHONS = ("3.10", "3.11", "3.13")
SIMULATE = ("simulate", "--method", "fedavg", "--devices", "3", "--rounds", "2", "--engine", "onnx", "--json")


def main() -> None:
    """Print the table as it grows, version by version."""
    print(f"| onnxruntime | {' | '.join(f'{p}, before | {p}, after' for p in PYTHONS)} |")  # noqa: T201 - its data
    print("|---" + "|--:" * 2 * len(PYTHONS) + "|", flush=True)  # noqa: T201 - its data
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder)
        found = ["git", "log", "--reverse", "--format=%H", f"-S{MENDED}", "--", "edge_client/engines/onnx.py"]
        mend = subprocess.run(found, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()[0]
        packed = subprocess.run(["git", "archive", f"{mend}^"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        for version in VERSIONS:
            print(f"| {version} |", end="", flush=True)  # noqa: T201 - its data
            for python in PYTHONS:
                for tree in (before, ROOT):
                    print(f" {_accuracy(python, version, tree)} |", end="", flush=True)  # noqa: T201 - its data
            print()  # noqa: T201 - its data


def _accuracy(python: str, version: str, tree: Path) -> str:
    """In percent; or why there is none."""
    here = python == ".".join(platform.python_version_tuple()[:2])
    program = Path(sys.executable) if here else HOME / f"server-{python}" / "bin" / "python"
    if not program.exists():
        return "not here"
    overlay = HOME / f"onnxruntime-{version}-{python}"
    if not (overlay / "onnxruntime").exists():
        install = [UV, "--quiet", "pip", "install", "--python", str(program), "--target", str(overlay)]
        done = subprocess.run(
            [*install, "--no-deps", "--no-build", f"onnxruntime=={version}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return "no wheel"
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{overlay}", "TMPDIR": folder}
        done = subprocess.run(
            [program, "-m", "emulator", *SIMULATE, "--out", folder],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        return f"exit {done.returncode}"
    return f"{json.loads(done.stdout)['accuracy']['micro']:.1%}"


if __name__ == "__main__":
    main()
