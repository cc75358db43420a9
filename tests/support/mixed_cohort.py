"""A cohort of real processes over mosquitto in which one seat is taken by the client in Go of tests/second_client.

`MixedCohort.run` starts a broker, `fedcenters-coordinator serve`, `fedcenters-edge join` for the devices in Python, and
the second client for device dev-0. The model is a user's own: one linear layer, which the coordinator finds compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from torch import nn

from coordinator.local_broker import start_broker
from coordinator.storage.run_reader import last_state
from coordinator.storage.store import Store
from edge_client.protocol.task import Flat
from export.compiler.program import CompilerOutput, compile_program, vector_of
from tests.support.guarded_broker import run_mosquitto
from tests.support.patience import patience
from tests.support.ports import free_port
from tests.support.virtual_federation import put_program

SOURCE = Path(__file__).parents[1] / "second_client"
DEBIAN = Path("/usr/share/gocode")  # where apt puts Go libraries
PACKAGES = "golang-go golang-github-eclipse-paho.mqtt.golang-dev golang-golang-x-crypto-dev"
COMMANDS = Path(sys.executable).parent
PATIENCE_S = patience(600.0)  # a run of ten processes on a machine that others use, too
SIDE = 16  # pixels; the linear model has 2,570 numbers, more than one block of 4,096 bytes

COORDINATOR = """\
federation = "home"
broker = "{url}"
folder = "run"
min-devices = {devices}
deadline-s = {deadline}
block = 4096
exit-when-done = true
formats = []
{top}
[model]
name = "linear"
engines = ["onnx"]
[[runs]]
{run}
"""
CLIENT = """\
federation = "home"
device-id = "{cid}"
broker = "{url}"
data = "data"
state = "state"
signing-keys = ["{key}"]
"""


def build(folder: Path) -> Path:
    """The second client's program. Skips where Debian's Go and its libraries are not installed."""
    go = shutil.which("go")
    if go is None or not (DEBIAN / "src/github.com/eclipse/paho.mqtt.golang").exists():
        pytest.skip(f"Go and its MQTT library are not installed (apt install {PACKAGES})")
    program = folder / "second-client"
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": str(DEBIAN), "GOCACHE": str(folder / "go-cache")}
    subprocess.run([go, "build", "-o", str(program), "."], cwd=SOURCE, env=environment, check=True)
    return program


@cache
def linear_program() -> tuple[CompilerOutput, Flat]:
    """The program of one linear layer, and its first weights: one compilation for all cohorts of a process."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 10))
    made = compile_program(module, (1, SIDE, SIDE), name="linear", engines=("onnx",))
    return made, vector_of(module, made.program.schema)


def toml(fields: dict[str, Any]) -> str:
    return "\n".join(f"{name.replace('_', '-')} = {json.dumps(value)}" for name, value in fields.items())


@dataclass
class MixedCohort:
    """One run of `devices` devices, the odd ones with other labels; device dev-0 is `program`, or Python's without."""

    folder: Path
    program: Path | None
    devices: int = 5
    deadline: int = 60
    top: dict[str, Any] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    url: str = ""
    key: str = ""

    def run(self, meanwhile: Callable[[MixedCohort], None] = lambda _: None, *, options: str = "", **run: Any) -> None:  # noqa: ANN401 - settings of a run
        """Until the coordinator has ended in good order."""
        with self.broker() as self.url:
            try:
                coordinator = self._coordinator(run)
                self._devices(options.split())
                meanwhile(self)
                assert coordinator.wait(PATIENCE_S) == 0, self.log("coordinator")
            finally:
                for process in self.processes:
                    process.send_signal(signal.SIGTERM)
                for process in self.processes:
                    process.wait(PATIENCE_S)

    @contextmanager
    def broker(self) -> Iterator[str]:
        """The address of a mosquitto that anybody may use."""
        with start_broker(self.folder / "broker", "mosquitto") as broker:
            yield broker.url

    def _coordinator(self, run: dict[str, Any]) -> subprocess.Popen[bytes]:
        made, initial = linear_program()
        (self.folder / "run").mkdir()
        with closing(Store(self.folder / "run" / "store")) as store:
            put_program(store, made.program, made.files.values(), initial)
        text = COORDINATOR.format(
            url=self.url, devices=self.devices, deadline=self.deadline, top=toml(self.top), run=toml(run)
        )
        (self.folder / "coordinator.toml").write_text(text)
        process = self.start("coordinator", COMMANDS / "fedcenters-coordinator", "serve", "coordinator.toml")
        self.wait(self.pinned.exists)
        self.key = self.pinned.read_text().strip()
        return process

    @property
    def pinned(self) -> Path:
        return self.folder / "run" / "signing.pub"

    def _devices(self, options: list[str]) -> None:
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = np.kron(x[order].reshape(-1, 1, 8, 8) / 16, np.ones((1, 1, 2, 2))).astype(np.float32), y[order]
        configurations: list[Path | str] = []
        for i in range(self.devices):
            mine, labels = x[i :: self.devices], (9 - y if i % 2 else y)[i :: self.devices]
            home, cut = self.folder / f"dev-{i}", len(mine) * 4 // 5
            (home / "data").mkdir(parents=True)
            for name, part in (("train", slice(cut)), ("test", slice(cut, None))):
                if i == 0 and self.program:
                    table = np.hstack([mine[part].reshape(-1, SIDE * SIDE), labels[part, None]])
                    np.savetxt(home / f"{name}.csv", table, fmt="%.9g", delimiter=",")
                else:
                    np.savez(home / "data" / f"{name}.npz", x=mine[part], y=labels[part])
            if i or not self.program:
                text = CLIENT.format(cid=f"dev-{i}", url=self.url, key=self.key)
                (home / "client.toml").write_text(text)
                configurations += ["--config", home / "client.toml"]
        if configurations:
            self.start("python", COMMANDS / "fedcenters-edge", "join", *configurations)
        if self.program:
            self.second(*options)

    def second(self, *options: str) -> subprocess.Popen[bytes]:
        """The second client; started again it goes on from its state folder."""
        assert self.program is not None
        home, broker = self.folder / "dev-0", self.url.replace("mqtts://", "ssl://").replace("mqtt://", "tcp://")
        files: list[Path | str] = ["-train", home / "train.csv", "-test", home / "test.csv", "-state", home / "state"]
        whose = ["-federation", "home", "-cid", "dev-0", "-broker", broker, "-signing-keys", self.key]
        return self.start("second", self.program, "join", *whose, *files, *options)

    def start(self, name: str, *command: Path | str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(list(map(str, command)), cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait(self, found: Callable[[], bool]) -> None:
        """Until `found`, or until a process has died that was not to."""
        until_s = time.monotonic() + PATIENCE_S
        while not found():
            assert time.monotonic() < until_s, [path.read_text()[-2000:] for path in self.folder.glob("*.log")]
            time.sleep(0.02)

    def said(self, event: str) -> list[dict[str, Any]]:
        """The second client's lines of one kind."""
        lines = [json.loads(line) for line in self.log("second").splitlines() if line.endswith("}")]
        return [line for line in lines if line["event"] == event]

    def rounds(self) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.folder / "run" / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == "round"]

    def centers(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """[K, size] after the last round."""
        return np.asarray(last_state(self.folder / "run", name)[0].centers)


@dataclass
class GuardedCohort(MixedCohort):
    """The same with what `provision` writes: TLS, the access list, and a one-time token for dev-0."""

    enrol_url: str = ""

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def identity(self) -> Path:
        return self.keys / "devices" / "dev-0"

    @property
    def pinned(self) -> Path:
        return self.keys / "coordinator" / "signing.pub"

    @contextmanager
    def broker(self) -> Iterator[str]:
        port, enrol = free_port(), free_port()
        self.enrol_url = f"https://127.0.0.1:{enrol}"
        where = ["--host", "127.0.0.1", "--port", str(port), "--enrol-port", str(enrol)]
        command = COMMANDS / "fedcenters-coordinator"
        whose = ["--federation", "home", "--token", "dev-0"]
        subprocess.run([command, "provision", self.keys, *whose, *where], check=True, capture_output=True)
        mine = self.keys / "coordinator"
        paths = {"ca": "ca.crt", "certificate": "coordinator.crt", "key": "coordinator.key"}
        self.top = {name: str(mine / file) for name, file in paths.items()} | {"signing_folder": str(mine)}
        with run_mosquitto(self.keys / "broker" / "mosquitto.conf", port):
            self.start("enrol", command, "enrol", "keys", "--listen", "127.0.0.1")
            self.wait(lambda: "tokens become certificates" in self.log("enrol"))
            yield f"mqtts://127.0.0.1:{port}"

    def second(self, *options: str) -> subprocess.Popen[bytes]:
        return super().second("-identity", str(self.identity), "-enrol-url", self.enrol_url, *options)
