"""What the tests of the phone's page need: Node, and the third-party files, fetched once into `.web/` by `make web`.

Without them these tests skip with a reason on a user's machine, and fail in CI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from coordinator.phone import vendored_files
from tests.support.requirements import skip_without

ROOT = Path(__file__).parents[2]
WEB = ROOT / ".web"
NODE_MAJOR = 20  # its WebCrypto knows Ed25519


def node() -> str:
    """The path of Node 20 or newer."""
    program = shutil.which("node")
    if program is None:
        skip_without("node is not installed (Node.js 20 or newer)")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < NODE_MAJOR:
        skip_without(f"node is {version.strip()}; these tests need {NODE_MAJOR} or newer")
    return program


def third_party() -> Path:
    """The folder with ONNX Runtime Web and MQTT.js."""
    if not vendored_files.is_complete(WEB):
        skip_without("the phone's third-party files are not here (make web)")
    return WEB


def run_node(*arguments: str | Path, **variables: str) -> str:
    """stdout of a script that ended well; what it said is in the failure otherwise."""
    environment = {**os.environ, "NODE_NO_WARNINGS": "1", **variables}
    done = subprocess.run(
        [node(), *map(str, arguments)], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def run_tests(*scripts: Path, **variables: str) -> str:
    """What test files report, in TAP. One process for all: in each, V8 compiles ONNX Runtime Web for 3 CPU s."""
    one_after_another = "for (const file of process.argv.slice(1)) await import(file)"
    return run_node("--input-type=module", "--eval", one_after_another, *scripts, **variables)
