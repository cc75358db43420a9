"""Requests to a running coordinator: what it answers, and whom it knows.

What a device may not do is in tests/attacks/test_hostile_devices.py, what an exchange makes of answers in exchange/.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.protocol import blocks, codecs, messages
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.task import Reply
from tests.support.virtual_federation import BALLAST, BLOCK, TOPICS, Federation, Spy, program


@pytest.fixture
def fed(tmp_path: Path) -> Federation:
    return Federation.of(tmp_path, ballast=BALLAST, devices=2, quorum=0.5)


@pytest.fixture
def spy(fed: Federation) -> Spy:
    return Spy(fed.world.broker)


def waiting(fed: Federation) -> None:
    """One real device, one that says nothing: the first exchange stays open."""
    fed.start(1)
    fed.start_mute_device("d01")
    fed.world.run(lambda: fed.live_since(1.0))


def task_of(spy: Spy, cid: str) -> dict[str, Any]:
    return spy.said("task", cid=cid)[0]


def rdy_of(spy: Spy, cid: str, data: bytes) -> dict[str, Any]:
    """An announcement of `data` as the answer to the task of `cid`."""
    key = {name: task_of(spy, cid)[name] for name in ("run", "round", "exchange")}
    return {
        **key,
        "attempt": 1,
        "n": 40,
        "what": "delta",
        "update": manifest_of(data, "delta", block=BLOCK),
        "seconds": 1.0,
    }


def delta_of(spy: Spy, cid: str) -> bytes:
    """A good answer: nothing was learned."""
    schema = program(ballast=BALLAST).schema
    base = task_of(spy, cid)["start"]["sha256"]
    return codecs.encode_vector(np.zeros(schema.size), schema, codec="f32", kind="delta", base=base)


def answers(fed: Federation, spy: Spy, kind: str, cid: str, count: int = 1) -> list[dict[str, Any]]:
    fed.world.run(lambda: len(spy.said(kind, cid=cid)) >= count, limit_s=30)
    return spy.said(kind, cid=cid)


def send_blocks(spy: Spy, cid: str, data: bytes, indices: list[int]) -> None:
    manifest = manifest_of(data, "delta", block=BLOCK)
    for index in indices:
        start, stop = blocks.body_range(manifest, index)
        message = blocks.pack_block(data[start:stop], index, manifest.total)
        spy.publish(TOPICS.upload(0, cid, manifest.sha256[:16], index), message)


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", "bad_json"),
        (b"[" * 8000, "bad_json"),
        (b'{"v":1,"k":"get","k":"get"}', "bad_json"),
        (b'{"v":1,"k":"task","id":"x","t":0}', "bad_kind"),
        (b'{"v":2,"k":"get","id":"x","t":0}', "bad_version"),
        (b'{"v":1,"k":"get","id":"x","t":0}', "bad_field"),
        (b'{"v":1,"k":"get","id":"x/y","t":0}', "bad_field"),
        (b'["id"]', "bad_json"),
        (b"x" * 9000, "too_big"),
    ],
)
def test_a_request_that_breaks_a_rule_is_answered_with_its_code(
    fed: Federation, spy: Spy, payload: bytes, code: str
) -> None:
    waiting(fed)
    spy.publish(TOPICS.request("d01"), payload)
    told = answers(fed, spy, "err", "d01")[0]
    assert (told["code"], told.get("re")) == (code, "x" if b'"id":"x"' in payload else None)


def test_a_stranger_is_asked_who_it_is(fed: Federation, spy: Spy) -> None:
    waiting(fed)
    spy.say("nobody", "get", sha256="ab" * 32, block=BLOCK, at=[[0, 1]])
    assert len(answers(fed, spy, "rebirth", "nobody")) == 1


def test_when_the_fleet_is_full_a_stranger_is_no_member_and_the_first_one_is_logged(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=1, max_devices=1)
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.start_mute_device("d00")
    fed.world.run(lambda: fed.happened("joined"))
    fed.start_mute_device("d01")
    spy.say("d01", "get", sha256="ab" * 32, block=BLOCK, at=[[0, 1]])
    assert answers(fed, spy, "err", "d01")[0]["code"] == "not_member"
    fed.start_mute_device("d02")
    fed.world.run(lambda: fed.live_since(5.0))
    told = [(e["device"], e["why"]) for e in fed.events if e["event"] == "left-out"]
    assert told == [("d01", "max-devices is 1, and none of them has been away for a day")]


def test_a_phone_that_takes_part_later_is_logged_once_with_its_samples(tmp_path: Path) -> None:
    """It connects without samples first; after *Take part* it announces them, again at each new connection."""
    fed = Federation.of(tmp_path, devices=2)
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.start_mute_device("web-0000", n=0)
    fed.start_mute_device("d00")
    fed.world.run(lambda: {"web-0000", "d00"} <= {e.get("device") for e in fed.events})
    for birth, cid, n in ((2, "web-0000", 20), (3, "web-0000", 24), (2, "d00", 0), (3, "d00", 40)):
        fields = {"s": "on", "bd": birth, "caps": {"engine": "onnx", "n": n}}
        spy.publish(TOPICS.state(cid), messages.write_message("st", ident=f"{cid}-{birth}", t_ms=0, **fields))
    spy.say("web-0000", "get", sha256="ab" * 32, block=BLOCK, at=[[0, 1]])
    answers(fed, spy, "err", "web-0000")  # by now the announcements before it have been read
    told = [(e["event"], e["device"], e["n"]) for e in fed.events if e["event"] in ("joined", "offers")]
    assert sorted(told) == [("joined", "d00", 40), ("joined", "web-0000", 0), ("offers", "web-0000", 20)]


def test_blocks_outside_a_blob_or_of_another_size_are_a_bad_range(fed: Federation, spy: Spy) -> None:
    waiting(fed)
    start = task_of(spy, "d01")["start"]
    spy.say("d01", "get", sha256=start["sha256"], block=BLOCK, at=[[60_000, 1]])
    spy.say("d01", "get", sha256=start["sha256"], block=2 * BLOCK, at=[[0, 1]])
    assert [e["code"] for e in answers(fed, spy, "err", "d01", 2)] == ["bad_range"] * 2


def test_an_upload_in_blocks_in_any_order_and_twice_is_accepted_once(fed: Federation, spy: Spy) -> None:
    waiting(fed)
    data = delta_of(spy, "d01")
    spy.say("d01", "rdy", **rdy_of(spy, "d01", data))
    go = answers(fed, spy, "go", "d01")[0]
    assert "have" not in go
    total = manifest_of(data, "delta", block=BLOCK).total
    send_blocks(spy, "d01", data, [*reversed(range(total)), 0, 1])
    assert [a["status"] for a in answers(fed, spy, "ack", "d01")] == ["ok"]


def test_after_a_break_only_the_missing_blocks_are_asked_for(fed: Federation, spy: Spy) -> None:
    waiting(fed)
    data = delta_of(spy, "d01")
    rdy = rdy_of(spy, "d01", data)
    spy.say("d01", "rdy", **rdy)
    answers(fed, spy, "go", "d01")
    send_blocks(spy, "d01", data, [0, 2])
    fed.world.run(lambda: fed.live_since(2.0))
    fed.world.kill("coordinator.0")
    fed.start_coordinator()
    fed.world.run(lambda: fed.live is not None)
    spy.say("d01", "rdy", **rdy)
    go = answers(fed, spy, "go", "d01", 2)[-1]
    bitmap = blocks.Bitmap.from_base64(manifest_of(data, "delta", block=BLOCK).total, go["have"])
    assert [bitmap.has(i) for i in range(4)] == [True, False, True, False]


def test_a_device_that_never_trained_is_told_its_nearest_center_or_none(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    spy = Spy(fed.world.broker)
    fed.start(4)
    fed.finish()
    fed.start_mute_device("d09")
    fed.world.run(lambda: any(e.get("device") == "d09" for e in fed.events))
    for losses in ([1.2, 0.3], [9.0, 8.0]):
        data = codecs.encode_stats(Reply(n=9, losses=np.array(losses)), program().schema)
        spy.say("d09", "near", how="loss", stats=manifest_of(data, "stats", inline=True), n=9)
    near = [m for m in answers(fed, spy, "near", "d09", 4) if "center" in m]
    assert [(m["center"], m["distance"]) for m in near] == [(1, 0.3), (None, 8.0)]
    assert near[0]["alternatives"] == [{"center": 0, "distance": 1.2}]


def test_a_run_that_taught_newcomers_also_says_how_well_the_nearest_center_fits(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=8, teach_newcomers=True)
    spy = Spy(fed.world.broker)
    fed.start()
    fed.finish()
    fed.start_mute_device("d09")
    fed.world.run(lambda: any(e.get("device") == "d09" for e in fed.events))
    for losses in ([9.0, 0.001], [1.5, 9.0]):  # ln 4 is what guessing costs
        data = codecs.encode_stats(Reply(n=9, losses=np.array(losses)), program().schema)
        spy.say("d09", "near", how="loss", stats=manifest_of(data, "stats", inline=True), n=9)
    near = [m for m in answers(fed, spy, "near", "d09", 4) if "center" in m]
    assert [(m["center"], m.get("fit")) for m in near] == [(1, "well"), (None, "none")]


def test_a_report_of_a_center_or_a_file_that_was_not_published_is_refused_and_not_logged(tmp_path: Path) -> None:
    fed, file = Federation.of(tmp_path, devices=2, rounds=1), manifest_of(b"of a center", "container")
    spy = Spy(fed.world.broker)
    fed.start(2)
    fed.finish()
    assert fed.catalog is not None
    assert fed.server is not None
    assert fed.server.session is not None
    first, *others = fed.catalog.centers
    catalog = replace(fed.catalog, centers=(replace(first, files={"onnx": file}), *others))
    fed.server.session.dispatcher.catalog.publish(catalog, manifest_of(b"a catalog", "catalog"), program().schema)
    for center in (len(catalog.centers), 1, 0):  # no such center; that has no such file; the one that has it
        spy.say("d00", "served", center=center, sha256=file.sha256, n=9, metrics={})
    fed.world.run(lambda: fed.happened("served"))
    assert [(e["device"], e["center"]) for e in fed.events if e["event"] == "served"] == [("d00", 0)]
    assert [m["code"] for m in spy.said("err", cid="d00")] == ["bad_field", "bad_field"]


def test_a_device_that_announces_itself_without_end_is_sent_its_task_at_the_pace_of_requests(
    fed: Federation, spy: Spy
) -> None:
    waiting(fed)
    before = len(spy.said("task", cid="d01"))
    begin_s = fed.world.clock.time_s
    for birth in range(10, 510):
        caps = {"engine": f"e{birth}", "n": 40}
        said = messages.write_message("st", ident=f"s{birth}", t_ms=0, s="on", bd=birth, caps=caps)
        spy.publish(TOPICS.state("d01"), said)
    fed.world.run(lambda: fed.world.clock.time_s >= begin_s + 1.0)
    assert 20 <= len(spy.said("task", cid="d01")) - before <= 60
    assert fed.server is not None
    assert fed.server.session is not None
    presence = fed.server.session.dispatcher.fleet
    assert presence.devices["d01"].birth == 509
    assert len(presence.kinds) <= 2


def test_a_device_that_only_the_broker_calls_online_is_asked_once_and_counts_when_it_answers(tmp_path: Path) -> None:
    """A client of another maker may not know that a new connection wants its announcement."""
    fed = Federation.of(tmp_path, devices=1)
    spy = Spy(fed.world.broker)
    here = messages.write_message("st", ident="x", t_ms=0, s="on", bd=1, caps={"engine": "onnx", "n": 40})
    fed.world.broker.client("d00").connect()
    kept = fed.world.broker.client("dead")
    kept.connect()
    for cid in ("d00", "dead"):
        kept.publish(TOPICS.state(cid), here, retain=True)
    fed.start_coordinator()
    asked = answers(fed, spy, "rebirth", "d00")
    assert (len(asked), len(spy.said("rebirth", cid="dead"))) == (1, 1)
    assert not fed.happened("joined")
    spy.publish(TOPICS.state("d00"), here)
    fed.world.run(lambda: bool(spy.said("task", cid="d00")))
    assert [e["device"] for e in fed.events if e["event"] == "joined"] == ["d00"]
    assert len(spy.said("rebirth")) == 2


def presences(fed: Federation) -> list[str]:
    """The devices whose presence the broker keeps."""
    return sorted(str(TOPICS.parse(topic).cid) for topic in fed.world.broker.retained if "/st/" in topic)


def test_a_broker_keeps_no_presence_of_a_device_that_left_before_the_coordinator_began(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=9)
    fed.start(3)
    fed.world.run(lambda: presences(fed) == ["d00", "d01", "d02"])
    fed.world.kill("d01")
    fed.world.kill("coordinator.0")
    assert presences(fed) == ["d00", "d01", "d02"]  # the will of d01 is kept
    fed.start_coordinator()
    fed.world.run(lambda: fed.progress[-1:] == [{"event": "waiting", "here": 2, "needed": 9}])
    assert presences(fed) == ["d00", "d02"]


def test_a_broker_keeps_no_presence_of_a_device_that_made_room_for_another(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=2, max_devices=2)
    fed.start(1)
    fed.start_mute_device("d01", n=0)  # so that no training begins
    fed.world.run(lambda: sum(e["event"] == "joined" for e in fed.events) == 2)
    fed.world.kill("d00")
    fed.world.clock.time_s += 25 * 3_600.0
    fed.start_mute_device("d02")
    fed.world.run(lambda: fed.happened("left-out") or sum(e["event"] == "joined" for e in fed.events) == 3)
    assert presences(fed) == ["d01", "d02"]
