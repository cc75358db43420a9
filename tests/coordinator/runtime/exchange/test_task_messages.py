"""A task message is the same in every process and every version, since a replay compares its hash."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.rounds.update_validation import AskedStage
from coordinator.runtime.exchange.task_messages import PreparedTask, prepare_each, prepare_tasks
from coordinator.storage.exchange_store import ExchangeKey
from edge_client.protocol.task import OWN_MODEL, Fit, Reply
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, SAMPLES, WiredCoordinator

KEY = ExchangeKey("run1", 1, 0)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[WiredCoordinator]:
    made = WiredCoordinator(tmp_path, VirtualClock(), 0, len(DEVICES))
    with closing(made.store):
        yield made


def test_a_task_names_its_exchange_its_program_and_what_its_answer_may_be(coordinator: WiredCoordinator) -> None:
    prepared, tasks = coordinator.context.prepared, coordinator.tasks(KEY)
    found = prepare_tasks(KEY, dict(reversed(list(tasks.items()))), coordinator.context)
    assert list(found) == sorted(DEVICES)
    asked, schema = found["d0"], prepared.program.schema
    fields = asked.fields
    assert (fields["run"], fields["round"], fields["exchange"]) == KEY
    assert (fields["job"], fields["schema"]) == ("fit", schema.sha256)
    assert fields["program"] == prepared.manifest.to_json()
    assert fields["reply"] == {"codec": "f32", "base": "start", "max_size": 16 * schema.size + 2**20}
    spec = asked.reply_spec
    assert (spec.samples, spec.max_samples, spec.classes, spec.positions) == (SAMPLES, 10 * SAMPLES, 4, 1)
    assert spec.base == fields["start"]["sha256"]
    assert (spec.codec, spec.max_update_rms) == ("f32", coordinator.config.update.max_rms)
    assert fields["start"]["sha256"] in {blob.sha256 for blob in asked.blobs}
    assert asked.max_size < 16 * schema.size + 4_096  # what an update needs, and a header
    assert len({each.fields["start"]["sha256"] for each in found.values()}) == 1  # one blob for all


def test_each_device_has_the_exchange_that_is_its_own(coordinator: WiredCoordinator) -> None:
    keys = {cid: KEY._replace(exchange=number) for number, cid in enumerate(DEVICES)}
    found = prepare_each(keys, coordinator.tasks(KEY), coordinator.context)
    assert {cid: one.fields["exchange"] for cid, one in found.items()} == {"d0": 0, "d1": 1, "d2": 2, "d3": 3}
    assert len({one.sha256 for one in found.values()}) == 4


def test_a_hash_says_what_is_asked_and_nothing_of_who_signed_it() -> None:
    def hashed(fields: Any) -> str:  # noqa: ANN401 - JSON
        return PreparedTask(fields=fields, blobs=(), reply_spec=None, max_size=1).sha256  # type: ignore[arg-type]

    plain: dict[str, Any] = {"a": {"sha256": "x"}, "b": [{"size": 1}, 2]}
    signed = {"a": {"sha256": "x", "key": "k", "sig": "s"}, "b": ({"size": 1, "sig": "t"}, 2), "key": "k"}
    assert hashed(plain) == hashed(signed)
    assert hashed(plain) != hashed({**plain, "b": [{"size": 2}, 2]})
    # canonical JSON, as stores of earlier versions have it
    assert hashed({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"


@pytest.mark.parametrize(
    ("start", "anchor", "named"), [("sent", None, "start"), (OWN_MODEL, "sent", "anchor"), (OWN_MODEL, None, "zero")]
)
def test_the_base_of_an_update_is_named_by_its_hash_and_nothing_is_called_zero(
    coordinator: WiredCoordinator, start: str, anchor: str | None, named: str
) -> None:
    model = coordinator.context.prepared.initial
    task = Fit(
        start=model if start == "sent" else OWN_MODEL,
        init=model,
        anchor=None if anchor is None else model + 1,
        steps=1,
        lr=0.1,
        batch=8,
        seed=0,
    )
    asked = prepare_tasks(KEY, {"d0": task}, coordinator.context)["d0"]
    assert asked.fields["reply"]["base"] == named
    assert asked.reply_spec.base == ("zero" if named == "zero" else asked.fields[named]["sha256"])
    assert (asked.reply_spec.base_vector is None) == (named == "zero")


@pytest.mark.parametrize("adds", [True, False])
def test_a_message_of_a_sum_travels_in_its_task_where_the_task_carries_no_models(
    coordinator: WiredCoordinator, *, adds: bool
) -> None:
    stage = AskedStage(
        stage="add" if adds else "shares",
        message=b"to be relayed",
        work=coordinator.tasks(KEY)["d0"] if adds else None,
        decode=lambda _: Reply(n=1),
        max_bytes=77,
    )
    asked = prepare_tasks(KEY, {"d0": stage}, coordinator.context)["d0"]
    (message,) = [blob for blob in asked.blobs if blob.kind == "sum"]
    assert (message.inline is None) == adds
    assert coordinator.store.blobs.read(message.sha256) == b"to be relayed"
    assert (asked.max_size, asked.reply_spec.blob_kind) == (77, "masked")
    large = prepare_tasks(KEY, {"d0": replace(stage, max_bytes=10**9)}, coordinator.context)["d0"]
    assert large.max_size == large.fields["reply"]["max_size"]  # never more than the task says
