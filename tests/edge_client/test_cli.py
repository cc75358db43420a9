"""The command line as a user meets it: help, errors with a hint and an exit code, and a clean way out."""

from __future__ import annotations

import gc
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from coordinator.local_broker import Broker
from edge_client.cli import main
from edge_client.errors import (
    ConfigError,
    DeviceRefused,
    FedcentersError,
    NetworkError,
    ProgramRefused,
    ProtocolError,
    RuntimeMissing,
    UsageError,
)
from edge_client.protocol import messages
from edge_client.protocol.topics import Topics
from edge_client.run_cli import run_cli
from edge_client.transport.base import Connected, Message
from edge_client.transport.folder_lock import lock_folder
from edge_client.transport.mqtt import MqttTransport
from tests.support.patience import patience

ROOT = Path(__file__).parents[2]
PATIENCE_S = patience(200)  # a process starts, on a machine that may be busy


def write_device(folder: Path, name: str = "dev-1", *, broker: str = "mqtt://127.0.0.1:1", **more: str) -> Path:
    np.savez(folder / "train.npz", x=np.zeros((4, 5), np.float32), y=np.arange(4) % 2)
    table = {
        "federation": "demo",
        "device-id": name,
        "broker": broker,
        "data": ".",
        "state": f"state-{name}",
        **more,
    }
    lines = [f'{key} = "{value}"' for key, value in table.items()]
    path = folder / f"{name}.toml"
    path.write_text("\n".join([*lines, f'signing-keys = ["{"ab" * 32}"]']) + "\n")
    return path


def test_no_command_prints_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "fedcenters-edge join --config" in out
    assert "nearest" in out


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train"])
    assert left.value.code == 2
    assert "nearest" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x", hint="y"), 2),
        (ConfigError("x", hint="y"), 3),
        (RuntimeMissing("x", hint="y"), 3),
        (NetworkError("x", hint="y"), 4),
        (ProtocolError("x", hint="y"), 5),
        (ProgramRefused("x", hint="y"), 5),
        (DeviceRefused("x", retry_s=1, hint="y"), 6),
        (FedcentersError("x", hint="y"), 70),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_foreseen_error_has_its_exit_code_and_ends_with_its_hint(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert run_cli(fail) == code
    told = capsys.readouterr().err
    assert "Traceback" not in told
    if not isinstance(error, KeyboardInterrupt):
        assert told.splitlines()[-1] == "hint: y"


def test_an_interrupt_inside_a_constructor_prints_nothing_of_the_object_that_it_left_half_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class CutOff(io.BytesIO):
        @property
        def name(self) -> str:  # asked by ZipFile.__init__ before it sets what its destructor reads
            raise KeyboardInterrupt

    def save() -> None:
        np.savez(CutOff(), x=np.zeros(3))

    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with pytest.raises(KeyboardInterrupt):  # without run_cli the destructor complains
        save()
    gc.collect()
    assert len(printed) == 1
    assert run_cli(save) == 130
    gc.collect()
    assert len(printed) == 1
    assert sys.unraisablehook == printed.append


class InterruptedDestructor:
    """An object whose destructor meets a Ctrl-C, as a callback of Python's imports may."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def wait_for_the_interrupt() -> None:
    InterruptedDestructor()
    threading.Event().wait(60)


def test_ctrl_c_inside_a_destructor_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(wait_for_the_interrupt, interrupted="stopped") == 130
    assert capsys.readouterr().err == "stopped\n"


def test_a_wrong_key_is_told_in_one_line_with_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_device(tmp_path, brokr="mqtt://x")
    assert main(["join", "--config", str(path)]) == 3
    told = capsys.readouterr().err
    assert "unknown key 'brokr'" in told
    assert "did you mean 'broker'?" in told


def test_an_address_that_cannot_be_read_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """It was called a bug of fedcenters."""
    assert main(["nearest", "--federation", "http://[::1", "--data", "samples"]) == UsageError.exit_code
    assert "error: 'http://[::1' is no address: Invalid IPv6 URL\n\nhint: " in capsys.readouterr().err
    assert main(["nearest", "--federation", "centers", "--data", "samples"]) == UsageError.exit_code
    assert "serve makes a folder of centers an address" in capsys.readouterr().err  # it spoke of a broker's URL


def test_missing_data_is_told_before_the_broker_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_device(tmp_path)
    (tmp_path / "train.npz").unlink()
    assert main(["join", "--config", str(path)]) == 3
    assert "no training data" in capsys.readouterr().err


def test_help_loads_none_of_the_commands_it_lists() -> None:
    code = "import sys; from edge_client.cli import main; main([]); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert all(command in out for command in ("join", "nearest", "enrol", "doctor", "flash", "release"))
    loaded = out.splitlines()[-1].split()
    assert not {"numpy", "edge_client.join", "edge_client.doctor", "edge_client.nearest"} & set(loaded)


def test_the_client_loads_no_runtime_before_there_is_a_program() -> None:
    code = "import sys, edge_client.join; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    )
    assert "paho.mqtt" in loaded or "edge_client.runtime.client" in loaded
    assert not loaded & {"torch", "onnxruntime", "ai_edge_litert", "typer", "rich", "sklearn", "scipy", "coordinator"}


def test_a_device_that_trains_loads_no_module_of_other_commands_nor_of_certificates(tmp_path: Path) -> None:
    """They are 3.9 MiB of its memory."""
    path = write_device(tmp_path)
    (tmp_path / "train.npz").unlink()
    code = "import sys; from edge_client.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    command = [sys.executable, "-c", code, "join", "--config", str(path)]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "edge_client.transport.tls" in loaded
    others = ("edge_client.nearest", "edge_client.board", "cryptography.x509", "tarfile")
    assert not [name for name in loaded if name.startswith(others)]


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`fedcenters-edge ...` as a process of its own."""
    command = [sys.executable, "-m", "edge_client.cli", *arguments]
    with subprocess.Popen(command, text=True, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            yield running
        finally:
            running.kill()


@contextmanager
def watching(url: str) -> Iterator[MqttTransport]:
    """A coordinator that only reads who is there."""
    watcher = MqttTransport(url, "demo.coordinator.0")
    watcher.connect()
    assert watcher.receive(PATIENCE_S) == Connected()
    watcher.subscribe(*Topics("demo").coordinator_filters())
    yield watcher
    watcher.close()


def next_state(watcher: MqttTransport) -> tuple[str, str]:
    event = watcher.receive(PATIENCE_S)
    assert isinstance(event, Message)
    return event.topic.rsplit("/", 1)[1], messages.read_message(event.payload)["s"]


@pytest.mark.broker
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_devices_of_one_process_leave_together_and_say_so(
    tmp_path: Path, mosquitto: Broker, number: signal.Signals, code: int
) -> None:
    paths = [write_device(tmp_path, name, broker=mosquitto.url) for name in ("dev-1", "dev-2")]
    with watching(mosquitto.url) as watcher, process("join", *(f"--config={path}" for path in paths)) as devices:
        assert sorted(next_state(watcher) for _ in paths) == [("dev-1", "on"), ("dev-2", "on")]
        devices.send_signal(number)
        assert sorted(next_state(watcher) for _ in paths) == [("dev-1", "off"), ("dev-2", "off")]
        assert devices.wait(PATIENCE_S) == code
        _, talk = devices.communicate()
    assert "Traceback" not in talk
    for path in paths:
        said = [line for line in talk.splitlines() if line.startswith(f"{path.stem}: ")]
        assert said[1:] == [f"{path.stem}: connected to {mosquitto.url}", f"{path.stem}: stopping"]


@pytest.mark.broker
def test_join_prints_an_object_for_each_event_or_nothing(tmp_path: Path, mosquitto: Broker) -> None:
    path = write_device(tmp_path, broker=mosquitto.url)
    for option, events in (("--json", ["connected", "stopping"]), ("--quiet", [])):
        with watching(mosquitto.url) as watcher, process("join", "--config", str(path), option) as device:
            while next_state(watcher) != ("dev-1", "on"):
                pass
            device.send_signal(signal.SIGTERM)
            out, talk = device.communicate(timeout=PATIENCE_S)
        told = [json.loads(line) for line in out.splitlines()]
        assert [(event["device"], event["event"]) for event in told] == [("dev-1", kind) for kind in events]
        assert talk.splitlines() == ([f"dev-1: joining demo at {mosquitto.url}"] if events else [])


@pytest.mark.broker
def test_a_killed_device_is_reported_lost_by_the_broker(tmp_path: Path, mosquitto: Broker) -> None:
    path = write_device(tmp_path, broker=mosquitto.url)
    with watching(mosquitto.url) as watcher, process("join", "--config", str(path)) as device:
        assert next_state(watcher) == ("dev-1", "on")
        device.kill()
        assert next_state(watcher) == ("dev-1", "lost")


@pytest.mark.broker
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_visit_that_is_ended_is_quiet_and_no_success(
    tmp_path: Path, mosquitto: Broker, number: signal.Signals
) -> None:
    path = write_device(tmp_path, broker=mosquitto.url)
    with watching(mosquitto.url) as watcher, process("nearest", "--config", str(path), "--json") as visitor:
        assert next_state(watcher) == ("dev-1", "on")
        visitor.send_signal(number)
        assert visitor.wait(PATIENCE_S) == 130
        out, talk = visitor.communicate()
    assert out == ""
    assert "Traceback" not in talk


def test_nearest_takes_other_samples_than_the_devices_file_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_device(tmp_path)
    assert main(["nearest", "--config", str(path), "--data", str(tmp_path / "others")]) == 3
    assert str(tmp_path / "others") in capsys.readouterr().err


def test_personal_steps_without_labels_are_refused_before_anything_is_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_device(tmp_path)
    np.savez(tmp_path / "train.npz", x=np.zeros((4, 5), np.float32))
    assert main(["nearest", "--config", str(path), "--personalise", "3"]) == 2
    assert "--personalise needs labels, which this data has not" in capsys.readouterr().err


def test_nearest_is_not_told_twice_who_the_device_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_device(tmp_path)
    assert main(["nearest", "--config", str(path), "--device", "dev-2", "--unsigned"]) == 2
    told = capsys.readouterr().err
    assert f"{path} says what --device would" in told
    assert "leave out --device, --unsigned" in told


def test_nearest_without_a_file_says_where_it_keeps_what_it_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    visit = [
        "nearest",
        "--federation",
        "http://127.0.0.1:1",
        "--unsigned",
        "--data",
        str(tmp_path),
        "--device",
        "porch",
    ]
    assert main(visit) == 3  # there are no samples
    said = f"porch: keeps what it fetches in {tmp_path}/.cache/fedcenters/porch; --state FOLDER names another place"
    assert said in capsys.readouterr().err
    assert main([*visit, "--state", str(tmp_path / "state")]) == 3
    assert "keeps what it fetches" not in capsys.readouterr().err


def test_an_answer_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    from edge_client.nearest.result import NearestAnswer

    answer = NearestAnswer(device="dev-1", center=1, losses={0: 2.0, 1: 0.5}, n=3, accuracy=1.0)
    told = json.loads(json.dumps(answer.to_json()))
    assert (told["center"], told["losses"], told["accuracy"]) == (1, {"0": 2.0, "1": 0.5}, 1.0)


def test_a_state_folder_that_cannot_be_written_is_a_matter_of_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    path = write_device(tmp_path, state="file/state")
    assert main(["join", "--config", str(path)]) == 3
    assert "cannot write to the state folder" in capsys.readouterr().err


def test_a_state_folder_serves_one_join_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a second process nor a second configuration of the same process may use it."""
    path = write_device(tmp_path)
    with lock_folder(tmp_path / "state-dev-1", by="join"):
        assert main(["nearest", "--config", str(path)]) == 3  # under the same name it would end the other's connection
        assert "is in use by another client of this device" in capsys.readouterr().err
        assert main(["join", "--config", str(path)]) == 3
    told = capsys.readouterr().err
    assert "state-dev-1 is in use by another client of this device" in told
    assert "hint: stop that one first: a broker keeps one connection per device" in told
    assert main(["join", "--config", str(path), "--config", str(path)]) == 3
    assert "state-dev-1 is in use by another client of this device" in capsys.readouterr().err


@pytest.mark.broker
def test_of_several_devices_the_one_whose_samples_are_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_device(tmp_path, name, data=f"of-{name}") for name in ("dev-1", "dev-2")]
    for name in ("dev-1", "dev-2"):
        (tmp_path / f"of-{name}").mkdir()
    np.savez(tmp_path / "of-dev-1" / "train.npz", x=np.zeros((2, 5), np.float32), y=np.arange(2))
    np.savez(tmp_path / "of-dev-2" / "train.npz", x=np.full((2, 5), np.nan, np.float32), y=np.arange(2))
    assert main(["join", *(f"--config={path}" for path in paths)]) == 3
    assert capsys.readouterr().err.startswith("error: dev-2: cannot use train.npz: x holds NaN")
    assert main(["join", f"--config={paths[1]}"]) == 3
    assert capsys.readouterr().err.startswith("error: cannot use train.npz: x holds NaN")


def test_a_second_join_leaves_the_first_one_alone(
    tmp_path: Path, mosquitto: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_device(tmp_path, broker=mosquitto.url)
    with watching(mosquitto.url) as watcher, process("join", "--config", str(path)) as first:
        assert next_state(watcher) == ("dev-1", "on")
        assert main(["join", "--config", str(path)]) == 3
        first.send_signal(signal.SIGTERM)
        assert next_state(watcher) == ("dev-1", "off")
        assert first.wait(PATIENCE_S) == 0
    assert "is in use by another client of this device" in capsys.readouterr().err


def test_a_full_disk_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise OSError(28, "No space left on device")

    assert run_cli(fail) == 70
    assert "this machine: [Errno 28] No space left on device" in capsys.readouterr().err
