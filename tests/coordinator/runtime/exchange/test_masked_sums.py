"""The stages of masked sums over a store: who is asked what, which sums are made, and why others are not."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.update_validation import AskedStage
from coordinator.runtime.exchange.masked_sums import MaskedSums, check_masked, told_choices
from coordinator.runtime.exchange.task_messages import NetworkExchange
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.store import Store
from coordinator.strategies.base import PartOfCohort, SealedSums, SumByCenter
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.common.server_options import ServerOptions
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.secure.keys import public_prekey
from edge_client.protocol.secure.parameters import LEAST_COHORT
from edge_client.protocol.secure.sum_messages import MAX_SUM_MESSAGE_BYTES, UPLOAD_HEADER, PrekeyBatch
from edge_client.protocol.sum_codec import KEPT, Work
from edge_client.protocol.summed_task import SummedFit, SumScale, Words
from edge_client.protocol.task import ClientId, Fit, Probe
from tests.support.secure_cohort import cids
from tests.support.stored_cohort import StoredCohort

FIRST = ExchangeKey("r", 1, 3)
CENTERS = np.zeros((3, 2), np.float32)
COUNT = 12


def work(*centers: int) -> SummedFit:
    return SummedFit(
        start=CENTERS[0], steps=1, lr=0.1, batch=8, seed=0, upload=False, stage="add", choose="given", group=0,
        centers=CENTERS, scale=SumScale(bits=24, devices=COUNT, clip=1.0), open=centers or (0,),
    )  # fmt: skip


def words_of(cid: str, _: Work) -> Words:
    """A device that moved one parameter by its number of steps, up and down."""
    return np.array([int(cid[-2:]), 2**24 - int(cid[-2:]), work().scale.levels, 1], np.uint32)


@dataclass
class Cohort(StoredCohort):
    """Notes what was asked; `lost` devices refuse their roster, with these words."""

    asked: list[tuple[int, str, list[str]]] = field(default_factory=list)
    stages: dict[str, AskedStage] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def ask(self, key: ExchangeKey, tasks: NetworkExchange) -> list[str]:
        self.stages |= {task.stage: task for task in tasks.values() if isinstance(task, AskedStage)}
        (stage,) = {task.stage for task in tasks.values() if isinstance(task, AskedStage)}
        self.asked.append((key.exchange - FIRST.exchange, stage, sorted(tasks)))
        if (closed := self.store.exchanges.closed_with(key)) is not None:
            return closed  # a replay
        self.silent = self.silent | ({"shares": self.lost} if self.lost else {})
        if stage == "shares":
            for cid, why in self.lost.items():
                self.store.exchanges.put_refusal(key, cid, why)
        return super().ask(key, tasks)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "store")) as made:
        yield made


def summed(
    cohort: Cohort,
    devices: Collection[str],
    *,
    least: int = 5,
    groups: dict[str, int] | None = None,
    first: ExchangeKey = FIRST,
) -> tuple[SealedSums, list[str]]:
    """-> the sums, and why others were not made."""
    sums = cohort.masked_sums()
    found = sums.sums(first, SumByCenter(dict.fromkeys(devices, work()), least=least, groups=groups))
    assert isinstance(found, SealedSums)
    return found, sums.failures


def total(members: Collection[str]) -> list[int]:
    n = sum(int(cid[-2:]) for cid in members)
    return [n, 2**24 - n, work().scale.levels * len(members), len(members)]


def test_a_sum_has_four_exchanges_and_a_replay_the_same_words(store: Store) -> None:
    every, cohort = cids(6), Cohort(store, words_of)
    found, failures = summed(cohort, every)
    assert (found.members, failures) == ({0: every}, [])
    assert found.sums[0].tolist() == total(every)
    stages = ["prekeys", "shares", "add", "show"]
    assert cohort.asked == [(number, stage, every) for number, stage in enumerate(stages)]
    assert cohort.stages["shares"].message
    again = Cohort(store, words_of)
    replayed, _ = summed(again, every)
    assert again.asked == cohort.asked[1:]  # what it took of the prekeys is stored
    assert replayed.sums[0].tolist() == total(every)


def test_each_stage_asks_for_no_more_bytes_than_its_answer_has_and_the_first_for_a_quorum(store: Store) -> None:
    cohort = Cohort(store, words_of)
    summed(cohort, cids(6))
    most = {name: stage.max_bytes for name, stage in cohort.stages.items()}
    upload = UPLOAD_HEADER.size + 4 * 24 // 8
    assert most == dict.fromkeys(("prekeys", "shares", "show"), MAX_SUM_MESSAGE_BYTES) | {"add": upload}
    assert {name: stage.needs_quorum for name, stage in cohort.stages.items()} == {
        "prekeys": False,
        "shares": True,
        "add": False,
        "show": False,
    }
    assert [name for name, stage in cohort.stages.items() if stage.work is not None] == ["add"]
    assert [stage.spare for stage in cohort.stages.values()] == [1, 1, 1, None]  # of six devices five must remain
    for name in ("shares", "add", "show"):
        with pytest.raises(Malformed):
            cohort.stages[name].decode(b"{}")


def test_devices_with_unused_prekeys_are_not_asked_for_others(store: Store) -> None:
    every, cohort = cids(7), Cohort(store, words_of)
    summed(cohort, every[:6])
    cohort.asked.clear()
    found, _ = summed(cohort, every, first=FIRST._replace(round=2))
    assert cohort.asked[:2] == [(0, "prekeys", every[6:]), (1, "shares", every)]
    assert found.members == {0: every}


@pytest.mark.parametrize(("why", "asked_again"), [("bad_task: prekey 0 was used", True), ("no_data", False)])
def test_a_device_that_does_not_know_its_prekey_is_asked_for_others_the_next_time(
    store: Store,
    why: str,
    asked_again: bool,  # noqa: FBT001 - a row
) -> None:
    every, cohort = cids(6), Cohort(store, words_of, lost={"dev-002": why})
    found, _ = summed(cohort, every)
    assert found.members == {0: [cid for cid in every if cid != "dev-002"]}
    cohort.lost, cohort.silent = {}, {}
    cohort.asked.clear()
    summed(cohort, every, first=FIRST._replace(round=2))
    assert (cohort.asked[0] == (0, "prekeys", ["dev-002"])) == asked_again
    assert (cohort.asked[0][1] == "shares") != asked_again


def test_a_replay_keeps_the_prekeys_that_a_device_offered_for_a_later_sum_of_the_round(store: Store) -> None:
    """It forgot them as those that the device had lost before, and later sums of the round asked other things."""
    every, cohort, lost = cids(6), Cohort(store, words_of, lost={"dev-002": "bad_task"}), FIRST
    second, third = (FIRST._replace(exchange=FIRST.exchange + 4 * n) for n in (1, 2))
    summed(cohort, every, first=lost)
    cohort.lost, cohort.silent = {}, {}
    summed(cohort, every, first=second)
    again = Cohort(store, words_of, devices=cohort.devices)
    for first in (lost, second, third):
        summed(again, every, first=first)
    assert [asked for asked in again.asked if asked[1] == "prekeys"] == []


def test_a_device_that_is_silent_in_a_later_sum_has_not_lost_its_new_prekeys(store: Store) -> None:
    """The refusal of the round's first sum counted for each later one, so it was asked for prekeys again."""
    every, cohort = cids(6), Cohort(store, words_of, lost={"dev-002": "bad_task"})
    summed(cohort, every)
    cohort.lost, cohort.silent = {}, {"shares": ["dev-002"]}
    summed(cohort, every, first=FIRST._replace(exchange=FIRST.exchange + 4))
    assert store.prekeys.lacking(every) == set()


def test_a_replay_of_a_sum_for_which_no_device_had_a_prekey_takes_none_of_later_sums(store: Store) -> None:
    """It took those that were offered later, asked for shares, and later sums had others than before."""
    every, cohort, second = cids(6), Cohort(store, words_of), FIRST._replace(round=2)
    cohort.silent = {"prekeys": every}
    before = summed(cohort, every)[1]
    cohort.silent = {}
    summed(cohort, every, first=second)
    again = Cohort(store, words_of)
    assert summed(again, every)[1] == before
    assert (again.asked, store.prekeys.taken(FIRST._replace(exchange=FIRST.exchange + 1))) == ([], {})


def test_groups_are_summed_apart_and_one_that_is_too_small_is_not_even_asked(store: Store) -> None:
    every, cohort = cids(COUNT), Cohort(store, words_of)
    groups = {cid: 2 if i < 6 else 1 if i < 8 else 7 for i, cid in enumerate(every)}  # 6, 2 and 4 devices
    groups |= dict.fromkeys(every[8:10], 2)  # 8, 2 and 2
    found, failures = summed(cohort, every, groups=groups)
    mine = [cid for cid in every if groups[cid] == 2]
    assert found.members == {2: mine}
    assert found.sums[2].tolist() == total(mine)
    assert failures == ["2 devices are asked for the sum; at least 5 must"] * 2
    assert all(asked == mine for _, _, asked in cohort.asked)


def test_a_group_of_exactly_the_least_is_summed_and_of_one_less_not(store: Store) -> None:
    every = cids(6)
    found, failures = summed(Cohort(store, words_of), every, least=6)
    assert (found.members, failures) == ({0: every}, [])
    found, failures = summed(Cohort(store, words_of), every, least=7, first=FIRST._replace(round=2))
    assert (found.members, failures) == ({}, ["6 devices are asked for the sum; at least 7 must"])
    silent = Cohort(store, words_of, silent={"prekeys": cids(9)[6:]})
    found, failures = summed(silent, cids(9)[4:], least=1, first=FIRST._replace(round=3))
    assert failures == ["2 devices have a key for the sum; at least 5 must"]  # whatever the method asks for


def test_of_two_groups_one_may_fail_and_its_reason_is_told_once(store: Store) -> None:
    every = cids(COUNT)
    groups = {cid: i % 2 for i, cid in enumerate(every)}
    odd = [cid for cid in every if groups[cid]]
    cohort = Cohort(store, words_of, silent={"add": odd[:2]})
    found, failures = summed(cohort, every, groups=groups)
    even = [cid for cid in every if not groups[cid]]
    assert found.members == {0: even}
    assert found.sums[0].tolist() == total(even)
    assert failures == ["4 devices uploaded; at least 5 must"]
    assert cohort.asked[-1] == (3, "show", even)


def test_a_sum_that_shows_a_device_that_did_not_keep_to_its_task_is_left_out(store: Store) -> None:
    def lying(cid: str, one: Work) -> Words:
        return words_of(cid, one) + np.uint32(cid == "dev-003") * np.array([0, 0, 0, 1], np.uint32)

    found, failures = summed(Cohort(store, lying), cids(6))
    assert (found.members, found.sums) == ({0: cids(6)}, {})  # it was seen
    assert failures == ["7 devices are counted: at least one of 6 devices did not keep to its task"]


def test_where_no_device_deals_shares_nothing_more_is_asked(store: Store) -> None:
    cohort = Cohort(store, words_of, silent={"shares": cids(6)})
    found, failures = summed(cohort, cids(6))
    assert found.members == {}
    assert failures == ["0 devices sent shares that others hold; at least 5 must"]
    assert [stage for _, stage, _ in cohort.asked] == ["prekeys", "shares"]


def test_a_fit_that_stays_is_asked_in_the_place_of_the_words(store: Store) -> None:
    heard: list[tuple[ExchangeKey, NetworkExchange]] = []

    def ask(key: ExchangeKey, tasks: NetworkExchange) -> list[str]:
        heard.append((key, tasks))
        return []

    fit = Fit(start="own", init=CENTERS[0], steps=1, lr=0.1, batch=8, seed=0, upload=False)
    sums = MaskedSums(ask=ask, store=store, federation="demo")
    assert sums.sums(FIRST, SumByCenter(dict.fromkeys(cids(2), fit), least=5)) == {}
    ((key, tasks),) = heard
    assert (key, sorted(tasks)) == (FIRST._replace(exchange=5), cids(2))
    for task in tasks.values():
        assert isinstance(task, AskedStage)
        assert (task.stage, task.max_bytes, task.needs_quorum, task.work) == ("keep", 1, True, fit)


def test_a_choice_is_told_as_one_word_for_each_center_and_other_tasks_stay_as_they_are() -> None:
    probe = Probe(models=(), want=frozenset({"labels"}), batch=1, seed=0)
    plain = {"a": probe}
    assert told_choices(plain) is plain
    part = told_choices(PartOfCohort({"b": work(0, 1, 2)}, of=7))
    assert isinstance(part, PartOfCohort)
    assert (part.of, sorted(part)) == (7, ["b"])
    mixed = told_choices({"a": probe, "b": work(0, 1, 2)})
    tell = mixed["b"]
    assert mixed["a"] is probe
    assert isinstance(tell, AskedStage)
    assert (tell.stage, tell.max_bytes, tell.needs_quorum) == ("tell", 12, True)
    reply = tell.decode(np.array([0, 1, 0], "<u4").tobytes())
    assert (reply.n, reply.words is not None and reply.words.tolist()) == (1, [0, 1, 0])


@pytest.mark.parametrize(
    ("options", "devices", "words"),
    [
        ({"secure": "updates", "least_members": 4}, 9, "least-members is 4"),
        ({"secure": "updates"}, 4, "with min-devices = 4"),
        ({"secure": "updates", "least_members": 8}, 7, "no sum of fewer than 8 devices"),
        ({"secure": "updates"}, 5, None),
        ({}, 1, None),
    ],
)
def test_masked_sums_need_five_members_and_as_many_devices(
    options: dict[str, Any], devices: int, words: str | None
) -> None:
    method = FedAvg(server=ServerOptions(**options))
    if words is None:
        check_masked(method, min_devices=devices)
        return
    with pytest.raises(ConfigError, match=words) as wrong:
        check_masked(method, min_devices=devices)
    assert wrong.value.hint


# ---- answers that a device must not give ----

FIVE = cids(LEAST_COHORT)


def first_stage(store: Store, exchange: SumByCenter) -> AskedStage:
    """The stage of a device in the first exchange, which no device answers."""
    heard: list[NetworkExchange] = []

    def ask(_: ExchangeKey, tasks: NetworkExchange) -> Collection[ClientId]:
        heard.append(tasks)
        return []

    MaskedSums(ask=ask, store=store, federation="test").sums(FIRST, exchange)
    stage = heard[0][FIVE[0]]
    assert isinstance(stage, AskedStage)
    return stage


def offer(number: int) -> bytes:
    return PrekeyBatch(keys=(public_prekey(number, number.to_bytes(32, "big")),)).to_bytes()


def test_a_prekey_that_was_offered_before_is_refused(store: Store) -> None:
    known = {cid: PrekeyBatch.from_bytes(offer(7)) for cid in FIVE}
    store.prekeys.take(ExchangeKey("r", 0, 1), FIVE, known)
    stage = first_stage(store, SumByCenter(dict.fromkeys(FIVE, work()), least=LEAST_COHORT))
    assert (stage.stage, stage.after) == ("prekeys", 7)
    with pytest.raises(Malformed, match="a prekey with a number up to 7") as refused:
        stage.decode(offer(7))
    assert refused.value.code == "rejected"
    assert stage.decode(offer(8)).n == 1


@pytest.mark.parametrize("told", [b"", b"\x01", KEPT + KEPT])
def test_of_a_fit_that_stays_on_the_device_nothing_else_is_taken_than_that_it_was_done(
    store: Store, told: bytes
) -> None:
    fit = Fit(start="own", init=CENTERS[0], steps=1, lr=0.1, batch=8, seed=0, upload=False)
    stage = first_stage(store, SumByCenter(dict.fromkeys(FIVE, fit), least=LEAST_COHORT))
    assert stage.stage == "keep"
    with pytest.raises(Malformed) as refused:
        stage.decode(told)
    assert refused.value.code == "bad_schema"
    assert stage.decode(KEPT).n == 1
