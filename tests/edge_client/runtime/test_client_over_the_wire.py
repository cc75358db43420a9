"""What leaves a device: every byte that its client writes is looked at, and no sample is among them.

The samples carry a pattern that no training makes by itself: a sentinel float in every second feature. It is looked for
as float64, float32, float16 and int8, in either byte order, and as text, in payloads, base64 and topics.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

import numpy as np
import pytest

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import Fit, Probe
from tests.support import softmax_program
from tests.support.memory_broker import MemoryTransport
from tests.support.scripted_coordinator import DEVICE, FEDERATION, DeviceStage, Script

SENTINEL = 1234.56789
BASE64 = re.compile(rb"[A-Za-z0-9+/]{16,}={0,2}")


def marked(seed: int, n: int) -> Dataset:
    """Samples whose features all carry the sentinel."""
    plain = softmax_program.samples(np.random.default_rng(seed), n)
    x = np.where(np.arange(plain.x.shape[-1]) % 2 == 0, np.float32(SENTINEL), plain.x * 1e-3)
    return Dataset(x.astype(np.float32), plain.y)


def patterns(data: Dataset) -> list[bytes]:
    """The sentinel, and whole rows, as they could stand in a message."""
    out = []
    for dtype in ("<f8", "<f4", ">f8", ">f4"):
        out.append(np.array([SENTINEL], dtype).tobytes())
        out += [row.astype(dtype).tobytes() for row in data.x.reshape(len(data.x), -1)]
    out += [row.astype("<f2").tobytes() for row in data.x.reshape(len(data.x), -1)]
    return [*out, b"1234.5"]


def layers(payload: bytes) -> list[bytes]:
    """A payload, and what is inside its base64 texts."""
    inside = []
    for text in BASE64.findall(payload):
        padded = text.rstrip(b"=") + b"=" * (-len(text.rstrip(b"=")) % 4)
        try:
            inside.append(base64.b64decode(padded))
        except ValueError:
            continue
    return [payload, *inside]


@pytest.mark.parametrize("codec", ["f32", "f16", "i8"])
def test_no_sample_is_in_what_a_device_sends(tmp_path: Path, codec: str) -> None:
    stage = DeviceStage(tmp_path)
    data = marked(1, 24)
    stage.local = DeviceData(train=data, test=marked(2, 8))
    written: list[bytes] = []
    publish = stage.broker.publish

    def tapped(sender: MemoryTransport | None, topic: str, payload: bytes, *, retain: bool) -> None:
        if sender is not None and sender.client_id == f"{FEDERATION}.{DEVICE}":
            written.extend((topic.encode(), payload))
        publish(sender, topic, payload, retain=retain)

    stage.broker.publish = tapped  # type: ignore[method-assign]
    tasks: list[Fit | Probe] = [
        stage.fit(lr=1e-9),
        Probe(models=(stage.model(0), stage.model(1)), want=frozenset({"loss", "votes"}), batch=8, seed=0),
    ]

    def script() -> Script:
        yield
        for number, task in enumerate(tasks, 1):
            stage.ask(task, round_=number, codec=codec if isinstance(task, Fit) else "f32")
            yield
            stage.go()
            yield
            stage.ack("ok")
            yield

    stage.play(script())
    assert len(stage.said("rdy")) == len(tasks), stage.said("nack")
    assert sum(map(len, written)) > 1_000
    sent = b"\n".join(layer for said in written for layer in layers(said))
    assert [p for p in patterns(data) if p in sent] == []


def test_the_patterns_would_be_found(tmp_path: Path) -> None:
    data = marked(1, 4)
    for row in data.x:
        message = b'{"inline":"' + base64.b64encode(row.tobytes()) + b'"}'
        assert any(p in layer for p in patterns(data) for layer in layers(message))
