"""In virtual time, a strategy is shown each accepted reply when it is accepted, before the exchange closes."""

from __future__ import annotations

import numpy as np

from coordinator.strategies.base import StreamingExchange
from edge_client.protocol.task import ClientId, Fit, Reply
from emulator.simulation.device_profiles import DEVICE_PROFILES, DeviceProfile
from emulator.simulation.virtual_network import VirtualNetwork
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

LOCAL = grouped_fleet(4, 1)
TASKS = dict.fromkeys(LOCAL, Fit(start=start_of(), steps=5, lr=0.1, batch=8, seed=0))


def shown(*profiles: DeviceProfile, inline_bytes: int, deadline_s: float = 600.0) -> None:
    by_device = dict(zip(LOCAL, profiles, strict=True))
    net = VirtualNetwork(devices_of(LOCAL), by_device, deadline_s=deadline_s, inline_bytes=inline_bytes)
    seen: list[tuple[float, ClientId, Reply]] = []
    replies = net.ask(StreamingExchange(TASKS, lambda who, reply: seen.append((net.now_s, who, reply))))
    assert sorted(who for _, who, _ in seen) == sorted(replies)
    for _, who, reply in seen:
        np.testing.assert_array_equal(np.asarray(reply.update), np.asarray(replies[who].update))
    times = [at for at, _, _ in seen]
    assert times == sorted(times)
    assert times[0] < net.now_s


def test_each_reply_is_shown_when_it_arrives_whichever_way_it_came() -> None:
    paces = [
        DeviceProfile(name="", step_s=s, evaluate_s=1, down_bytes_s=1e6, up_bytes_s=1e6, latency_s=0)
        for s in (4, 1, 3, 2)
    ]
    for inline_bytes in (10**6, 0):
        shown(*paces, inline_bytes=inline_bytes)


def test_who_misses_the_deadline_is_not_shown() -> None:
    slow = DeviceProfile(name="slow", step_s=100.0, evaluate_s=1, down_bytes_s=1e6, up_bytes_s=1e6, latency_s=0)
    shown(slow, *[DEVICE_PROFILES[0]] * 3, inline_bytes=10**6, deadline_s=60.0)
