"""Signs of life, received on a real datagram socket as systemd would."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_client.runtime.systemd_watchdog import Watchdog
from tests.support.scripted_coordinator import DeviceStage, Script


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
