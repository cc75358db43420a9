"""The federation of virtual_federation.py as real processes over a real mosquitto; tests kill them.

`python -m tests.support.live_federation coordinator|devices FOLDER URL` is one of the processes. Waiting is for
messages; a message that does not come within PATIENCE_S fails the test.
"""

from __future__ import annotations

import getpass
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.config import CoordinatorConfig
from coordinator.config_sections import RunConfig
from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import MOSQUITTO_CONF, find_mosquitto
from coordinator.runtime.server import Server
from coordinator.storage import state_codec
from coordinator.storage.store import Store
from edge_client.config import ClientConfig
from edge_client.data.dataset import DeviceData
from edge_client.errors import Malformed
from edge_client.malloc import give_back_large_blocks
from edge_client.protocol import messages
from edge_client.runtime.client import Client
from edge_client.runtime.progress import Tell
from edge_client.transport.base import Connected, Message, Transport, Will
from edge_client.transport.clock import SystemClock
from edge_client.transport.mqtt import MqttTransport
from tests.support import softmax_program
from tests.support.heap_use import HEAP_FILE, note_heap_use
from tests.support.known_rounding import round_by_known_numbers
from tests.support.patience import patience
from tests.support.ports import free_port
from tests.support.virtual_federation import FEDERATION, TOPICS, Outcome, WideEngine, config, seed_program

PATIENCE_S = patience(200.0)
DEVICES, ROUNDS = 3, 2
CHANGES_FILE = "changes.json"
BALLAST = 30_000  # values: thirty blocks, so that there is a middle
PERSISTENCE = """\
persistence true
persistence_location {folder}/
autosave_interval 1
autosave_on_changes true
"""


def soon(_low: float, _high: float) -> float:
    """Instead of jitter: no other fleet connects here."""
    return 0.05


def settings(folder: Path) -> CoordinatorConfig:
    """The coordinator's, with the changes that a `ProcessScene` has written beside it."""
    found = {"devices": DEVICES, "rounds": ROUNDS} | _changes(folder)
    found.pop("ballast", None)
    if run := found.pop("run", None):
        found["runs"] = (RunConfig(**run),)
    return config(folder / "run", **found)


def _changes(folder: Path) -> dict[str, Any]:
    """`ballast` is of the program, `run` has the fields of the only run, the others are of the configuration."""
    file = folder / CHANGES_FILE
    return dict(json.loads(file.read_text())) if file.exists() else {}


@dataclass
class ProcessScene:
    """A broker, a coordinator, and one process of all devices. Whatever was killed is started again by its name."""

    folder: Path
    persistent: bool = False
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    heard: int = 0
    detour: str = ""  # the devices' way to the broker, where it is not the straight one
    changes: Mapping[str, Any] = field(default_factory=dict)  # what `settings` and `coordinator` read

    def __post_init__(self) -> None:
        (self.folder / CHANGES_FILE).write_text(json.dumps(dict(self.changes)))

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def start(self, name: str) -> None:
        """`broker`, `coordinator` or `devices`."""
        command = self._broker() if name == "broker" else self._ours(name)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if name == "broker":
            self._wait_for_broker()

    def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def end(self) -> None:
        """Ask them to leave, the broker last."""
        for name in ("devices", "coordinator", "broker"):
            if name in self.processes:
                process = self.processes.pop(name)
                process.terminate()
                try:
                    process.wait(PATIENCE_S / 3)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _ours(self, name: str) -> list[str]:
        url = self.detour if name == "devices" and self.detour else self.url
        return [sys.executable, "-m", "tests.support.live_federation", name, str(self.folder), url]

    def _broker(self) -> list[str]:
        program = find_mosquitto()
        assert program is not None  # such a test is marked `broker`
        conf, text = self.folder / "mosquitto.conf", MOSQUITTO_CONF.format(port=self.port, web="")
        if self.persistent:
            text = text.replace("persistence false\n", PERSISTENCE.format(folder=self.folder))
        # Started by root it would become another user, who cannot write here.
        conf.write_text(f"{text}user {getpass.getuser()}\n")
        return [program, "-c", str(conf)]

    def _wait_for_broker(self) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                continue
            return
        raise TimeoutError("mosquitto does not answer")

    def listen_until(self, spy: MqttTransport, found: Callable[[Message], bool]) -> Message:
        """The first message for which `found`; the spy subscribes again whenever its connection is a new one."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            event = spy.receive(1.0)
            if isinstance(event, Connected):
                spy.subscribe("fc/v1/#")
            elif isinstance(event, Message):
                self.heard += 1
                if found(event):
                    return event
            for name, process in self.processes.items():
                assert process.poll() is None, self._log(name)
        logs = "\n".join(f"{name}: {self._log(name)}" for name in self.processes)
        raise TimeoutError(f"not heard; {self.heard} other messages were\n{logs}")

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-2_000:]

    def final_states(self) -> dict[str, bytes]:
        """As `Federation.final_states`."""
        with closing(Store(settings(self.folder).folder / "store")) as store:
            found = store.states.last(store.states.run_id("fesem", str))
            return {} if found is None else {"fesem": state_codec.encode_state(found[1])}

    def outcome(self) -> Outcome:
        """As `Federation.outcome`."""
        return self.final_states(), self.rounds()

    def rounds(self) -> list[dict[str, Any]]:
        """As `Federation.rounds`."""
        file = settings(self.folder).folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        records = [json.loads(line) for line in lines]
        return [{k: v for k, v in r.items() if k not in ("bytes", "seconds")} for r in records if r["event"] == "round"]


@contextmanager
def scene(
    folder: Path,
    *,
    persistent: bool = False,
    **changes: Any,  # noqa: ANN401 - of a configuration
) -> Iterator[tuple[ProcessScene, MqttTransport]]:
    """A broker with a spy on it, and no other client yet."""
    made = ProcessScene(folder, persistent, changes=changes)
    open_signing_key(settings(folder).folder)  # devices pin it, so it is there before them
    made.start("broker")
    spy = MqttTransport(made.url, "spy", jitter=soon)
    try:
        spy.connect()
        yield made, spy
    finally:
        made.end()
        spy.close()


def nth(kind: str, count: int, *, says: str = "") -> Callable[[Message], bool]:
    """The `count`-th message on a topic of this kind; of control messages only those of kind `says`, "ack" for one."""
    left = count

    def found(message: Message) -> bool:
        nonlocal left
        try:
            if TOPICS.parse(message.topic).kind != kind or not message.payload:
                return False
            if says and messages.read_message(message.payload)["k"] != says:
                return False
        except Malformed:
            return False
        left -= 1
        return left == 0

    return found


def coordinator(folder: Path, url: str) -> None:
    """One coordinator process, until SIGTERM."""
    made = settings(folder)
    give_back_large_blocks()  # as `serve` does
    note_heap_use(folder / HEAP_FILE)
    with closing(Store(made.folder / "store")) as store:
        seed_program(store, ballast=_changes(folder).get("ballast", BALLAST))

        def dial(will: Will | None) -> Transport:
            return MqttTransport(url, f"{FEDERATION}.coordinator.0", will=will, jitter=soon)

        server = Server(made, store, dial=dial, clock=SystemClock())
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        server.run()


def client(  # noqa: PLR0913 - the parts of a device
    folder: Path,
    url: str,
    number: int,
    cid: str,
    local: DeviceData,
    *,
    engine: Callable[[], WideEngine] = WideEngine,
    tell: Tell = lambda _: None,
    jitter: Callable[[float, float], float] = soon,
) -> Client:
    """One device of the federation in this folder."""
    made = ClientConfig(
        federation=FEDERATION,
        device_id=cid,
        broker=url,
        data=folder / cid,
        state=folder / cid / "state",
        signing_keys=(open_signing_key(settings(folder).folder).public,),
        min_battery_percent=0,
    )

    def dial(will: Callable[[], Will]) -> Transport:
        return MqttTransport(url, f"{FEDERATION}.{cid}", will=will, jitter=jitter)

    return Client(
        made,
        dial,
        local=local,
        clock=SystemClock(),
        rng=np.random.default_rng(number),
        open_engine=lambda *_, **__: engine(),
        tell=tell,
    )


def run_until_told(clients: Sequence[Client]) -> None:
    """A thread for each, until SIGTERM or until one of them dies."""
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leave.set())

    def live(client: Client) -> None:
        try:
            client.run()
        finally:
            leave.set()  # one that dies ends them all, so that the test fails at once

    threads = [threading.Thread(target=live, args=(client,), name=client.config.device_id) for client in clients]
    for thread in threads:
        thread.start()
    leave.wait()
    for each in clients:
        each.stop()
    for thread in threads:
        thread.join()


def devices(folder: Path, url: str) -> None:
    """All devices in one process, until SIGTERM."""
    round_by_known_numbers()
    fleet = softmax_program.grouped_fleet(settings(folder).fleet.min_devices, 2)
    run_until_told([client(folder, url, number, *item) for number, item in enumerate(fleet.items())])


if __name__ == "__main__":
    {"coordinator": coordinator, "devices": devices}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
