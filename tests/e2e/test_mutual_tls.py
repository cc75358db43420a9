"""A fleet over mutual TLS: the coordinator and its devices, with what `provision` made, on a real mosquitto.

One of the devices comes with a one-time token. Real sockets and clocks; only the model is small (softmax regression).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.config import CoordinatorConfig
from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from coordinator.identity.enrolment_server import open_enrolment_server
from coordinator.identity.signing_key import coordinator_credentials
from coordinator.runtime.server import Server
from coordinator.storage.store import Store
from edge_client.config import load_config
from edge_client.runtime import enrolment
from edge_client.runtime.client import Client
from edge_client.runtime.factory import make_dialer
from edge_client.transport.base import Transport, Will
from edge_client.transport.clock import SystemClock
from edge_client.transport.mqtt import MqttTransport
from tests.support import softmax_program, virtual_federation
from tests.support.guarded_broker import FEDERATION, guarded_broker
from tests.support.patience import patience

pytestmark = pytest.mark.broker
PATIENCE_S = patience(200.0)
NEWCOMER = "d02"


class Life(threading.Thread):
    """A thread whose failure is raised again by `over`."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._life = run
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._life()
        except BaseException as wrong:  # noqa: BLE001 - raised again below
            self.failure = wrong

    def over(self) -> None:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure


def test_a_fleet_learns_over_mutual_tls_and_one_device_enrols_first(tmp_path: Path) -> None:
    fleet = softmax_program.grouped_fleet(3, 2)
    with guarded_broker(tmp_path, *(cid for cid in fleet if cid != NEWCOMER)) as broker:
        keys = broker.work.folder
        broker.work.add_token(NEWCOMER)
        settings = virtual_federation.config(
            tmp_path / "run",
            devices=3,
            federation=FEDERATION,
            broker=broker.url,
            ca=keys / "coordinator" / "ca.crt",
            certificate=keys / "coordinator" / "coordinator.crt",
            key=keys / "coordinator" / "coordinator.key",
            signing_folder=keys / "coordinator",
        )
        events: list[Mapping[str, Any]] = []
        with closing(Store(settings.folder / "store")) as store:
            virtual_federation.seed_program(
                store, ballast=virtual_federation.BALLAST
            )  # updates of several blocks, not inline
            server = coordinator_of(settings, store, events.append)
            leading = Life(server.run)
            devices = [device_of(keys, cid) for cid in fleet]
            lives = [Life(device.run) for device in devices]
            waiting = threading.Event()
            until(lambda: leading.failure is not None or any(e["event"] == "done" for e in events), waiting)
            for device in devices:
                device.stop()
            server.stop()
            for life in (leading, *lives):
                life.over()
    rounds = [event for event in events if event["event"] == "round"]
    assert [event["assignment"].keys() for event in rounds] == [fleet.keys()] * 2
    assert not (keys / "devices" / NEWCOMER / "token").exists()


def until(found: Callable[[], bool], waiting: threading.Event) -> None:
    for _ in range(int(PATIENCE_S * 20)):
        if found():
            return
        waiting.wait(0.05)
    raise TimeoutError("no centers")


def coordinator_of(settings: CoordinatorConfig, store: Store, watch: Callable[[Mapping[str, Any]], None]) -> Server:
    def dial(will: Will | None) -> Transport:
        ident = f"{FEDERATION}.{COORDINATOR_CLIENT_ID}"
        return MqttTransport(settings.broker, ident, will=will, credentials=coordinator_credentials(settings))

    return Server(settings, store, dial=dial, clock=SystemClock(), watch=watch)


def device_of(keys: Path, cid: str) -> Client:
    """A device as its join folder describes it; with a token it gets its certificate first, over HTTPS."""
    file = keys / "devices" / cid / "client.toml"
    config = load_config(file, {})
    if enrolment.has_token(config):
        with open_enrolment_server(keys, "127.0.0.1", tell=lambda _: None, port=0) as server:
            serving = threading.Thread(target=server.serve_forever, daemon=True)
            serving.start()
            address = f"https://localhost:{server.server_address[1]}"
            enrolment.enrol(load_config(file, {"FEDCENTERS_ENROL_URL": address}))
            server.shutdown()
            serving.join(PATIENCE_S)

    def open_engine(*_: object, **__: object) -> softmax_program.SoftmaxEngine:
        return virtual_federation.WideEngine()

    local = softmax_program.grouped_fleet(3, 2)[cid]
    rng = np.random.default_rng(int(cid[1:]))
    return Client(config, make_dialer(config), local=local, clock=SystemClock(), rng=rng, open_engine=open_engine)
