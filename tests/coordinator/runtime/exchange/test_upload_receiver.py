"""Uploads from the announcement to the disk: what a device is told at each step, and what is left of a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.runtime.exchange import upload_receiver
from coordinator.runtime.exchange.task_messages import prepare_tasks
from coordinator.storage.exchange_store import ExchangeKey
from edge_client.protocol import codecs
from edge_client.protocol.blocks import Bitmap, Manifest, body_range, manifest_of, pack_block
from edge_client.protocol.topics import UPLOAD_SHARDS, client_shard
from edge_client.transport.blobs import PartialBlob
from tests.support.virtual_federation import BALLAST, BLOCK
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, SAMPLES, WiredCoordinator

KEY = ExchangeKey("run1", 1, 0)


@pytest.fixture(params=[BALLAST])
def coordinator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WiredCoordinator]:
    made = WiredCoordinator(tmp_path, VirtualClock(), request.param, len(DEVICES))
    with closing(made.store):
        made.ask(KEY, None)
        made.said()
        yield made


inline = pytest.mark.parametrize("coordinator", [0], indirect=True)


def offer(coordinator: WiredCoordinator, cid: str, update: Manifest, *, n: int = SAMPLES, attempt: int = 0) -> None:
    about = {**KEY._asdict(), "attempt": attempt, "n": n, "seconds": 2.5}
    coordinator.hear(cid, "rdy", **about, what=update.kind, update=update)


def said(coordinator: WiredCoordinator) -> list[dict[str, Any]]:
    return [message for _, message in coordinator.said()]


def files(coordinator: WiredCoordinator) -> set[Path]:
    return {path for path in (coordinator.config.folder / "store").rglob("*") if "d0" in str(path) and path.is_file()}


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_device_is_told_what_to_send_where_and_which_blocks_are_here(coordinator: WiredCoordinator) -> None:
    manifest, _ = coordinator.update(KEY, "d0", 0)
    offer(coordinator, "d0", manifest)
    (go,) = said(coordinator)
    shard = client_shard("d0", UPLOAD_SHARDS)
    assert (go["k"], go["re"], go["sha256"], go["shard"], go["window"]) == ("go", "d0-1", manifest.sha256, shard, 16)
    assert "have" not in go
    coordinator.send(KEY, "d0", 0, [0, 2])
    offer(coordinator, "d0", manifest)
    (go,) = said(coordinator)
    have = Bitmap.from_base64(manifest.total, go["have"])
    assert [have.has(index) for index in range(4)] == [True, False, True, False]


def test_what_is_stored_of_an_update_is_what_its_device_said_of_it(coordinator: WiredCoordinator) -> None:
    manifest, data = coordinator.update(KEY, "d0", 0)
    offer(coordinator, "d0", manifest, n=7)
    coordinator.send(KEY, "d0", 0, list(range(manifest.total)))
    stored = coordinator.store.exchanges.replies(KEY)["d0"]
    assert (stored.sha256, stored.size, stored.n, stored.what, stored.seconds) == (
        manifest.sha256,
        len(data),
        7,
        "delta",
        2.5,
    )
    model = codecs.encode_vector(
        coordinator.base(KEY), coordinator.context.prepared.program.schema, codec="f32", kind="model"
    )
    assert stored.base == manifest_of(model, "model").sha256


def test_a_block_that_comes_again_or_is_damaged_keeps_no_upload_alive(coordinator: WiredCoordinator) -> None:
    clock, live = coordinator.context.clock, coordinator.dispatcher.exchange.live
    assert isinstance(clock, VirtualClock)
    assert live is not None
    offer(coordinator, "d0", coordinator.update(KEY, "d0", 0)[0])
    coordinator.send(KEY, "d0", 0, [0])
    clock.time_s += 20.0
    coordinator.send(KEY, "d0", 0, [0])
    coordinator.send(KEY, "d0", 0, [1], flip=True)
    clock.time_s += 10.0
    live.tick()
    assert live.progress()["uploading"] == []


@inline
def test_an_update_that_no_device_could_send_is_refused_with_the_code_of_what_is_wrong(
    coordinator: WiredCoordinator,
) -> None:
    schema = coordinator.context.prepared.program.schema
    other_codec = codecs.encode_vector(np.zeros(schema.size), schema, codec="f16", kind="delta", base="ab" * 32)
    for cid, data, status in (("d0", b"no tensor file", "bad_schema"), ("d1", other_codec, "bad_codec")):
        update = manifest_of(data, "delta", inline=True)
        offer(coordinator, cid, update)
        (ack,) = said(coordinator)
        assert (ack["k"], ack["status"], ack["attempt"], ack["sha256"]) == ("ack", status, 0, update.sha256)
        assert ack["detail"].startswith(status)
    refused = coordinator.store.exchanges.refusals(KEY.run, KEY.round)
    assert {cid: why.partition(":")[0] for cid, why in refused.items()} == {"d0": "bad_schema", "d1": "bad_codec"}


def test_a_refused_upload_leaves_nothing_on_disk(coordinator: WiredCoordinator) -> None:
    schema, before = coordinator.context.prepared.program.schema, files(coordinator)
    base = prepare_tasks(KEY, coordinator.tasks(KEY), coordinator.context)["d0"].reply_spec.base
    far = codecs.encode_vector(np.full(schema.size, 99.0), schema, codec="f32", kind="delta", base=base)
    send_all(coordinator, "d0", far)
    assert [(m["k"], m.get("status")) for m in said(coordinator)] == [("go", None), ("ack", "rejected")]
    assert files(coordinator) == before


def send_all(coordinator: WiredCoordinator, cid: str, data: bytes) -> None:
    update = manifest_of(data, "delta", block=BLOCK)
    offer(coordinator, cid, update)
    for index in range(update.total):
        body = data[slice(*body_range(update, index))]
        coordinator.block(cid, update, index, pack_block(body, index, update.total))


def test_on_a_full_disk_a_device_comes_again_in_half_a_minute_at_whichever_step_it_was(
    coordinator: WiredCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = coordinator.store.updates("d0")
    for name in ("partial", "drop_partials"):
        with monkeypatch.context() as patch:
            patch.setattr(type(uploads), name, full)
            offer(coordinator, "d0", coordinator.update(KEY, "d0", 0)[0])
        (ack,) = said(coordinator)
        assert (ack["k"], ack["status"], ack["retry_ms"]) == ("ack", "retry", 30_000)
        assert ack["detail"].startswith("storage: ")
        assert "No space left" in ack["detail"]
    manifest, _ = coordinator.update(KEY, "d0", 0)
    offer(coordinator, "d0", manifest)
    coordinator.send(KEY, "d0", 0, list(range(manifest.total - 1)))
    said(coordinator)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        coordinator.send(KEY, "d0", 0, [manifest.total - 1])
    (ack,) = said(coordinator)
    assert (ack["status"], ack["detail"]) == ("retry", "storage: No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(coordinator.store.exchanges, "put_replies", full)
        offer(coordinator, "d0", manifest)
        coordinator.send(KEY, "d0", 0, list(range(manifest.total)))
    assert [m.get("status") for m in said(coordinator)] == [None, "retry"]
    assert coordinator.store.exchanges.replies(KEY) == {}
    offer(coordinator, "d0", manifest)
    coordinator.send(KEY, "d0", 0, list(range(manifest.total)))
    assert said(coordinator)[-1]["status"] == "ok"


def test_on_a_full_disk_a_device_that_sends_blocks_on_is_told_once(
    coordinator: WiredCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, _ = coordinator.update(KEY, "d0", 0)
    offer(coordinator, "d0", manifest)
    coordinator.send(KEY, "d0", 0, [0])
    said(coordinator)
    assert manifest.total > 2
    with monkeypatch.context() as patch:
        patch.setattr(PartialBlob, "write_block", full)
        coordinator.send(KEY, "d0", 0, list(range(1, manifest.total)) * 3)
    assert [m["status"] for m in said(coordinator)] == ["retry"]
    offer(coordinator, "d0", manifest)
    coordinator.send(KEY, "d0", 0, list(range(1, manifest.total)))
    assert [m.get("status", m["k"]) for m in said(coordinator)] == ["go", "ok"]


def test_an_upload_whose_file_is_gone_begins_again(coordinator: WiredCoordinator) -> None:
    manifest, _ = coordinator.update(KEY, "d0", 0)
    offer(coordinator, "d0", manifest)
    coordinator.send(KEY, "d0", 0, list(range(manifest.total - 1)))
    coordinator.store.updates("d0").drop_partials()
    coordinator.send(KEY, "d0", 0, [manifest.total - 1])
    offer(coordinator, "d0", manifest)
    coordinator.send(KEY, "d0", 0, list(range(manifest.total)))
    assert [m.get("status", m["k"]) for m in said(coordinator)] == ["go", "retry", "go", "ok"]


@inline
def test_updates_wait_for_the_disk_since_the_first_of_them_and_together_until_they_are_many(
    coordinator: WiredCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, clock = coordinator.dispatcher.exchange, coordinator.context.clock
    assert isinstance(clock, VirtualClock)
    coordinator.more = True
    for seconds, cid in ((2.0, "d0"), (3.0, "d1")):
        clock.time_s += seconds
        coordinator.announce(cid, 0, KEY)
        assert exchange.unsynced_since_s == 2.0
    assert said(coordinator) == []
    monkeypatch.setattr(upload_receiver, "MAX_UNSYNCED", 3)
    coordinator.announce("d2", 0, KEY)
    assert [m["status"] for m in said(coordinator)] == ["ok"] * 3
    size = coordinator.update(KEY, "d3", 0)[0].size
    monkeypatch.setattr(upload_receiver, "MAX_UNSYNCED_BYTES", size)
    coordinator.announce("d3", 0, KEY)
    assert [m["status"] for m in said(coordinator)] == ["ok"]
    assert (upload_receiver.MAX_UNSYNCED, coordinator.store.exchanges.closed_with(KEY)) == (3, list(DEVICES))
