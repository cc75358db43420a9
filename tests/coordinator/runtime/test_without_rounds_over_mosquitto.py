"""A run that waits for no device over a real broker, with a device that never ends its task."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coordinator.config_sections import RunConfig
from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import Broker
from coordinator.runtime.server import Server
from coordinator.storage.store import Store
from edge_client.protocol.task import Array, Tensors
from edge_client.runtime.client import Client
from edge_client.transport.clock import SystemClock
from tests.support import softmax_program
from tests.support.mqtt_device import coordinator_dial, mqtt_device
from tests.support.virtual_federation import config, seed_program


class StuckEngine(softmax_program.SoftmaxEngine):
    """Takes no step before it is freed."""

    freed = threading.Event()

    def step(self, feeds: Tensors) -> dict[str, Array]:
        self.freed.wait()
        return super().step(feeds)


@pytest.mark.broker
def test_over_mosquitto_a_device_that_never_ends_its_task_holds_no_other(tmp_path: Path, mosquitto: Broker) -> None:
    settings = {"local-steps": 3, "batch-size": 8}
    run = RunConfig(method="fedavg", rounds=5, name="run", settings=settings)
    keys: dict[str, Any] = {"concurrency": 3, "buffer": 2, "quorum": 0.5, "exit_when_done": True}
    made = config(tmp_path / "run", devices=3, runs=(run,), **keys)
    key, fleet = open_signing_key(made.folder).public, softmax_program.grouped_fleet(3, 2)
    events, clients = list[Mapping[str, Any]](), list[Client]()

    def begin(cid: str) -> None:
        engine = StuckEngine() if cid == "d01" else None
        client = mqtt_device(mosquitto.url, cid, tmp_path, fleet[cid], key=key, engine=engine)
        clients.append(client)
        threading.Thread(target=client.run, daemon=True).start()

    for cid in fleet:
        begin(cid)
    with closing(Store(made.folder / "store")) as store:
        seed_program(store)
        Server(made, store, dial=coordinator_dial(mosquitto.url), clock=SystemClock(), watch=events.append).run()
    StuckEngine.freed.set()
    for client in clients:
        client.stop()
    rounds = [event["asynchronous"] for event in events if event["event"] == "round"]
    assert [(one["counted"], one["versions"]) for one in rounds] == [(2, [n]) for n in range(1, 6)]
    assert [event for event in events if event["event"] == "done"]
