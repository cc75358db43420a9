"""`serve` as a process: several federations, a broker of its own, and signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from coordinator.config import read_config
from coordinator.local_broker import Broker, broker_url, embedded_broker_warning, local_broker
from coordinator.service import open_store, run_service
from coordinator.status_in_words import status_lines
from coordinator.storage.status import read_status
from coordinator.storage.store import Store
from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.messages import write_message
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Message
from edge_client.transport.mqtt import MqttTransport
from tests.support import ports
from tests.support.patience import patience
from tests.support.virtual_federation import seed_program

PATIENCE_S = patience(200)  # a process that imports torch, on a machine that may be busy
START = "from coordinator.__main__ import start; start()"  # as the console script ends; Python's own end may abort
RESEND_S = 2  # a message is sent again after that; one that comes twice changes nothing


def written(tmp_path: Path, name: str, broker: str, **changes: Any) -> Path:  # noqa: ANN401 - TOML values
    """A configuration whose program is compiled already."""
    table = {
        "federation": name,
        "broker": broker,
        "folder": name,
        "formats": [],
        "model": {"name": "digits-mlp", "engines": ["onnx"]},
        "runs": [{"method": "fedavg", "num-rounds": 1}],
    }
    path = tmp_path / f"{name}.toml"
    path.write_text(tomli_w.dumps(table | changes))
    folder = read_config(path).folder
    folder.mkdir()
    store = Store(folder / "store")
    seed_program(store)
    store.close()
    return path


@contextmanager
def started(*arguments: str, code: str = START) -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str], *wanted: str) -> list[str]:
    """The lines of stderr until each of these words was in one."""
    assert process.stderr is not None
    lines: list[str] = []
    while not all(any(word in line for line in lines) for word in wanted):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    return lines


def test_one_process_serves_several_federations_over_the_broker_that_it_starts(tmp_path: Path, free_port: int) -> None:
    own = f"embedded:{free_port}"
    configs = [str(written(tmp_path, name, "mqtt://nowhere:1")) for name in ("one", "two")]
    with started("serve", *configs, "--broker", own) as process:
        named = (f"{name}: {said}" for name in ("one", "two") for said in (f"leading {name}, epoch 1", "waiting: 0"))
        lines = heard(process, *named, "digits-mlp ready")
        assert f"embedded broker at mqtt://127.0.0.1:{free_port}, for this machine only\n" in lines
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "Traceback" in rest) == (0, False)
    assert [read_status(tmp_path / name)["phase"] for name in ("one", "two")] == ["stopped", "stopped"]


def test_browsers_of_each_federation_reach_the_broker_that_several_share(tmp_path: Path, free_port: int) -> None:
    web_ports = sorted(ports.free_port() for _ in range(2))
    own = f"embedded:{free_port}"
    web: Sequence[dict[str, int]] = ({"web-port": web_ports[1]}, {"web-port": web_ports[0]}, {})
    configs = [
        str(written(tmp_path, name, own, **more)) for name, more in zip(("one", "two", "three"), web, strict=True)
    ]
    with started("serve", *configs) as process:
        lines = heard(process, "embedded broker at", *(f"leading {name}" for name in ("one", "two", "three")))
        named = " and ".join(f"ws://127.0.0.1:{port}" for port in web_ports)
        (line,) = (line for line in lines if line.startswith("embedded broker at"))
        assert line.endswith(f":{free_port}, for browsers at {named}, for this machine only\n")
        for port in web_ports:
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()


@pytest.mark.broker
def test_of_several_federations_a_warning_too_begins_with_the_name_of_its_own(
    tmp_path: Path, mosquitto: Broker
) -> None:
    configs = [str(written(tmp_path, name, mosquitto.url)) for name in ("one", "two")]
    with started("serve", *configs) as process:
        heard(process, "one: waiting: 0", "two: waiting: 0")
        mosquitto.stop()
        heard(process, "one: the broker is gone", "two: the broker is gone")


@pytest.mark.broker
def test_a_federation_that_fails_leaves_the_others_alone(tmp_path: Path, mosquitto: Broker) -> None:
    good = written(tmp_path, "good", mosquitto.url)
    bad = written(tmp_path, "bad", mosquitto.url, **{"start-timeout-s": 0.1})
    with started("serve", str(good), str(bad)) as process:
        heard(
            process, "leading good", "bad has ended, until `serve` is started again: 0 of 1 devices came within 0.1 s"
        )
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "Traceback" in rest) == (4, False)


def test_while_it_compiles_what_its_first_device_asks_for_it_says_so_status_knows_the_federation_and_ctrl_c_stops_it(
    tmp_path: Path, free_port: int
) -> None:
    table: dict[str, Any] = {
        "federation": "home",
        "broker": f"embedded:{free_port}",
        "folder": "run",
        "formats": [],
    }
    table |= {"model": {"name": "digits-mlp"}, "runs": [{"method": "fedavg", "num-rounds": 1}]}
    (tmp_path / "home.toml").write_text(tomli_w.dumps(table))
    device = MqttTransport(f"mqtt://127.0.0.1:{free_port}", "dev-1")
    with started("serve", str(tmp_path / "home.toml")) as process, closing(device):
        heard(process, "waiting: 0 of 1 devices")
        device.connect()
        device.subscribe(Topics("home").coord())
        while not isinstance(device.receive(PATIENCE_S), Message):  # what is said before its record counts later
            pass
        born = write_message("st", ident="1", t_ms=0, s="on", bd=1, caps={"engine": "onnx", "n": 5})
        device.publish(Topics("home").state("dev-1"), born, retain=True)
        while not device.drain(0, RESEND_S):  # a connection that is lost takes with it what it has not delivered
            device.publish(Topics("home").state("dev-1"), born, retain=True)
        heard(process, "compiling the training program: model digits-mlp for onnx\n")
        found = read_status(tmp_path / "run")
        assert (found["federation"], found["phase"], found["error"]) == ("home", "compiling", None)
        assert status_lines(found)[0].startswith("federation home, epoch 1: compiling")
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=PATIENCE_S)
    assert "stopping within 2 s (a second Ctrl-C: at once); started again, it continues where it was\n" in rest
    assert "Traceback" not in rest
    assert (process.returncode, read_status(tmp_path / "run")["phase"]) == (130, "stopped")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_that_another_thread_takes_stops_it(tmp_path: Path, free_port: int, number: int, code: int) -> None:
    """Python calls the handler in the main thread, and does not wake it."""
    taken = "import signal, threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    taken += "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])\n"
    with started("serve", str(written(tmp_path, "home", f"embedded:{free_port}")), code=taken + START) as process:
        heard(process, "leading home")
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_after_a_signal_no_library_is_waited_for(tmp_path: Path, free_port: int, number: int, code: int) -> None:
    """Those of the exporters took the interpreter's end 7 s, of the 10 s that a container has."""
    slow = "import sys\nclass Library:\n    def __del__(self): print('a library ends slowly', file=sys.stderr)\n"
    slow += "sys.library = Library()\n"
    config = str(written(tmp_path, "home", f"embedded:{free_port}"))
    with started("serve", config, code=slow + START) as process:
        heard(process, "leading home")
        process.send_signal(number)
        _, rest = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "a library" in rest) == (code, False)
    assert read_status(tmp_path / "home")["phase"] == "stopped"


def test_prometheus_reads_the_newest_scores_of_before_a_restart(tmp_path: Path, free_port: int) -> None:
    """It read nothing until the next round, and nothing ever where the runs were done."""
    pytest.importorskip("prometheus_client")
    port = ports.free_port()
    config = written(tmp_path, "home", f"embedded:{free_port}", loggers=f"prometheus:{port}")
    scores: list[dict[str, Any]] = [{"accuracy": {"micro": 0.25}}, {"accuracy": {"micro": 0.5}}, {"accuracy": {}}]
    with closing(Store(tmp_path / "home" / "store")) as store:
        store.states.run_id("fedavg", lambda: "ab" * 8)
        for number, score in enumerate(scores, start=1):
            store.events.put({"event": "round", "run": "fedavg", "round": number, "seconds": number, **score})
    with started("serve", str(config)) as process:
        heard(process, "leading home")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
    for line in ('value{name="accuracy/micro",run="fedavg"} 0.5', '{run="fedavg"} 3.0', 'seconds",run="fedavg"} 3.0'):
        assert f"{line}\n" in text


@pytest.mark.parametrize("log", ["a full disk", "a reader that has left", "nothing"])
def test_a_log_that_takes_no_line_ends_nothing(tmp_path: Path, free_port: int, log: str) -> None:
    """The coordinator ended with its first line: with code 1, or after a broken pipe with 0, as if all were well."""
    config = written(tmp_path, "home", f"embedded:{free_port}", **{"start-timeout-s": 0.1})
    command = [sys.executable, "-c", START, "serve", str(config)]
    if log == "nothing":
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full, os.fdopen(writing, "w") as left:  # noqa: PTH123 - a device
        stderr = {"a full disk": full, "a reader that has left": left, "nothing": subprocess.DEVNULL}[log]
        done = subprocess.run(command, stderr=stderr, timeout=PATIENCE_S, check=False)  # type: ignore[call-overload]
    assert done.returncode == 4  # it led, and waited for devices
    assert read_status(tmp_path / "home")["error"].startswith("0 of 1 devices came within 0.1 s")


def test_a_second_signal_ends_it_at_once(tmp_path: Path, free_port: int) -> None:
    """The first one asks the federations to stop before it is told of: a log whose reader is slow holds up the line."""
    busy = (
        "import sys, time, coordinator.runtime.server as s\n"
        "s.Server.run = lambda self: (sys.stderr.write('serving busy\\n'), time.sleep(600))\n"
        "s.Server.stop = lambda self: sys.stderr.write('asked to stop\\n')\n"
    )
    config = str(written(tmp_path, "busy", f"embedded:{free_port}"))
    with started("serve", config, code=busy + START) as process:
        heard(process, "serving busy")
        process.send_signal(signal.SIGTERM)
        assert "asked to stop\n" in heard(process, "stopping within 2 s (a second signal: at once)")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_a_signal_while_it_writes_to_its_log_ends_it_in_order(tmp_path: Path, free_port: int) -> None:
    """The handler wrote to the log, too, which Python refuses inside a write: a traceback and exit code 70."""
    signalled = (
        "import io, os, signal, sys\n"
        "class Log(io.RawIOBase):\n"
        "    sent = False\n"
        "    def writable(self): return True\n"
        "    def write(self, data):\n"
        "        if b'bad has ended' in bytes(data) and not self.sent:\n"
        "            self.sent = True\n"
        "            signal.raise_signal(signal.SIGTERM)\n"
        "        return os.write(2, data)\n"
        "sys.stderr = io.TextIOWrapper(io.BufferedWriter(Log()))\n"
    )
    good = written(tmp_path, "good", f"embedded:{free_port}")
    bad = written(tmp_path, "bad", f"embedded:{free_port}", **{"start-timeout-s": 0.1})
    with started("serve", str(good), str(bad), code=signalled + START) as process:
        _, told = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "Traceback" in told) == (4, False), told
    assert "stopping within 2 s" in told
    assert read_status(tmp_path / "good")["phase"] == "stopped"


def test_a_bug_ends_it_with_70_and_is_an_event_of_the_run_that_status_tells(tmp_path: Path, free_port: int) -> None:
    bug = "import coordinator.runtime.server as s; s.Server._gather = lambda *_: 1 / 0\n"
    config = written(tmp_path, "one", f"embedded:{free_port}")
    with started("serve", str(config), code=bug + START) as process:
        _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 70
    assert "Traceback" in told
    folder = read_config(config).folder
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(event["event"], event.get("message", "").partition("\n")[0]) for event in events][-1] == (
        "error",
        "ZeroDivisionError: division by zero (a bug of fedcenters)",
    )
    assert any("last error: ZeroDivisionError" in line for line in status_lines(read_status(folder)))


def test_a_folder_says_how_it_was_made_with_every_setting_of_its_method(tmp_path: Path, free_port: int) -> None:
    runs = [{"method": "fesem", "num-rounds": 1, "clusters": 2}]
    path = written(tmp_path, "one", f"embedded:{free_port}", runs=runs)
    with started("serve", str(path)) as process:
        heard(process, "leading one")
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    told = (read_config(path).folder / "config.toml").read_text()
    assert {"# clusters = 2", "# restarts = 20"} <= set(told.splitlines())
    assert '# representation = "classifier"  # the last layer' in told
    assert read_config(read_config(path).folder / "config.toml").fingerprint() == read_config(path).fingerprint()


def test_a_setting_that_is_none_is_no_line_of_it(tmp_path: Path) -> None:
    """`serve` ended in a TypeError of TOML."""
    run = {"method": "tests.support.has_option:HasOption", "num-rounds": 1}
    config = read_config(written(tmp_path, "mine", "mqtt://127.0.0.1:1", runs=[run]))
    open_store(config).close()
    assert "# option" not in (config.folder / "config.toml").read_text()


def test_samples_for_the_bundle_that_cannot_be_read_are_told_before_the_first_round(tmp_path: Path) -> None:
    (tmp_path / "reference.npz").write_bytes(b"PK\x05\x06" + bytes(18))  # an archive of no files
    path = written(tmp_path, "home", "embedded", formats=["onnx"], reference="reference.npz")
    with pytest.raises(ConfigError, match=r"reference\.npz lacks the array 'x'"):
        run_service([path], broker="", dashboard="", insecure=True, tell=lambda _: None)


@pytest.mark.parametrize(
    ("name", "told"),
    [("digits-mpl", "did you mean 'digits-mlp'"), ("nowhere_here:factory", "there is no module 'nowhere_here'")],
)
def test_a_model_that_is_nowhere_is_told_before_a_device_is_waited_for(tmp_path: Path, name: str, told: str) -> None:
    compiled = read_config(written(tmp_path, "home", "embedded", model={"name": name}))
    open_store(compiled).close()  # a compiled program needs no model
    with pytest.raises(UsageError, match=told):
        open_store(replace(compiled, folder=tmp_path / "new"))


def test_two_federations_of_one_process_need_a_name_and_a_folder_each(tmp_path: Path) -> None:
    one = written(tmp_path, "one", "embedded")
    (tmp_path / "two.toml").write_text(one.read_text().replace('folder = "one"', 'folder = "two"'))
    for second, said in ((one, "federation one"), (tmp_path / "two.toml", "federation one")):
        with started("serve", str(one), str(second)) as process:
            _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 3
        assert f"two configurations have the {said}" in errors


def test_a_fleet_too_large_for_the_embedded_broker_is_told_which_to_install() -> None:
    assert embedded_broker_warning(200) == ""
    assert embedded_broker_warning(350) == (
        "fleet of 350: the embedded broker is meant for about 200 devices; "
        "install mosquitto (apt install mosquitto), or pass --broker mqtts://host"
    )


def test_a_broker_is_a_kind_to_start_or_a_url() -> None:
    assert local_broker("embedded") == ("embedded", 1883)
    assert local_broker("mosquitto:1999") == ("mosquitto", 1999)
    assert local_broker("mqtts://host:1") is None
    assert (broker_url("embedded:7"), broker_url("mqtt://x")) == ("mqtt://127.0.0.1:7", "mqtt://x")
    for wrong in ("auto", "rabbit", "embedded:", "embedded:99999", "mosquitto:x"):
        with pytest.raises(UsageError, match="unknown broker"):
            local_broker(wrong)
