"""`doctor`: what is well is said to be, and what is not is a FAIL with what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from coordinator.local_broker import Broker
from edge_client import doctor as doctors
from edge_client.cli import main
from edge_client.config import ClientConfig, load_config
from edge_client.doctor import CheckResult, load_probe, run_checks
from edge_client.engines.base import open_engine
from edge_client.engines.golden_run import run_golden
from edge_client.engines.runtime_versions import runtime_version
from edge_client.protocol.secure import keys
from edge_client.runtime import train_conditions as device_module
from edge_client.runtime.train_conditions import DeviceStatus
from edge_client.transport.broker_rights import NO_LIST
from edge_client.transport.folder_lock import lock_state
from tests.edge_client.engines.broken import break_engine
from tests.support.guarded_broker import FEDERATION, guarded_broker, provision_federation, try_connect

ROOT = Path(__file__).parents[2]
NAMES = [
    *("python", "glibc", "runtime", "masked sums", "data", "broker", "certificate"),
    *("clock", "disk", "memory", "power", "phone", "temperature", "training now"),
]


def device(folder: Path, broker: str, **more: str) -> Path:
    """A configuration with data."""
    (folder / "data").mkdir(exist_ok=True)
    np.savez(folder / "data" / "train.npz", x=np.zeros((4, 5), np.float32), y=np.arange(4) % 2)
    table = {"federation": FEDERATION, "device-id": "dev-1", "broker": broker, "data": "data", "state": "state", **more}
    path = folder / "client.toml"
    lines = [f'{key} = "{value}"' for key, value in table.items()]
    path.write_text("\n".join([*lines, f'signing-keys = ["{"ab" * 32}"]', "max-temperature = 0"]) + "\n")
    return path


def with_certificate(folder: Path, broker: str, home: Path) -> ClientConfig:
    """A device with the files that `provision` wrote into `home`."""
    files = {"ca": "ca.crt", "certificate": "device.crt", "key": "device.key"}
    return load_config(device(folder, broker, **{name: str(home / file) for name, file in files.items()}), {})


def found(config: ClientConfig) -> dict[str, CheckResult]:
    return {check.name: check for check in run_checks(config)}


@pytest.mark.parametrize("engine", ["onnx", "litert"])
def test_the_probe_makes_its_golden_run_on_every_runtime(engine: str) -> None:
    program, files = load_probe(engine)
    golden = program.golden[engine]
    assert len(golden.losses) == 10
    assert run_golden(open_engine(engine, program, files), program, golden) < golden.tolerance / 100


@pytest.mark.broker
def test_a_device_that_is_well_passes_every_check(
    tmp_path: Path, mosquitto: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    path = device(tmp_path, mosquitto.url)
    assert main(["doctor", "--config", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"ok   {name}" for name in NAMES]
    assert main(["doctor", "--config", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["fit"], [check["name"] for check in told["checks"]]) == (True, NAMES)
    assert "took 10 steps" in told["checks"][2]["said"]


def test_keys_that_are_computed_wrongly_are_told_before_a_run_on_sums_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(device(tmp_path, "mqtt://127.0.0.1:1"), {})
    assert "where a run has `secure`" in found(config)["masked sums"].said
    monkeypatch.setattr(keys, "seal_private", lambda root: root)
    told = found(config)["masked sums"]
    assert (told.ok, told.hint) == (False, "install another version of `cryptography`")


@pytest.mark.broker
def test_over_tls_the_certificate_decides(tmp_path: Path) -> None:
    with guarded_broker(tmp_path, "dev-1", "dev-2") as broker:
        home = broker.work.folder / "devices" / "dev-1"
        config = with_certificate(tmp_path, broker.url, home)
        well = found(config)
        assert well["broker"].ok, well["broker"].said
        assert well["broker"].said.endswith("its access list lets this device write, and in its own name alone")
        foreign = found(replace(config, federation="other"))["broker"]
        assert (foreign.ok, "belongs to CN=dev-1" in foreign.said) == (False, True)  # the list was blamed
        assert well["certificate"].said.startswith("valid for 3")
        other = replace(config, device_id="dev-2")
        assert "belongs to" in found(other)["certificate"].said
        bare = found(replace(config, certificate=None, key=None))
        assert not bare["broker"].ok
        with lock_state(config.state):  # as a client does while it runs
            said = found(config)["broker"].said
            assert "takes connections over TLS" in said
            assert "not logged in: this device's client is running" in said
            authority = provision_federation(tmp_path / "foreign").folder / "authority" / "ca.crt"
            told = found(replace(config, ca=authority))["broker"]
            assert (told.ok, "is not from the authority in" in told.said) == (False, True)
        (home / "device.key").chmod(0o644)
        assert "chmod 600" in found(config)["certificate"].hint


@pytest.mark.broker
def test_a_broker_whose_list_does_not_bind_the_device_fails(tmp_path: Path) -> None:
    with guarded_broker(tmp_path, "dev-1") as broker:
        home = broker.work.folder / "devices" / "dev-1"
        config = with_certificate(tmp_path, broker.url, home)
        (broker.work.folder / "broker" / "mosquitto.acl").write_text("pattern readwrite #\n")
        broker.reload()
        while (told := doctors._checked("broker", doctors._broker, config)).ok:  # until the broker has taken the signal
            pass
    assert (told.said, "`provision`" in told.hint) == (NO_LIST, True)


def test_a_key_that_this_user_may_not_read_is_named_by_both_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker's check said "[Errno 13] Permission denied; check the address", and neither named the file."""
    home = provision_federation(tmp_path / "keys", "dev-1").folder / "devices" / "dev-1"
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != home / "device.key")  # root may read all
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"mqtts://127.0.0.1:{server.getsockname()[1]}"
        config = with_certificate(tmp_path, url, home)
        told = found(config)
    for name in ("broker", "certificate"):
        assert (told[name].ok, told[name].said) == (False, f"this user may not read the private key {config.key}")
        assert "chown" in told[name].hint


def test_a_full_disk_is_told_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(device(tmp_path, "mqtt://127.0.0.1:1"), {})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    monkeypatch.setattr(doctors, "write_atomically", fill)
    told = found(config)["disk"]
    assert (told.ok, told.said) == (False, f"0 MiB are free in {config.state}")


def fill(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("state", ["its client runs", "its token is not used yet"])
def test_a_broker_that_is_away_is_a_fail_also_where_the_device_would_not_log_in(
    tmp_path: Path, free_port: int, state: str
) -> None:
    certificate = {"ca": "ca.crt", "certificate": "device.crt", "key": "device.key", "token": "token"}
    config = load_config(device(tmp_path, f"mqtts://127.0.0.1:{free_port}", **certificate), {})
    with lock_state(config.state):
        if state == "its token is not used yet":
            (tmp_path / "token").write_text("a token")
        told = found(config)["broker"]
    assert (told.ok, "Connection refused" in told.said, bool(told.hint)) == (False, True, True)


@pytest.mark.broker
@pytest.mark.parametrize("joined", [False, True])
def test_a_revoked_device_is_told_so_at_every_try(tmp_path: Path, *, joined: bool) -> None:
    """Also beside its client, in whose place it does not log in."""
    with guarded_broker(tmp_path, "dev-1") as broker:
        home = broker.work.folder / "devices" / "dev-1"
        config = with_certificate(tmp_path, broker.url, home)
        broker.work.revoke("dev-1")
        broker.reload()
        while try_connect(broker.url, broker.credentials("dev-1")) == "":  # until the broker has taken the signal
            pass
        with lock_state(config.state) if joined else nullcontext():
            for _ in range(20):  # the broker's close overtakes the first packet in about one of six
                said = doctors._checked("broker", doctors._broker, config)
                assert (said.ok, "the broker says that our certificate was revoked" in said.said) == (False, True), said


def test_what_is_wrong_is_a_fail_with_a_hint_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    path = device(tmp_path, f"mqtt://127.0.0.1:{free_port}")
    (tmp_path / "data" / "train.npz").unlink()
    (tmp_path / "state").write_text("a file where a folder should be")
    assert main(["doctor", "--config", str(path)]) == doctors.EXIT_CHECK_FAILED
    failed = {line[5:].partition(":")[0]: line for line in capsys.readouterr().out.splitlines() if line[:4] == "FAIL"}
    assert sorted(failed) == ["broker", "data", "disk"]
    assert all("; " in line for line in failed.values())


def test_a_device_without_samples_is_told_that_it_can_only_ask_for_a_center(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = device(tmp_path, "mqtt://127.0.0.1:1")
    np.savez(tmp_path / "data" / "train.npz", x=np.zeros((0, 1, 8, 8), np.float32), y=np.zeros(0, int))
    assert main(["doctor", "--config", str(path)]) == doctors.EXIT_CHECK_FAILED
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " data: " in line]
    assert line.startswith("FAIL data: no samples in ")
    assert "it can only ask for a center; write train.npz with numpy.savez" in line


def test_an_empty_held_out_part_is_none_held_out(tmp_path: Path) -> None:
    config = load_config(device(tmp_path, "mqtt://127.0.0.1:1"), {})
    np.savez(tmp_path / "data" / "test.npz", x=np.zeros((0, 5), np.float32), y=np.zeros(0, int))
    assert doctors._data(config) == "4 samples of [5], none held out"


def test_a_runtime_that_is_missing_or_wrong_is_told(tmp_path: Path) -> None:
    config = load_config(device(tmp_path, "mqtt://127.0.0.1:1"), {})
    wall = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from pathlib import Path\nfrom edge_client import config, doctor\n"
        f"print(next(c for c in doctor.run_checks(config.load_config(Path({str(tmp_path / 'client.toml')!r}), {{}}))"
        " if c.name == 'runtime').line())\n"
    )
    done = subprocess.run([sys.executable, "-c", wall], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("FAIL runtime: onnxruntime cannot be imported")
    for group in ("lr", "anchor", "linear"):
        with pytest.MonkeyPatch.context() as patch:
            break_engine(patch, "onnx", group, np.zeros_like)
            told = found(config)["runtime"]
            assert (told.ok, told.hint) == (False, "install another version of it")
            assert told.said.startswith(f"{runtime_version('onnx')} computes wrongly: ")


def test_of_every_other_installed_runtime_it_is_told_whether_it_could_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(device(tmp_path, "mqtt://127.0.0.1:1"), {})
    onnx, litert = runtime_version("onnx"), runtime_version("litert")
    first, second = found(config)["runtime"].said.split("; ")
    assert first.startswith(f"{onnx} took 10 steps on cpu, ")
    assert second.startswith(f"{litert} took 10 steps on cpu, ")
    break_engine(monkeypatch, "litert", "mu", np.zeros_like)
    told = found(config)["runtime"]
    assert told.ok
    assert f"{litert} computes wrongly: " in told.said
    assert told.said.endswith(", and is never used")


def test_a_hot_a_dry_and_a_full_board_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(load_config(device(tmp_path, "mqtt://127.0.0.1:1"), {}), max_temperature=80)
    bad = DeviceStatus(draining=(("BAT0", 3),), temperatures=(("cpu", 91.0),), free_mib=10)
    monkeypatch.setattr(device_module, "read_device_status", lambda: bad)
    told = found(config)
    assert [name for name in ("memory", "power", "temperature", "training now") if told[name].ok] == []
    assert told["temperature"].line() == "FAIL temperature: cpu at 91 °C; give it air, or raise max-temperature"


PHONE_ANSWERS = ('{"plugged": "PLUGGED_AC", "percentage": 50}', '{"supplicant_state": "COMPLETED"}')


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (PHONE_ANSWERS, "plugged in, Wi-Fi; Android answers"),
        (("", PHONE_ANSWERS[1]), "Android says nothing of the battery"),
        (("", '{"API_ERROR": "no permission"}'), "Android says nothing of the battery and the Wi-Fi"),
    ],
)
def test_on_a_phone_with_termux_it_is_told_whether_android_answers(
    answers: tuple[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in zip(device_module.TERMUX_COMMANDS, answers, strict=True):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{answer}'\n" if answer else "#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    device_module.ask_termux.cache_clear()
    told = found(load_config(device(tmp_path, "mqtt://127.0.0.1:1"), {}))["phone"]
    device_module.ask_termux.cache_clear()
    assert told.said.startswith(said)
    assert told.ok == ("answers" in said)
    assert "Termux:API" in told.line()


@pytest.mark.parametrize(
    ("answer", "said"),
    [(b"HTTP", "does not answer as a broker"), (b"", "does not answer as a broker"), (b"\x20\x02\x00\x05", "let this")],
)
def test_what_listens_there_and_is_no_broker_for_us_is_told(tmp_path: Path, answer: bytes, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            link, _ = server.accept()
            with link:
                link.recv(100)
                link.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        config = load_config(device(tmp_path, f"mqtt://127.0.0.1:{server.getsockname()[1]}"), {})
        assert said in found(config)["broker"].said
        thread.join()


def test_a_broker_that_takes_one_connection_alone_is_told_as_a_broker(tmp_path: Path) -> None:
    """The second connection tries the access list; its refusal had the hint to check the folders' rights."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = load_config(device(tmp_path, f"mqtt://127.0.0.1:{server.getsockname()[1]}"), {})

        def serve() -> None:
            link, _ = server.accept()
            server.close()
            with link:
                link.recv(100)
                link.sendall(b"\x20\x02\x00\x00")

        thread = threading.Thread(target=serve)
        thread.start()
        told = doctors._checked("broker", doctors._broker, config)
        thread.join()
    assert (told.ok, told.said) == (False, f"{config.broker}: [Errno 111] Connection refused")
    assert told.hint == "check the address, and that the broker runs"
