"""A worker process of devices leaves when told to, when it cannot work, and when whoever started it is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from coordinator.local_broker import Broker
from edge_client.data.dataset import Dataset, DeviceData
from emulator.data import registry
from emulator.testbed import testbed_files
from tests.support.patience import patience

WORKER = (sys.executable, "-m", "emulator.testbed.threaded_fleet")
PATIENCE_S = patience(200)


def device(folder: Path, broker: str) -> str:
    whole = registry.load_data_set("digits")
    data = whole.dataset(whole.train)
    local = DeviceData(train=Dataset(data.x[:40], data.y[:40]))
    return str(
        testbed_files.write_device(folder, "device-00", local, engine="onnx", broker=broker, key="ab" * 32).config
    )


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_in_good_order(
    signum: signal.Signals, code: int, amqtt_broker: Broker, tmp_path: Path
) -> None:
    command = [*WORKER, device(tmp_path, amqtt_broker.url)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        assert "joining demo" in worker.stderr.readline()
        worker.send_signal(signum)
        _, said = worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode == code, said
    assert "Traceback" not in said


def test_it_leaves_when_its_parent_is_gone(amqtt_broker: Broker, tmp_path: Path) -> None:
    command = [*WORKER, device(tmp_path, amqtt_broker.url)]
    parent = (
        "import subprocess, sys\n"
        f"worker = subprocess.Popen({command!r}, stderr=subprocess.PIPE, start_new_session=True)\n"
        "worker.stderr.readline()\n"
        "print(worker.pid, flush=True)\n"
        "worker.returncode = 0\n"  # do not complain about leaving it behind
    )
    done = subprocess.run(
        [sys.executable, "-c", parent], check=True, capture_output=True, text=True, timeout=PATIENCE_S
    )
    pid = int(done.stdout)
    orphan = [psutil.Process(pid)] if psutil.pid_exists(pid) else []
    _, alive = psutil.wait_procs(orphan, timeout=PATIENCE_S)
    for process in alive:
        process.kill()
    assert not alive


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["absent.toml"], 3)])
def test_a_wrong_start_gets_a_line_a_hint_and_an_exit_code(arguments: list[str], code: int) -> None:
    done = subprocess.run([*WORKER, *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == code, done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
