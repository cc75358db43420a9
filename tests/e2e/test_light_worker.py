"""A device that trains with ONNX Runtime is light: no torch, no scikit-learn, 120 MB."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from emulator.broker import start_broker
from tests.e2e import scene
from tests.e2e.scene import Scene

LIMIT_KB = 120_000
HEAVY = ("torch", "sklearn", "scipy", "matplotlib", "pandas", "tensorflow", "litert")

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc, which only Linux has")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What /proc says about one device's process after it has trained and evaluated, before it leaves."""
    seen: dict[str, str] = {}

    def look(played: Scene) -> None:
        child = next(child for child in played.children.running if child.name == "worker-0")
        for name in ("maps", "status"):
            seen[name] = Path(f"/proc/{child.process.pid}/{name}").read_text(encoding="utf-8")

    folder = tmp_path_factory.mktemp("light")
    with start_broker(folder / "broker") as broker:
        scene.play(folder / "run", broker.url, act=look, workers=scene.DEVICES)
    return seen


def test_an_onnx_device_never_loads_torch_nor_anything_else_that_is_heavy(worker: dict[str, str]) -> None:
    libraries = {line.split()[-1] for line in worker["maps"].splitlines() if ".so" in line}
    packages = {re.sub(r".*/site-packages/([^/]+)/.*", r"\1", path) for path in libraries if "site-packages" in path}
    assert "onnxruntime" in packages
    assert not [name for name in packages if name.lower().startswith(HEAVY)]
    assert not [path for path in libraries if "libtorch" in path]


def test_an_onnx_device_stays_below_120_mb(worker: dict[str, str]) -> None:
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", worker["status"], flags=re.MULTILINE)
    assert peak is not None
    assert int(peak[1]) < LIMIT_KB


def test_the_look_at_proc_would_see_torch(tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    import subprocess

    code = "import torch; print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "libtorch" in maps
