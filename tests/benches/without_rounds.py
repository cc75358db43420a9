"""Bench: wall time to an accuracy over mosquitto, with rounds, with over-selection and without rounds.

    python -m tests.benches.without_rounds

Twenty devices, threads of one process, train softmax regression on points, half of them at once. A step takes 20 ms; on
two devices it takes 100 times as long. Each device is away for 3 s of every 10 s, at another time. The accuracy is that
of the center on the test samples of all devices, looked at after each round, outside the run.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.config_sections import RunConfig
from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import Broker, start_broker
from coordinator.runtime.server import Server
from coordinator.storage.store import Store
from edge_client.protocol.task import Array, Flat, Tensors
from edge_client.runtime.client import Client
from edge_client.transport.clock import SystemClock
from tests.support import softmax_program
from tests.support.mqtt_device import coordinator_dial, mqtt_device
from tests.support.virtual_federation import config, seed_program

DEVICES, SLOW, AT_ONCE, STEP_S, TIMES_SLOWER = 20, 2, 10, 0.02, 100
PERIOD_S, AWAY_S, TARGET, LIMIT_S = 10.0, 3.0, 0.9, 120.0
WAYS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {  # keys of the file, settings of the method
    "rounds": ({"evaluate_every": 1_000}, {"fraction-train": AT_ONCE / DEVICES}),
    "over-select 1.3": ({"evaluate_every": 1_000, "over_select": 1.3}, {"fraction-train": AT_ONCE / DEVICES}),
    "no rounds, buffer a half": ({"concurrency": AT_ONCE, "buffer": AT_ONCE // 2, "max_staleness": 100}, {}),
}


class PacedEngine(softmax_program.SoftmaxEngine):
    """A step that takes its time."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s

    def step(self, feeds: Tensors) -> dict[str, Array]:
        time.sleep(self.step_s)
        return super().step(feeds)


@dataclass
class AbsentDevice:
    """A device that connects, is away for a while, and connects again, until `over`."""

    number: int
    folder: Path
    broker: Broker
    key: bytes
    over: threading.Event

    def live(self) -> None:
        self.over.wait(AWAY_S * self.number / DEVICES)  # at another time for each
        while not self.over.is_set():
            client = self._client()
            life = threading.Thread(target=client.run, daemon=True)
            life.start()
            self.over.wait(PERIOD_S - AWAY_S)
            client.stop()
            life.join()
            self.over.wait(AWAY_S)

    def _client(self) -> Client:
        cid = f"d{self.number:02d}"
        local = softmax_program.grouped_fleet(DEVICES, 1)[cid]
        engine = PacedEngine(STEP_S * (TIMES_SLOWER if self.number < SLOW else 1))
        return mqtt_device(self.broker.url, cid, self.folder, local, key=self.key, engine=engine)


def accuracy(center: Flat) -> float:
    """Of the center on the test samples of all devices."""
    tests = [local.test for local in softmax_program.grouped_fleet(DEVICES, 1).values() if local.test is not None]
    n = softmax_program.CLASSES * softmax_program.FEATURES
    weight, bias = center[:n].reshape(softmax_program.CLASSES, -1), center[n:]
    right = [(np.asarray(test.x) @ weight.T + bias).argmax(1) == test.y for test in tests]
    return float(np.mean(np.concatenate(right)))


def seconds_to_target(folder: Path, way: str, broker: Broker) -> tuple[float, int, float]:
    """-> wall seconds until the accuracy is reached or the time is over, rounds, and the accuracy then."""
    keys, settings = WAYS[way]
    method = {"local-steps": 3, "learning-rate": 0.003, "batch-size": 8, **settings}
    run = RunConfig(method="fedavg", rounds=1_000, name="run", settings=method)
    more: dict[str, Any] = {"deadline_s": 10.0, "below_quorum": "continue", "quorum": 0.5}
    made = config(folder, devices=AT_ONCE, runs=(run,), **more, **keys)
    key, over = open_signing_key(made.folder).public, threading.Event()
    began_s, rounds, found = 0.0, 0, 0.0

    def watch(event: Mapping[str, Any]) -> None:
        nonlocal began_s, rounds, found
        now_s = time.monotonic()
        if event["event"] != "round":
            return
        last = store.states.last(store.states.run_id("run", str))
        found, rounds = accuracy(last[1].centers[0]) if last else 0.0, event["round"]
        if found >= TARGET or now_s > began_s + LIMIT_S:
            server.stop()

    with closing(Store(made.folder / "store")) as store:
        seed_program(store)
        server = Server(made, store, dial=coordinator_dial(broker.url), clock=SystemClock(), watch=watch)
        fleet = [AbsentDevice(number, folder, broker, key, over) for number in range(DEVICES)]
        lives = [threading.Thread(target=device.live, daemon=True) for device in fleet]
        began_s = time.monotonic()
        for life in lives:
            life.start()
        server.run()
        took_s = time.monotonic() - began_s
    over.set()
    for life in lives:
        life.join()
    return took_s, rounds, found


def main() -> None:
    sys.stdout.write("| way | seconds | rounds | accuracy |\n|---|---|---|---|\n")
    for way in WAYS:
        with tempfile.TemporaryDirectory() as name, start_broker(Path(name) / "broker", "mosquitto") as broker:
            seconds, rounds, found = seconds_to_target(Path(name) / "run", way, broker)
        reached = f"{seconds:.0f}" if found >= TARGET else f"not within {seconds:.0f}"
        sys.stdout.write(f"| {way} | {reached} | {rounds} | {found:.1%} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
