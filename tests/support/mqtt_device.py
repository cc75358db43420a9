"""A device of the tests' federation over a real broker, and its coordinator's way there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.config import ClientConfig
from edge_client.data.dataset import DeviceData
from edge_client.runtime.client import Client
from edge_client.transport.base import Will
from edge_client.transport.clock import SystemClock
from edge_client.transport.mqtt import MqttTransport
from tests.support.softmax_program import SoftmaxEngine
from tests.support.virtual_federation import FEDERATION


def mqtt_device(  # noqa: PLR0913 - what a device has
    url: str,
    cid: str,
    folder: Path,
    local: DeviceData,
    *,
    key: bytes,
    engine: SoftmaxEngine | None = None,
    tell: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Client:
    """The device `cid`, a letter and its number; `key` signs the program."""
    asked = ClientConfig(
        federation=FEDERATION,
        device_id=cid,
        broker=url,
        data=folder / cid,
        state=folder / cid / "state",
        signing_keys=(key,),
        min_battery_percent=0,
    )
    return Client(
        asked,
        lambda will: MqttTransport(url, f"{FEDERATION}.{cid}", will=will),
        local=local,
        clock=SystemClock(),
        rng=np.random.default_rng(int(cid[1:])),
        open_engine=lambda *_, **__: engine or SoftmaxEngine(),
        tell=tell,
    )


def coordinator_dial(url: str) -> Callable[[Will | None], MqttTransport]:
    return lambda will: MqttTransport(url, f"{FEDERATION}.coordinator.0", will=will)
