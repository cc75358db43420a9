"""Several real edge clients in one process, one thread per device.

    python -m emulator.testbed.threaded_fleet CONFIG.toml ...

The devices run the code of `fedcenters-edge join`, and also stop when the process that started them has ended. Each
engine has a process, so that torch is not loaded where ONNX Runtime trains. A process can have some hundreds of
threads; large_fleet.py runs thousands of devices.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from importlib import import_module
from pathlib import Path

from edge_client.config import load_config
from edge_client.errors import UsageError
from edge_client.join import reporter, run_clients
from edge_client.run_cli import run_cli
from edge_client.runtime.factory import make_client
from emulator.testbed.parent import stop_with_parent

RUNTIMES = {"onnx": "onnxruntime", "litert": "ai_edge_litert.interpreter", "pt2": "torch.export"}


def main(paths: list[str]) -> int:
    """Run the devices of these configuration files until a signal, or until one of them fails; -> the exit code."""
    parent = os.getppid()
    threading.Thread(target=stop_with_parent, args=(parent,), name="parent", daemon=True).start()
    return run_cli(lambda: _live(paths))


def _live(paths: list[str]) -> int:
    if not paths:
        raise UsageError("no device", hint="python -m emulator.testbed.threaded_fleet CONFIG.toml ...")
    configs = [load_config(Path(path), os.environ) for path in paths]
    for engine in sorted({config.engine for config in configs}):
        threading.Thread(target=_warm_up, args=(engine,), name=f"import {engine}", daemon=True).start()
    return run_clients([make_client(config, tell=reporter(config.device_id)) for config in configs])


def _warm_up(engine: str) -> None:
    """Import the runtime before the first task arrives. The first task reports a runtime that is missing."""
    with contextlib.suppress(ImportError):
        import_module(RUNTIMES[engine])


if __name__ == "__main__":
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # to take torch apart needs a second of CPU, for which a run on a busy machine would wait 10 s
