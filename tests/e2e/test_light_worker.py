"""A device that trains is light: no torch, no scikit-learn, little memory. Real processes, looked at from outside."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import start_broker
from edge_client.data.dataset import Dataset, DeviceData
from emulator.stop_signals import DeferredSignals
from emulator.testbed import testbed_files
from emulator.testbed.processes import ChildProcesses
from tests.support import process_fleet
from tests.support.patience import patience
from tests.support.process_fleet import FleetScene

LIMIT_MB = 110
# The WeCFL CNN, batch 32, the whole life of a process: it joins, trains, evaluates, uploads (BENCHMARKS.md).
LIMITS_MB = {"onnx": 103, "litert": 99}
DEVICES, ROUNDS, PATIENCE_S = 2, 2, patience(300.0)
HEAVY = ("torch", "sklearn", "scipy", "matplotlib", "pandas", "tensorflow", "litert")

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc, which only Linux has")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What /proc says about one device's process after it has trained and evaluated, before it leaves."""
    seen: dict[str, str] = {}

    def look(played: FleetScene) -> None:
        child = next(child for child in played.children.running if child.name == "worker-0")
        for name in ("maps", "status"):
            seen[name] = Path(f"/proc/{child.process.pid}/{name}").read_text(encoding="utf-8")

    folder = tmp_path_factory.mktemp("light")
    with start_broker(folder / "broker") as broker:
        process_fleet.play_undisturbed(folder / "run", broker.url, act=look, workers=process_fleet.DEVICES)
    return seen


def test_an_onnx_device_never_loads_torch_nor_anything_else_that_is_heavy(worker: dict[str, str]) -> None:
    libraries = {line.split()[-1] for line in worker["maps"].splitlines() if ".so" in line}
    packages = {re.sub(r".*/site-packages/([^/]+)/.*", r"\1", path) for path in libraries if "site-packages" in path}
    assert "onnxruntime" in packages
    assert not [name for name in packages if name.lower().startswith(HEAVY)]
    assert not [path for path in libraries if "libtorch" in path]


def test_an_onnx_device_that_trained_stays_below_its_limit(worker: dict[str, str]) -> None:
    assert peak_mb(worker["status"]) < LIMIT_MB


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("engine", LIMITS_MB)
def test_a_device_trains_the_wecfl_cnn_in_little_memory(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_fleet, "PATIENCE_S", PATIENCE_S)
    with (
        start_broker(tmp_path / "broker") as broker,
        DeferredSignals() as signals,
        ChildProcesses(tmp_path / "logs", signals) as children,
    ):
        played = FleetScene(tmp_path / "run", broker.url, children)
        serve_wecfl_cnn(played, engine)
        configs = [random_device(played, f"device-{i}", engine) for i in range(DEVICES)]
        devices = [
            children.python(path.parent.name, "-m", "edge_client.cli", "join", "--config", str(path))
            for path in configs
        ]
        played.wait_for("round", ROUNDS)
        peaks = [peak_mb(Path(f"/proc/{d.process.pid}/status").read_text(encoding="utf-8")) for d in devices]
        children.wait_for_exit(children.running)
    assert max(peaks) < LIMITS_MB[engine]


def serve_wecfl_cnn(played: FleetScene, engine: str) -> None:
    config, samples = played.work / "coordinator.toml", np.zeros((1, 1, 28, 28), np.float32)
    run = {"method": "fesem", "clusters": 2, "local-steps": 20, "batch-size": 32, "num-rounds": ROUNDS + 1}
    played.folder.mkdir()
    testbed_files.write_coordinator(
        config, played.folder, broker=played.broker, devices=DEVICES, runs=[run], seed=0, engines=(engine,)
    )
    named = config.read_text(encoding="utf-8").replace(f'"{testbed_files.DEMO_MODEL}"', '"wecfl-cnn"\nbatch-size = 32')
    config.write_text(named, encoding="utf-8")
    np.savez(played.work / testbed_files.REFERENCE_FILE, x=samples)
    played.children.python("coordinator", "-m", "coordinator", "serve", str(config))


def random_device(played: FleetScene, cid: str, engine: str) -> Path:
    rng = np.random.default_rng(0)
    data = Dataset(rng.random((128, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, 128))
    key = open_signing_key(played.folder).public.hex()
    local = DeviceData(train=data, test=data)
    return testbed_files.write_device(played.work, cid, local, engine=engine, broker=played.broker, key=key).config


def peak_mb(status: str) -> float:
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, flags=re.MULTILINE)
    assert peak is not None
    return int(peak[1]) / 1024


def test_the_look_at_proc_would_see_torch() -> None:
    """Otherwise the test above could not fail."""
    import torch  # noqa: F401 - into this process, where other tests have it already

    assert "libtorch" in Path("/proc/self/maps").read_text(encoding="utf-8")
