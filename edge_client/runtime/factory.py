"""How a device is put together from its configuration: its broker, its data, the machine's clock and watchdog."""

from __future__ import annotations

import logging
import os
import time

import numpy as np

from edge_client.config import ClientConfig
from edge_client.data.dataset import DataFolder
from edge_client.protocol.topics import Topics
from edge_client.runtime.client import Client
from edge_client.runtime.progress import Tell
from edge_client.runtime.systemd_watchdog import Watchdog
from edge_client.transport.base import Dial
from edge_client.transport.clock import SystemClock
from edge_client.update.self_update import SelfUpdater

log = logging.getLogger(__name__)


def make_dialer(config: ClientConfig, *, insecure: bool = False) -> Dial:
    """How a device reaches its broker over MQTT. Raises ConfigError for a certificate that is not this device's."""
    from edge_client.transport.mqtt import MqttTransport
    from edge_client.transport.tls import Credentials, check_subject

    if config.certificate is not None:
        check_subject(config.certificate, name=config.device_id, federation=config.federation)
    credentials = Credentials(ca=config.ca, certificate=config.certificate, key=config.key)
    name = Topics(config.federation).client_id(config.device_id)
    return lambda will: MqttTransport(config.broker, name, will=will, credentials=credentials, insecure=insecure)


def make_client(config: ClientConfig, *, insecure: bool = False, tell: Tell = lambda _: None) -> Client:
    """The device of a configuration: its data, its broker, the machine's clocks. Raises ConfigError."""
    clock, watchdog = SystemClock(), Watchdog(os.environ)
    samples = DataFolder(config.data, most=config.max_samples, between=lambda: watchdog.notify_alive(clock.now_s()))
    local = samples.load()
    if not len(local.train):
        log.warning("%s: no samples in %s: it trains when there are some", config.device_id, config.data)
    return Client(
        config,
        make_dialer(config, insecure=insecure),
        local=local,
        clock=clock,
        rng=np.random.default_rng(time.time_ns()),
        watchdog=watchdog,
        samples=samples,
        updates=SelfUpdater.from_environment(os.environ),
        tell=tell,
    )
