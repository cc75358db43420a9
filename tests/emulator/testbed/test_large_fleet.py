"""Many real clients in one thread: they join, train, answer, come back when the link breaks, and say goodbye."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from coordinator.config import read_config
from coordinator.local_broker import Broker
from coordinator.storage.key_value_store import DONE_FACT
from coordinator.storage.status import read_status
from coordinator.storage.store import Store
from edge_client.errors import ConfigError, FedcentersError, UsageError
from edge_client.transport.base import Message, Will
from edge_client.transport.mqtt import SYSTEM_CREDENTIALS, MqttTransport
from edge_client.transport.tls import Credentials
from emulator.testbed import event_loop, large_fleet
from emulator.testbed.event_loop import ClientEventLoop
from emulator.testbed.large_fleet import ClientProcess, FleetArgs, SharedEngines, run_fleet
from tests.support import softmax_program
from tests.support.guarded_broker import FEDERATION, guarded_broker, provision_federation, try_connect
from tests.support.patience import patience
from tests.support.virtual_federation import WideEngine, seed_program

PATIENCE_S = patience(90.0)
CERTIFICATE = {"certificate": "crt", "key": "key"}  # setting: the end of the coordinator's file


def written(folder: Path, broker: str, devices: int, **more: str) -> Path:
    """A coordinator's configuration for softmax regression, whose program needs no runtime and no compiler."""
    settings = {"method": "fedavg", "num-rounds": 1, "local-steps": 2, "batch-size": 8}
    table = {
        "federation": "crowd",
        "broker": broker,
        "folder": "run",
        "min-devices": devices,
        "deadline-s": PATIENCE_S,
        "formats": [],
        "exit-when-done": True,
        "block": 4096,
        "model": {"name": "softmax", "batch-size": 8, "engines": ["onnx"]},
        "runs": [settings],
        **more,
    }
    path = folder / "coordinator.toml"
    path.write_text(tomli_w.dumps(table))
    read_config(path).folder.mkdir()
    store = Store(read_config(path).folder / "store")
    seed_program(store, ballast=8_192)
    store.close()
    return path


@contextmanager
def coordinator(config: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "coordinator", "serve", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def softmax_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices hold the two-class data of these tests, and train it without a runtime."""
    local = list(softmax_program.grouped_fleet(4, 2).values())
    monkeypatch.setattr(large_fleet, "_drawn", lambda _: lambda index: local[index % 4])
    monkeypatch.setattr(large_fleet, "open_engine", lambda *_, **__: WideEngine())


@pytest.mark.broker
@pytest.mark.usefixtures("softmax_devices")
def test_a_fleet_in_one_thread_finishes_a_training_with_uploads_in_blocks(tmp_path: Path, mosquitto: Broker) -> None:
    config = written(tmp_path, mosquitto.url, 20)
    fleet = ClientProcess(FleetArgs(config=config, devices=20), tmp_path / "state")
    with coordinator(config) as process:
        fleet.run(lambda: process.poll() is not None, lambda _: None)
        assert process.returncode == 0
    counts = fleet.counts()
    fleet.close()
    assert (counts["devices"], counts["acknowledged"]) == (20, 20)
    assert sorted(json.loads(_last_round(config))["per_device"]) == [f"device-{i:05d}" for i in range(20)]
    assert (tmp_path / "state" / "device-00019" / "state.json").is_file()


@pytest.mark.broker
@pytest.mark.usefixtures("softmax_devices")
def test_a_fleet_with_the_certificates_of_provision_trains_over_tls(tmp_path: Path) -> None:
    names = ("pump-1", "pump-2", "pump-3")
    with guarded_broker(tmp_path, *names) as broker:
        keys = broker.work.folder
        mine = {name: str(keys / "coordinator" / f"coordinator.{end}") for name, end in CERTIFICATE.items()}
        mine |= {"ca": str(keys / "coordinator" / "ca.crt"), "signing-folder": str(keys / "coordinator")}
        config = written(tmp_path, broker.url, 3, federation=FEDERATION, **mine)
        args = FleetArgs(config=config, devices=3, identities=keys / "devices")
        fleet = ClientProcess(args, tmp_path / "state")
        with coordinator(config) as process:
            fleet.run(lambda: process.poll() is not None, lambda _: None)
            assert process.returncode == 0
        fleet.close()
    assert sorted(json.loads(_last_round(config))["per_device"]) == list(names)


def test_a_fleet_without_certificates_is_refused_where_the_broker_wants_them(tmp_path: Path) -> None:
    config = written(tmp_path, "mqtts://127.0.0.1:8883", 1)
    with pytest.raises(UsageError, match=r"asks each device for a certificate[\s\S]*--identities keys/devices"):
        run_fleet(FleetArgs(config=config, devices=1), workers=1, until_done=True, say=lambda _: None)


def test_more_devices_than_identities_are_refused(tmp_path: Path) -> None:
    config = written(tmp_path, "mqtts://127.0.0.1:8883", 2)
    provision_federation(tmp_path / "keys", "pump-1")
    args = FleetArgs(config=config, devices=2, identities=tmp_path / "keys" / "devices")
    with pytest.raises(UsageError, match=r"has 1 folder with a client.toml; 2 devices are wanted"):
        run_fleet(args, workers=1, until_done=True, say=lambda _: None)


def test_a_fleet_that_reaches_no_broker_says_why(tmp_path: Path, free_port: int) -> None:
    class ToldError(Exception):
        pass

    def say(words: str) -> None:
        if "0 acknowledged; the last connection failed: " in words and words.endswith("Connection refused"):
            raise ToldError

    config = written(tmp_path, f"mqtt://127.0.0.1:{free_port}", 1)
    with pytest.raises(ToldError):
        run_fleet(FleetArgs(config=config, devices=1), workers=1, until_done=False, say=say)


@pytest.mark.broker
def test_a_fleet_whose_certificate_is_revoked_is_told_so_in_words(tmp_path: Path) -> None:
    with guarded_broker(tmp_path, "pump-1") as broker:
        broker.work.revoke("pump-1")
        broker.reload()
        while try_connect(broker.url, broker.credentials("pump-1")) == "":  # until the broker has taken the signal
            pass
        said = _why_it_failed(_dialing(broker.url, broker.credentials("pump-1")))
    assert said.startswith("the broker says that our certificate was revoked")


def test_a_broker_that_says_nothing_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told as "Normal disconnection", since the device ends such a connection."""
    monkeypatch.setattr(event_loop, "CONNACK_TIMEOUT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert _why_it_failed(_dialing(_url(listener))) == "no answer within 0 s"


def test_a_broker_that_hangs_up_is_told_so() -> None:
    """It was told as "no answer"."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        loop = _dialing(_url(listener))
        loop.run_once()
        link, _ = listener.accept()
        assert link.recv(1_000)  # bytes that are not read would reset the connection
        link.close()
        assert _why_it_failed(loop) == "the connection was closed"


def test_a_process_of_the_fleet_that_fails_is_told_by_its_words_and_not_by_logs_that_are_removed(
    tmp_path: Path,
) -> None:
    config = written(tmp_path, "embedded", 1)
    with pytest.raises(FedcentersError, match="unknown data set 'none'") as told:
        run_fleet(FleetArgs(config=config, devices=1, data_set="none"), workers=1, until_done=False, say=lambda _: None)
    assert told.value.hint == "all devices of this command have left; start it again"


def test_a_fleet_for_a_coordinator_that_is_done_leaves_in_good_order(tmp_path: Path) -> None:
    """Its processes were asked to leave while they started, which ends them with an error."""
    config = written(tmp_path, "embedded", 1)
    store = Store(read_config(config).folder / "store")
    store.facts.put(DONE_FACT, "yes")
    store.close()
    found = run_fleet(FleetArgs(config=config, devices=2), workers=2, until_done=True, say=lambda _: None)
    assert {name: found[name] for name in ("devices", "connected", "processes")} == {
        "devices": 2,
        "connected": 0,
        "processes": 2,
    }


@pytest.mark.usefixtures("softmax_devices")
def test_it_works_with_the_embedded_broker_too(tmp_path: Path, amqtt_broker: Broker) -> None:
    config = written(tmp_path, amqtt_broker.url, 5)
    fleet = ClientProcess(FleetArgs(config=config, devices=5), tmp_path / "state")
    with coordinator(config) as process:
        fleet.run(lambda: process.poll() is not None, lambda _: None)
        assert process.returncode == 0
    fleet.close()
    assert read_status(read_config(config).folder)["devices"] == 5


@pytest.mark.broker
@pytest.mark.usefixtures("softmax_devices")
def test_a_broken_link_is_reported_once_and_mended_and_goodbye_is_said_at_the_end(
    tmp_path: Path, mosquitto: Broker
) -> None:
    spy = MqttTransport(mosquitto.url, "spy")
    spy.connect()
    spy.subscribe("fc/v1/crowd/st/+")
    config = written(tmp_path, mosquitto.url, 2)
    fleet = ClientProcess(FleetArgs(config=config, devices=2), tmp_path / "state")
    while fleet.loop.connected < 2:
        fleet.loop.run_once()
    first = next(iter(fleet.loop.members))
    assert first.session is not None
    link = first.session.paho.socket()
    assert isinstance(link, socket.socket)
    link.shutdown(socket.SHUT_RDWR)
    while fleet.loop.connected == 2:
        fleet.loop.run_once()
    while fleet.loop.connected < 2:
        fleet.loop.run_once()
    fleet.loop.run_once()
    fleet.close()
    said = _said_until_goodbye(spy, "device-00000")
    spy.close()
    assert [(word["s"], word["bd"]) for word in said] == [("on", 1), ("lost", 1), ("on", 2), ("off", 2)]
    assert fleet.loop.errors() == []


def test_without_a_broker_the_loop_tries_again_for_days_and_no_device_dies(free_port: int) -> None:
    waits: list[float] = []

    def jitter(low: float, high: float) -> float:
        waits.append(high)
        return 0.0

    loop = ClientEventLoop(f"mqtt://127.0.0.1:{free_port}", jitter=jitter)
    transport = loop.transport("x", lambda: Will("t", b""))
    transport.connect()
    while len(waits) < 1_100:
        loop.run_once(0.0)
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, *[120.0] * 1_094]
    transport.close()


def test_devices_of_one_process_share_an_engine_per_set_of_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(large_fleet, "open_engine", lambda name, *_, **__: opened.append(name))
    engines, program = SharedEngines(), softmax_program.program()
    for device, files in (("a", {"step": "x"}), ("b", {"step": "x"}), ("c", {"step": "x", "evaluate": "y"})):
        engines("onnx", program, {name: Path(device) / file for name, file in files.items()}, threads=1)
    assert len(opened) == 2


def test_the_newest_counts_are_read_without_those_before(tmp_path: Path) -> None:
    """A fleet that ran for a week read all its counts five times a second."""
    path = tmp_path / "counts"
    path.write_bytes(b'{"computed": 1}\n' * 500_000 + b'{"computed": 2}\n{"comp')
    tracemalloc.start()
    found, (_, most) = large_fleet._last(path), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == {"computed": 2}
    assert most < 100_000


def test_a_fleet_over_a_network_in_plain_text_is_refused(tmp_path: Path) -> None:
    config = written(tmp_path, "mqtt://192.0.2.1", 1)
    with pytest.raises(ConfigError, match="not encrypted"):
        ClientProcess(FleetArgs(config=config, devices=1), tmp_path / "state")


def test_more_devices_than_open_files_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(tmp_path, "embedded", 1)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(UsageError, match=r"202 open files are needed[\s\S]*ulimit -Hn 202"):
        ClientProcess(FleetArgs(config=config, devices=1), tmp_path / "state")


def _last_round(config: Path) -> str:
    lines = (read_config(config).folder / "metrics.jsonl").read_text().splitlines()
    return next(line for line in lines if '"event":"round"' in line)


def _said_until_goodbye(spy: MqttTransport, cid: str) -> list[dict[str, Any]]:
    """The presence messages of a device, the last of which says that it leaves."""
    found: list[dict[str, Any]] = []
    while not found or found[-1]["s"] != "off":
        event = spy.receive(PATIENCE_S)
        assert event is not None, found
        found += [json.loads(event.payload)] if isinstance(event, Message) and event.topic.endswith(cid) else []
    return found


def _url(listener: socket.socket) -> str:
    return f"mqtt://127.0.0.1:{listener.getsockname()[1]}"


def _dialing(url: str, credentials: Credentials = SYSTEM_CREDENTIALS) -> ClientEventLoop:
    """A loop whose one device connects when it runs."""
    loop = ClientEventLoop(url, jitter=lambda *_: 0.0)
    transport = loop.transport("demo.pump-1", lambda: Will("t", b""), credentials)
    transport.connect()
    return loop


def _why_it_failed(loop: ClientEventLoop) -> str:
    while not loop.reason:
        loop.run_once()
    return loop.reason
