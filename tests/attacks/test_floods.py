"""Tries to fill the coordinator's disk, or to keep it busy, with messages that are allowed one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.storage.status import read_status
from edge_client.protocol import codecs
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.task import Reply
from edge_client.protocol.topics import Topics
from tests.support import softmax_program
from tests.support.virtual_federation import Federation, Spy

FILE = manifest_of(b"the file of a center", "container")
SECONDS, BURST = 20, 6
MOST = BURST + SECONDS // 10  # six a minute
HOURS = 6
LIAR, HONEST = "d00", "d01"


@pytest.fixture
def fed(tmp_path: Path) -> Federation:
    """It has trained, and publishes a file of each center."""
    made = Federation.of(tmp_path, devices=2, rounds=1)
    made.start(2)
    made.finish()
    assert made.catalog is not None
    assert made.server is not None
    assert made.server.session is not None
    centers = tuple(replace(center, files={"onnx": FILE}) for center in made.catalog.centers)
    server = made.server.session.dispatcher.catalog
    catalog = replace(made.catalog, centers=centers)
    server.publish(catalog, manifest_of(b"a catalog", "catalog"), softmax_program.schema())
    return made


def flood(fed: Federation, spy: Spy, kind: str, **fields: Any) -> None:  # noqa: ANN401 - of the message
    """Twenty messages a second, as many as a device may send, and every one is another."""
    begin_s = fed.world.clock.time_s
    for k in range(20 * SECONDS):
        more = {"metrics": {f"{'long' * 15}{i}": k + i / 7 for i in range(16)}} if kind == "served" else {}
        spy.say(LIAR, kind, **fields, **more)
        fed.world.run(lambda: fed.world.clock.time_s >= begin_s + (k + 1) / 20)  # noqa: B023 - used at once


def journal(fed: Federation) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (fed.config.folder / "metrics.jsonl").read_text().splitlines()]


def test_reports_of_a_served_center_are_paced_short_and_written_once(fed: Federation) -> None:
    spy = Spy(fed.world.broker)
    before = (fed.config.folder / "metrics.jsonl").stat().st_size
    flood(fed, spy, "served", center=0, sha256=FILE.sha256, n=9)
    for cid in (HONEST, HONEST):
        spy.say(cid, "served", center=1, sha256=FILE.sha256, n=9, metrics={"accuracy": 0.5, "loss": 1.0})
    fed.world.run(lambda: any(e["event"] == "served" and e["device"] == HONEST for e in journal(fed)))
    served = [event for event in journal(fed) if event["event"] == "served"]
    assert len([e for e in served if e["device"] == LIAR]) <= MOST
    assert [e["metrics"] for e in served if e["device"] == HONEST] == [{"accuracy": 0.5, "loss": 1.0}]
    assert (fed.config.folder / "metrics.jsonl").stat().st_size - before < (MOST + 1) * 400
    assert len(spy.said("err", cid=LIAR)) <= MOST
    fed.world.end()
    assert read_status(fed.config.folder)["served"] == 2  # devices


def test_a_device_that_reports_for_ever_fills_no_disk(fed: Federation) -> None:
    spy, begin_s = Spy(fed.world.broker), fed.world.clock.time_s
    for k in range(4 * HOURS):
        spy.say(LIAR, "served", center=0, sha256=FILE.sha256, n=9, metrics={"loss": float(k)})
        fed.world.run(lambda: fed.world.clock.time_s >= begin_s + (k + 1) * 900)  # noqa: B023 - used at once
    reported = [e["metrics"]["loss"] for e in journal(fed) if e["event"] == "served"]
    assert reported[:BURST] == [float(k) for k in range(BURST)]
    assert HOURS <= len(reported) <= BURST + HOURS
    assert {m["code"] for m in spy.said("err", cid=LIAR)} == {"rate"}


def test_a_device_of_another_version_is_logged_once_whatever_it_says(
    fed: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    spy, begin_s = Spy(fed.world.broker), fed.world.clock.time_s
    for k in range(20 * SECONDS):
        for topic in (Topics.state, Topics.request):
            spy.publish(topic(Topics(fed.config.federation), "newer"), b'{"v":%d,"k":"st","id":"x","t":0}' % (k + 2))
        fed.world.run(lambda: fed.world.clock.time_s >= begin_s + (k + 1) / 20)  # noqa: B023 - used at once
    assert len(spy.said("err", cid="newer")) > SECONDS
    assert [message.partition(":")[0] for message in caplog.messages] == ["newer cannot take part"]


def test_a_flood_of_questions_for_the_nearest_center_is_answered_at_its_pace(fed: Federation) -> None:
    spy = Spy(fed.world.broker)
    losses = codecs.encode_stats(Reply(n=9, losses=np.array([0.5, 0.25])), softmax_program.schema())
    stats = manifest_of(losses, "stats", inline=True)
    flood(fed, spy, "near", how="loss", stats=stats, n=9)
    answers = [m for m in spy.said("near", cid=LIAR) if "center" in m]
    assert len(answers) <= MOST
    assert len(spy.said("err", cid=LIAR)) <= MOST
    spy.say(HONEST, "near", how="loss", stats=stats, n=9)
    fed.world.run(lambda: any("center" in m for m in spy.said("near", cid=HONEST)), limit_s=5)
    fed.world.end()
