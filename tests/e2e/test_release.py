"""A board takes a newer client from its coordinator: real processes, a real mosquitto, the launcher as on a board."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import Broker
from coordinator.runtime.server import Server
from coordinator.storage.store import Store
from edge_client.board import wheels
from edge_client.board.flash import PACKAGE
from edge_client.board.pack import pack_release
from edge_client.transport.clock import SystemClock
from edge_client.transport.mqtt import MqttTransport
from edge_client.update import launcher
from edge_client.update.launcher import ReleaseRecord
from tests.support import virtual_federation
from tests.support.patience import patience

pytestmark = pytest.mark.broker
NEWER = "99.0"
PATIENCE_S = patience(200.0)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What `flash` puts on a board, but for the wheels; and one device's data."""
    for entry in wheels.client_files(PACKAGE, ("onnx", "litert")):
        path = tmp_path / entry.path.removeprefix("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(entry.data)
    (tmp_path / "opt/fedcenters/launch.py").write_bytes((PACKAGE / "update" / "launcher.py").read_bytes())
    np.savez(tmp_path / "train.npz", x=np.zeros((4, 5), np.float32), y=np.arange(4) % 2)
    return tmp_path


def release(*, works: bool) -> bytes:
    """This client under a higher number; one that does not work ends before it says a word."""
    files = {e.path.partition("/site/")[2]: e.data for e in wheels.client_files(PACKAGE, ("onnx", "litert"))}
    files["edge_client/__init__.py"] = f'__version__ = "{NEWER}"\n'.encode()
    if not works:
        files["edge_client/cli.py"] = b"raise SystemExit(1)\n"
    return pack_release(files, NEWER)


@contextmanager
def coordinator(folder: Path, broker: Broker, data: bytes) -> Iterator[None]:
    """One that offers a release and waits for a fleet that is never complete."""
    file = folder / "client.tar"
    file.write_bytes(data)
    settings = virtual_federation.config(folder / "run", devices=9, federation="home", broker=broker.url, release=file)
    with closing(Store(settings.folder / "store")) as store:
        virtual_federation.seed_program(store)
        server = Server(
            settings,
            store,
            dial=lambda will: MqttTransport(broker.url, "home.coordinator.0", will=will),
            clock=SystemClock(),
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.stop()
            thread.join(PATIENCE_S)


def start(home: Path) -> subprocess.Popen[str]:
    """The service, as its unit starts it."""
    command = [sys.executable, str(home / "opt/fedcenters/launch.py"), "join", "--config", str(home / "client.toml")]
    env = {"STATE_DIRECTORY": str(home / "state"), "PATH": os.environ["PATH"]}
    return subprocess.Popen(command, env=env, cwd=home, stderr=subprocess.PIPE, text=True)


def configure(home: Path, broker: Broker) -> None:
    key = open_signing_key(home / "run").public.hex()
    table = {"federation": "home", "device-id": "porch", "broker": broker.url, "data": ".", "state": "own"}
    lines = [f'{name} = "{value}"' for name, value in table.items()]
    (home / "client.toml").write_text("\n".join([*lines, f'signing-keys = ["{key}"]', "max-temperature = 0"]) + "\n")


def until(home: Path, wanted: ReleaseRecord) -> None:
    waiting = threading.Event()
    for _ in range(int(PATIENCE_S * 20)):
        if launcher.read_record(home / "state" / "releases") == wanted:
            return
        waiting.wait(0.05)
    raise TimeoutError(str(launcher.read_record(home / "state" / "releases")))


def test_a_newer_client_is_fetched_started_and_stays(home: Path, mosquitto: Broker) -> None:
    (home / "run").mkdir()
    configure(home, mosquitto)
    with coordinator(home, mosquitto, release(works=True)):
        with start(home) as old:
            _, said = old.communicate(timeout=PATIENCE_S)
        assert old.returncode == 0, said
        assert launcher.read_record(home / "state" / "releases") == ReleaseRecord(trial=NEWER)
        with start(home) as new:
            until(home, ReleaseRecord(good=NEWER))
            new.terminate()
            assert new.wait(PATIENCE_S) == 0


def test_a_newer_client_that_does_not_work_gives_way_to_the_one_of_before(home: Path, mosquitto: Broker) -> None:
    (home / "run").mkdir()
    configure(home, mosquitto)
    with coordinator(home, mosquitto, release(works=False)):
        with start(home) as old:
            old.communicate(timeout=PATIENCE_S)
        for _ in range(launcher.MAX_TRIAL_STARTS):
            with start(home) as new:
                new.communicate(timeout=PATIENCE_S)
            assert new.returncode == 1
        with start(home) as again:
            assert again.stderr is not None
            assert "porch: joining home" in again.stderr.readline()
            assert launcher.read_record(home / "state" / "releases") == ReleaseRecord(failed=(NEWER,))
            again.terminate()
            assert again.wait(PATIENCE_S) == 0
