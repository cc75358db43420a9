"""Signs of life, received on a real datagram socket as systemd would."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_client.data import images
from edge_client.protocol.task import Array
from edge_client.runtime import factory
from edge_client.runtime.systemd_watchdog import Watchdog
from tests.support.scripted_coordinator import DeviceStage, Script
from tests.support.virtual_time import VirtualClock


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.settimeout(0.0)
        line.bind(address)
        yield line


def heard(line: socket.socket) -> list[str]:
    out: list[str] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            out.append(line.recv(100).decode())
    return out


@pytest.mark.parametrize("abstract", [False, True])
def test_a_manager_hears_ready_and_signs_of_life_a_few_times_per_interval(tmp_path: Path, *, abstract: bool) -> None:
    if abstract and sys.platform != "linux":
        pytest.skip("only Linux has abstract sockets")
    name = f"fedcenters-test-{os.getpid()}"
    where = ("\0" + name, "@" + name) if abstract else (str(tmp_path / "notify"),) * 2
    with manager(where[0]) as line:
        watchdog = Watchdog({"NOTIFY_SOCKET": where[1], "WATCHDOG_USEC": "180000000"})
        watchdog.notify_ready()
        for second in range(181):
            watchdog.notify_alive(float(second))
        watchdog.notify_stopping()
        assert heard(line) == ["READY=1", *["WATCHDOG=1"] * 5, "STOPPING=1"]


def test_without_a_manager_or_with_one_that_is_gone_nothing_happens(tmp_path: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "1000000"}):
        watchdog = Watchdog(environment)
        watchdog.notify_ready()
        watchdog.notify_alive(0.0)


def test_a_device_is_ready_once_it_lives_and_gives_signs_of_life_while_it_trains(tmp_path: Path) -> None:
    stage = DeviceStage(tmp_path)
    with manager(str(tmp_path / "notify")) as line:
        stage.environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "4000000"}
        before: list[int] = []

        def step() -> None:
            stage.clock.time_s += 1.0
            before.append(len(heard(line)))

        stage.before_step = step

        def script() -> Script:
            yield
            assert heard(line)[0] == "READY=1"
            stage.ask(stage.fit(steps=5))
            yield

        stage.play(script())
        assert sum(before) >= 4  # one a second, while the loop of the client was inside the training
        assert heard(line)[-1] == "STOPPING=1"


def test_a_start_that_reads_many_pictures_is_given_time_and_a_later_reading_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large photos take a small board a second each."""
    clock, folder = VirtualClock(), tmp_path / "data"

    def read(*_: object, label: str) -> tuple[Array, Array]:
        clock.time_s += 60.0
        return np.zeros((1, 2), np.float32), np.array([int(label == "dog")])

    monkeypatch.setattr(images, "read_image", read)
    monkeypatch.setattr(factory, "SystemClock", lambda: clock)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "180000000")
    (folder / "train" / "dog").mkdir(parents=True)
    (folder / "schema.toml").write_text('[images]\nsize = [1, 2]\nclasses = ["dog"]\n')
    for number in range(4):
        (folder / "train" / "dog" / f"{number}.jpg").touch()
    config = replace(DeviceStage(tmp_path).config(), data=folder, broker="mqtt://127.0.0.1")
    with manager(str(tmp_path / "notify")) as line:
        device = factory.make_client(config)
        assert heard(line) == ["WATCHDOG=1\nEXTEND_TIMEOUT_USEC=180000000"] * 4
        device._watchdog.notify_ready()
        for number in range(5):  # a new one, and others in the place of four
            (folder / "train" / "dog" / f"{number}.jpg").write_bytes(b"1")
        device._reload_samples(("r1", 1))
        assert heard(line) == ["READY=1", *["WATCHDOG=1"] * 5]
