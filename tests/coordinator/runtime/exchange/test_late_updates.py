"""Updates that come after closing: kept where the method can use them, and answered `late` where it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.config_sections import RunConfig
from coordinator.rounds.exchange_rules import CREDIT_IDLE_S
from coordinator.storage.store import Store
from coordinator.strategies.base import RepliesWithLate, State
from coordinator.strategies.baselines.fedavg_late import FedAvgLate
from edge_client.protocol import blocks, codecs
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.task import Reply
from tests.support import softmax_program
from tests.support.virtual_federation import BALLAST, BLOCK, TOPICS, Federation, Spy, program


def federation(
    folder: Path, method: str = "fedavg-late", *, ballast: int = BALLAST, prior: str = "model"
) -> Federation:
    settings = {"local-steps": 2, "batch-size": 8, "label-prior": prior}
    run = RunConfig(method=method, rounds=2, name="run", settings=settings)
    return Federation.of(folder, runs=(run,), ballast=ballast, quorum=0.5, deadline_s=60.0)


def begun(fed: Federation) -> Spy:
    """Three devices that answer, and one that has not when the first exchange closes."""
    spy = Spy(fed.world.broker)
    fed.start(3)
    fed.start_mute_device("d03", n=40)
    fed.world.run(lambda: fed.live is not None and _exchange(spy, "d00") == 1)
    return spy


def _exchange(spy: Spy, cid: str) -> int:
    return max((task["exchange"] for task in spy.said("task", cid=cid)), default=-1)


def late_answer(spy: Spy, ballast: int = BALLAST, *, value: float = 0.01, number: int = 0) -> bytes:
    """What d03 would answer to the first task, or to another one."""
    task = spy.said("task", cid="d03")[number]
    schema = program(ballast=ballast).schema
    vector, codec = np.full(schema.size, value), task["reply"]["codec"]
    return codecs.encode_vector(vector, schema, codec=codec, kind="delta", base=task["start"]["sha256"])


def announce(spy: Spy, ballast: int = BALLAST, *, inline: bool = False, value: float = 0.01, number: int = 0) -> bytes:
    """The late answer of d03 to the first task, or to another one; -> its bytes."""
    task, data = spy.said("task", cid="d03")[number], late_answer(spy, ballast, value=value, number=number)
    key = {name: task[name] for name in ("run", "round", "exchange")}
    update = manifest_of(data, "delta", block=BLOCK, inline=inline)
    spy.say("d03", "rdy", **key, attempt=1, n=40, what="delta", update=update, seconds=1.0)
    return data


def upload(spy: Spy, data: bytes, part: slice = slice(None)) -> None:
    """The blocks of an announced answer, or some of them."""
    manifest = manifest_of(data, "delta", block=BLOCK)
    for index in range(manifest.total)[part]:
        start, stop = blocks.body_range(manifest, index)
        message = blocks.pack_block(data[start:stop], index, manifest.total)
        spy.publish(TOPICS.upload(0, "d03", manifest.sha256[:16], index), message)


def said(fed: Federation, spy: Spy, kind: str) -> list[dict[str, Any]]:
    fed.world.run(lambda: bool(spy.said(kind, cid="d03")), limit_s=30)
    return spy.said(kind, cid="d03")


def shown(fed: Federation, number: int) -> list[str]:
    store = Store(fed.config.folder / "store")
    found = [reply.cid for reply in store.late_updates.assign(store.states.run_id("run", str), number)]
    store.close()
    return found


def uploading(fed: Federation) -> tuple[Spy, bytes]:
    """A late update of which all blocks but the last have been sent."""
    spy = begun(fed)
    data = announce(spy)
    said(fed, spy, "go")
    upload(spy, data, slice(-1))
    return spy, data


@pytest.mark.parametrize("inline", [True, False])
def test_a_late_update_is_kept_answered_ok_and_counts_in_the_next_round(tmp_path: Path, inline: bool) -> None:  # noqa: FBT001
    ballast = 0 if inline else BALLAST
    calm, rough = (federation(tmp_path / name, ballast=ballast) for name in ("calm", "rough"))
    for fed in (calm, rough):
        spy = begun(fed)
        assert spy.said("stop") == []
        if fed is rough:
            data = announce(spy, ballast, inline=inline)
            if not inline:
                said(fed, spy, "go")
                upload(spy, data)
            assert [ack["status"] for ack in said(fed, spy, "ack")] == ["ok"]
            announce(spy, ballast, inline=inline)
            fed.world.run(lambda: [ack["status"] for ack in spy.said("ack", cid="d03")] == ["ok", "dup"])  # noqa: B023
        fed.finish()
        fed.world.end()
    assert calm.final_states() != rough.final_states()
    assert (shown(calm, 2), shown(rough, 2)) == ([], ["d03"])
    assert rough.rounds()[0]["refused"]["d03"] == "late"


def test_a_restart_in_the_next_round_is_shown_the_same_late_updates(tmp_path: Path) -> None:
    calm, rough = (federation(tmp_path / name) for name in ("calm", "rough"))
    for fed in (calm, rough):
        spy = begun(fed)
        data = announce(spy)
        said(fed, spy, "go")
        upload(spy, data)
        said(fed, spy, "ack")
        fed.world.run(lambda: any(task["round"] == 2 for task in spy.said("task")))  # noqa: B023 - used at once
        if fed is rough:
            fed.world.kill("coordinator.0")
            fed.start_coordinator()
        fed.finish()
        fed.world.end()
    assert calm.final_states() == rough.final_states()


def test_a_late_update_whose_blocks_are_all_here_since_before_a_crash_is_taken_without_another_one(
    tmp_path: Path,
) -> None:
    fed = federation(tmp_path)
    spy = begun(fed)
    data = late_answer(spy)
    assert fed.store is not None
    partial = fed.store.updates("d03").partial(manifest_of(data, "delta", block=BLOCK))
    for index in range(partial.manifest.total):
        start, stop = blocks.body_range(partial.manifest, index)
        partial.write_block(index, data[start:stop])
    partial.close()
    announce(spy)
    assert [ack["status"] for ack in said(fed, spy, "ack")] == ["ok"]
    assert spy.said("go", cid="d03") == []
    fed.finish()
    fed.world.end()
    assert shown(fed, 2) == ["d03"]


def test_a_late_upload_goes_on_while_other_exchanges_end(tmp_path: Path) -> None:
    """The end of a test deleted the blocks that had come, and the last one ended the coordinator."""
    fed = federation(tmp_path)
    spy, data = uploading(fed)
    fed.world.run(lambda: any(task["round"] == 2 for task in spy.said("task")))
    upload(spy, data, slice(-1, None))
    assert [ack["status"] for ack in said(fed, spy, "ack")] == ["ok"]
    assert len(spy.said("go", cid="d03")) == 1
    fed.complete()


def test_late_updates_are_taken_while_devices_tell_their_labels_and_afterwards(tmp_path: Path) -> None:
    """The end of the exchange in which labels are counted ended the time of the updates, of which it has none."""
    fed = federation(tmp_path, prior="device")
    spy, data = uploading(fed)
    fed.world.run(lambda: _exchange(spy, "d00") == 2)
    upload(spy, data, slice(-1, None))
    assert [ack["status"] for ack in said(fed, spy, "ack")] == ["ok"]
    fed.complete()
    assert shown(fed, 2) == ["d03"]


def test_an_upload_under_way_at_the_end_of_its_exchange_goes_on_when_that_of_a_round_before_is_given_up(
    tmp_path: Path,
) -> None:
    fed = federation(tmp_path)
    spy = begun(fed)
    fed.world.run(lambda: [task["exchange"] for task in spy.said("task", cid="d03")] == [0, 1, 0])
    soon_s = fed.world.clock.time_s + fed.config.round.deadline_s - CREDIT_IDLE_S / 2
    fed.world.run(lambda: fed.world.clock.time_s >= soon_s)
    data = announce(spy, number=2)
    said(fed, spy, "go")
    upload(spy, data, slice(-1))
    fed.world.run(lambda: fed.live is not None and fed.live.key[1:] == (2, 1))
    upload(spy, data, slice(-1, None))
    assert [ack["status"] for ack in said(fed, spy, "ack")] == ["ok"]
    fed.complete()


def test_no_block_of_a_late_upload_that_is_given_up_stays_on_disk(tmp_path: Path) -> None:
    fed = federation(tmp_path)
    _, data = uploading(fed)
    begun_file = f"{manifest_of(data, 'delta', block=BLOCK).sha256}*"
    fed.world.run(lambda: any(fed.config.folder.rglob(begun_file)))
    fed.world.run(lambda: fed.live is not None and fed.live.key[1:] == (2, 1))
    assert list(fed.config.folder.rglob(begun_file)) == []
    fed.complete()


def test_blocks_of_a_device_whose_late_upload_stands_still_reach_the_open_exchange(tmp_path: Path) -> None:
    fed = federation(tmp_path)
    spy = begun(fed)
    upload(spy, announce(spy), slice(1))
    fed.world.run(lambda: [task["exchange"] for task in spy.said("task", cid="d03")] == [0, 1, 0])
    data = announce(spy, number=2)
    fed.world.run(lambda: len(spy.said("go", cid="d03")) == 2, limit_s=10)
    upload(spy, data)
    assert [ack["status"] for ack in said(fed, spy, "ack")] == ["ok"]
    fed.complete()


def test_a_late_update_that_comes_inline_while_its_blocks_are_expected_is_kept_once(tmp_path: Path) -> None:
    fed = federation(tmp_path, ballast=0)
    spy = begun(fed)
    announce(spy, 0)
    said(fed, spy, "go")
    data = announce(spy, 0, inline=True)
    said(fed, spy, "ack")
    upload(spy, data)
    fed.finish()
    fed.world.end()
    assert [ack["status"] for ack in spy.said("ack", cid="d03")] == ["ok"]
    assert shown(fed, 2) == ["d03"]


def test_a_late_upload_that_stands_still_gives_its_credit_to_another_one(tmp_path: Path) -> None:
    run = RunConfig(method="fedavg-late", rounds=2, name="run", settings={"local-steps": 2, "batch-size": 8})
    fed = Federation.of(tmp_path, runs=(run,), ballast=BALLAST, devices=5, quorum=0.5, deadline_s=60.0, credits=1)
    spy = Spy(fed.world.broker)
    fed.start(3)
    for cid in ("d03", "d04"):
        fed.start_mute_device(cid)
    fed.world.run(lambda: fed.live is not None and _exchange(spy, "d00") == 1)
    task, data = spy.said("task", cid="d03")[0], late_answer(spy)
    key = {name: task[name] for name in ("run", "round", "exchange")}
    offer = {**key, "attempt": 1, "n": 40, "what": "delta", "seconds": 1.0}

    def offered(cid: str, kind: str) -> None:
        spy.say(cid, "rdy", **offer, update=manifest_of(data, "delta", block=BLOCK))
        fed.world.run(lambda: bool(spy.said(kind, cid=cid)), limit_s=5)

    offered("d03", "go")
    offered("d04", "err")
    silent_s = fed.world.clock.time_s + CREDIT_IDLE_S
    fed.world.run(lambda: fed.world.clock.time_s >= silent_s)
    offered("d04", "go")


@pytest.mark.parametrize("value", [1e6, 5.0], ids=["far from any model", "far from what is usual here"])
def test_a_late_update_that_is_wrong_is_refused_with_its_reason_and_not_kept(tmp_path: Path, value: float) -> None:
    fed = federation(tmp_path)
    spy = begun(fed)
    data = announce(spy, value=value)
    said(fed, spy, "go")
    upload(spy, data)
    assert [ack["status"] for ack in said(fed, spy, "ack")] == ["rejected"]
    fed.finish()
    fed.world.end()
    assert shown(fed, 2) == []


def test_a_late_update_may_be_as_large_as_one_in_time_and_no_larger(tmp_path: Path) -> None:
    fed = federation(tmp_path)
    spy = begun(fed)
    task = spy.said("task", cid="d03")[0]
    key = {name: task[name] for name in ("run", "round", "exchange")}
    most = codecs.max_file_bytes(program(ballast=BALLAST).schema, task["reply"]["codec"])
    right = manifest_of(late_answer(spy), "delta", block=BLOCK)
    for size, kind in ((most + 1, "ack"), (most, "go")):
        update = replace(right, size=size)
        spy.say("d03", "rdy", **key, attempt=1, n=40, what="delta", update=update, seconds=1.0)
        said(fed, spy, kind)
    assert [ack["status"] for ack in spy.said("ack", cid="d03")] == ["late"]


def test_methods_that_cannot_use_it_are_not_sent_it(tmp_path: Path) -> None:
    fed = federation(tmp_path, "fedavg")
    spy = begun(fed)
    assert len(spy.said("stop", cid="d03")) == 1
    announce(spy)
    assert [ack["status"] for ack in said(fed, spy, "ack")] == ["late"]
    assert spy.said("go", cid="d03") == []


def test_late_updates_weigh_less_and_never_beside_one_in_time() -> None:
    schema = softmax_program.program().schema
    fleet, size = {"a": 10, "b": 10, "c": 10}, schema.size
    method = FedAvgLate(late_weight=0.5, local_steps=1)
    state = State(centers=np.zeros((1, size)))

    def reply(value: float) -> Reply:
        return Reply(n=10, update=np.full(size, value))

    exchanges = method.round(state, schema, fleet, np.random.default_rng(0))
    next(exchanges)
    with pytest.raises(StopIteration) as done:
        exchanges.send(RepliesWithLate({"a": reply(1.0), "b": reply(2.0)}, {"b": reply(9.0), "c": reply(4.0)}))
    np.testing.assert_allclose(done.value.value.centers, np.full((1, size), (1 + 2 + 0.5 * 4) / 2.5))
