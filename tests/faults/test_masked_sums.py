"""`secure` over the network: real coordinator and devices in virtual time, with dropouts and crashes at every stage."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.config_sections import RunConfig
from coordinator.runtime.exchange.masked_sums import MaskedSums
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.strategies.base import Replies, SealedSums, SumByCenter
from edge_client.errors import ConfigError
from edge_client.protocol import messages
from edge_client.protocol.secure import device_stages
from edge_client.protocol.secure.device_sums import DeviceSums
from edge_client.protocol.secure.masks import pack_words
from edge_client.protocol.secure.parameters import LEAST_COHORT
from edge_client.protocol.secure.sum_messages import DealtShares, RevealedShares
from edge_client.protocol.summed_task import Words
from edge_client.runtime import task_runner
from edge_client.training.summed_work import SummedAnswer, add_words
from tests.faults.test_damaged_store import flip, state_blobs
from tests.support.memory_broker import MemoryBroker
from tests.support.softmax_program import grouped_fleet
from tests.support.virtual_federation import TOPICS, Anything, Federation

DEVICES = 6
VICTIM = "d01"
BITS = 24  # of the words of a round
EVALUATED = 5  # words of an evaluation, which have 32 bits


def run_of(method: str = "fedavg", rounds: int = 2, **settings: Anything) -> RunConfig:
    given = {"local-steps": 3, "batch-size": 8, "secure": "updates", "secure-bits": BITS, "secure-clip": 10.0}
    method, _, start = method.partition(" from ")
    given |= {"clusters": 2} if method not in ("fedavg", "ditto") else {}
    given |= {"secure-start": start} if start else {}
    return RunConfig(method=method, rounds=rounds, name="fesem", settings=given | settings)


@dataclass
class Ledger:
    """What the devices added in the clear, by device, and the sums that the coordinator was given."""

    words: dict[str, list[Words]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[ExchangeKey, SealedSums] = field(default_factory=dict)
    last: dict[ExchangeKey, dict[str, Words]] = field(default_factory=dict)


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    noted = Ledger()
    sums = MaskedSums.sums

    def note_words(*args: Any, **kwargs: Any) -> SummedAnswer:  # noqa: ANN401
        found = add_words(*args, **kwargs)
        noted.words[threading.current_thread().name].append(found.words)
        return found

    def note_sums(self: MaskedSums, first: ExchangeKey, exchange: SumByCenter) -> Replies:
        found = sums(self, first, exchange)
        assert isinstance(found, SealedSums)
        noted.sums[first] = found
        noted.last[first] = {cid: all_of[-1] for cid, all_of in noted.words.items()}
        return found

    monkeypatch.setattr(task_runner, "add_words", note_words)
    monkeypatch.setattr(MaskedSums, "sums", note_sums)
    return noted


def check_exact(ledger: Ledger) -> None:
    """Each sum is that of the words of its members, modulo 2^bits."""
    for key, found in ledger.sums.items():
        for group, members in found.members.items():
            assert len(members) >= LEAST_COHORT
            if group in found.sums:
                total = np.asarray(np.sum([ledger.last[key][cid] for cid in members], axis=0, dtype=np.uint32))
                bits = 32 if len(total) == EVALUATED else BITS
                np.testing.assert_array_equal(found.sums[group], total & np.uint32(2**bits - 1))


@pytest.mark.parametrize(
    ("method", "mode", "sums"),
    [
        ("ifca", "updates", 1 + 2 + 2),  # the random groups, two rounds of one sum, and two evaluations
        ("ifca", "updates+membership", 1 + 4 + 2),  # choices are summed, too
        ("fesem", "updates+membership", 1 + 4 + 2),
        ("fesem from k-means", "updates+membership", 12 + 4 + 2),  # in the first round: six steps of two sums
        ("fedem", "updates", 1 + 4 + 2),  # a device has a part in every center, and counts itself at one
        ("fedsoft", "updates+membership", 1 + 4 + 2),  # as in fedem
        ("ditto", "updates", 2 + 2 + 2),  # and the second fits, of which nothing is told
    ],
)
@pytest.mark.usefixtures("same_rounding")  # on it depends when k-means ends
def test_the_coordinator_is_given_exactly_the_sum_of_the_words_of_the_devices(
    tmp_path: Path, ledger: Ledger, method: str, mode: str, sums: int
) -> None:
    """The devices insist on the same mode in their client.toml, and refuse none of the run's tasks."""
    fed = Federation.of(tmp_path, devices=2 * LEAST_COHORT, runs=(run_of(method, secure=mode),))
    fed.insist = mode
    fed.start()
    fed.complete()
    assert not any(record.get("refused") for record in fed.rounds())
    assert len(ledger.sums) == sums
    assert all(found.sums for found in ledger.sums.values() if found.members)
    check_exact(ledger)
    assert all("failed" not in record["secure"] for record in fed.rounds())


def test_the_noise_of_the_devices_is_in_the_sums_and_each_round_tells_what_they_cost(
    tmp_path: Path, ledger: Ledger
) -> None:
    noise: dict[str, Any] = {"privacy-noise": 2.0, "secure-bits": BITS}
    fed = Federation.of(tmp_path, devices=DEVICES, runs=(run_of(**noise),))
    fed.start()
    fed.complete()
    check_exact(ledger)
    first, second = (record["privacy"] for record in fed.rounds())
    assert (first["releases"], second["releases"]) == (1, 2)
    assert 0 < first["epsilon"] < second["epsilon"]


class Stages:
    """Which stages of sums the coordinator has asked of a device, and which of them the device has announced."""

    def __init__(self, cid: str) -> None:
        self.cid, self.asked, self.announced = cid, list[str](), list[str]()

    def __call__(self, topic: str, body: bytes) -> tuple[bytes, ...]:
        route = TOPICS.parse(topic)
        if route.cid == self.cid and body and route.kind in ("t", "rq"):
            said = messages.read_message(body, route.kind)
            if said["k"] == "task" and said["job"] == "sum":
                self.asked.append(said["stage"])
            elif said["k"] == "rdy":
                self.announced.append(self.asked[-1])
        return (body,)


def small(folder: Path, seen: Stages, **changes: Anything) -> Federation:
    return Federation.of(folder, broker=MemoryBroker(tamper=seen), devices=DEVICES, **changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, same_rounding: None) -> dict[str, bytes]:
    """The final states of a round that nothing disturbs."""
    fed = small(tmp_path_factory.mktemp("undisturbed"), Stages(VICTIM), runs=(run_of(rounds=1),))
    return fed.play().final_states()


@pytest.mark.parametrize("stage", ["prekeys", "shares", "add", "show"])
def test_a_device_that_is_killed_between_stages_and_comes_back_loses_nothing(
    tmp_path: Path, undisturbed: dict[str, bytes], stage: str
) -> None:
    seen = Stages(VICTIM)
    fed = small(tmp_path, seen, runs=(run_of(rounds=1),))
    fed.start()
    fed.world.run(lambda: stage in seen.announced)
    fed.world.kill(VICTIM)
    fed.start_device(VICTIM, grouped_fleet(DEVICES, 2)[VICTIM])
    fed.complete()
    assert fed.final_states() == undisturbed


@pytest.mark.parametrize("moment", ["asked", "announced"])
@pytest.mark.parametrize("stage", ["prekeys", "shares", "add", "show"])
def test_a_coordinator_that_is_killed_between_stages_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, bytes], stage: str, moment: str
) -> None:
    seen = Stages(VICTIM)
    fed = small(tmp_path, seen, runs=(run_of(rounds=1),))
    fed.start()
    fed.world.run(lambda: stage in getattr(seen, moment))
    fed.world.kill("coordinator.0")
    fed.start_coordinator()
    fed.complete()
    assert fed.final_states() == undisturbed
    assert all("failed" not in record["secure"] for record in fed.rounds())


@pytest.mark.parametrize("damaged", [1, 2])
@pytest.mark.usefixtures("same_rounding")
def test_a_damaged_state_costs_a_replay_of_its_sums_with_the_prekeys_that_they_took(
    tmp_path: Path, damaged: int
) -> None:
    """Later rounds forgot them, so that the coordinator ended with `asks other things than before the restart`."""
    runs = (run_of(rounds=3),)
    whole = small(tmp_path / "whole", Stages(VICTIM), runs=runs).play()
    seen = Stages(VICTIM)
    fed = small(tmp_path / "rotten", seen, runs=runs)
    fed.start()
    fed.world.run(lambda: seen.asked.count("add") == 5)  # the first sum of round 3; a round has an evaluation, too
    fed.world.end()
    for blob in state_blobs(fed, damaged):
        flip(blob)
    again = Federation(type(fed.world)(tmp_path / "rotten"), fed.config)
    assert again.play().outcome() == whole.outcome()


@pytest.mark.parametrize("killed", [VICTIM, "coordinator.0"])
@pytest.mark.parametrize("stage", ["shares", "add", "show"])
def test_a_kill_adds_no_second_noise_to_a_sum_and_loses_none(
    tmp_path: Path, ledger: Ledger, stage: str, killed: str
) -> None:
    """Noise follows from no task, so a device that begins a stage again draws other noise; one vector of it counts."""
    noise: dict[str, Any] = {"privacy-noise": 2.0, "secure-bits": BITS}
    seen = Stages(VICTIM)
    fed = small(tmp_path, seen, runs=(run_of(rounds=1, **noise),))
    fed.start()
    fed.world.run(lambda: stage in seen.announced)
    fed.world.kill(killed)
    if killed == VICTIM:
        fed.start_device(VICTIM, grouped_fleet(DEVICES, 2)[VICTIM])
    else:
        fed.start_coordinator()
    fed.complete()
    check_exact(ledger)
    (record,) = fed.rounds()
    assert "failed" not in record["secure"]
    assert record["privacy"]["releases"] == 1
    assert all(len(found.members[0]) == DEVICES for found in ledger.sums.values())


@pytest.mark.parametrize("stage", ["shares", "add", "show"])
def test_a_device_that_sleeps_from_a_stage_on_is_done_without(tmp_path: Path, ledger: Ledger, stage: str) -> None:
    seen = Stages(VICTIM)
    fed = small(tmp_path, seen, runs=(run_of(rounds=2),), quorum=0.5, deadline_s=60.0)
    fed.start()
    fed.world.run(lambda: stage in seen.asked)
    fed.world.kill(VICTIM)
    fed.complete()
    check_exact(ledger)
    first, *others = (found.members[0] for found in ledger.sums.values())
    awake = [cid for cid in grouped_fleet(DEVICES, 2) if cid != VICTIM]
    assert (first, others) == ([*awake[:1], VICTIM, *awake[1:]] if stage == "show" else awake, [awake] * 3)


def test_a_sum_of_too_few_devices_fails_closed_and_the_next_round_begins(tmp_path: Path, ledger: Ledger) -> None:
    seen, gone = Stages(VICTIM), ("d01", "d02")
    fed = small(tmp_path, seen, runs=(run_of(rounds=2),), quorum=0.5, deadline_s=60.0)
    fed.start()
    fed.world.run(lambda: "add" in seen.asked)
    for cid in gone:
        fed.world.kill(cid)
    fed.world.run(lambda: fed.happened("round"))
    for cid in gone:
        fed.start_device(cid, grouped_fleet(DEVICES, 2)[cid])
    fed.complete()
    one, two = fed.rounds()
    assert one["secure"]["failed"] == ["4 devices uploaded; at least 5 must"]
    assert one["accuracy"] == {"micro": None, "macro": None}
    assert "failed" not in two["secure"]
    assert [len(found.sums) for found in ledger.sums.values()] == [0, 1, 1]  # unchanged models are not evaluated again
    check_exact(ledger)


def test_a_device_that_lost_its_state_misses_one_sum_and_then_offers_new_keys(tmp_path: Path, ledger: Ledger) -> None:
    seen = Stages(VICTIM)
    fed = small(tmp_path, seen, runs=(run_of(rounds=2),), quorum=0.5, deadline_s=60.0)
    fed.start()
    fed.world.run(lambda: fed.happened("round"))
    fed.world.kill(VICTIM)
    shutil.rmtree(fed.world.folder / VICTIM / "state")
    fed.start_device(VICTIM, grouped_fleet(DEVICES, 2)[VICTIM])
    fed.complete()
    check_exact(ledger)
    assert [VICTIM in found.members[0] for found in ledger.sums.values()] == [True, True, False, True]
    assert seen.asked.count("prekeys") == 2


@pytest.mark.parametrize("lost", [2, DEVICES])
def test_more_devices_than_a_quorum_may_lack_lose_their_state_and_the_training_goes_on(
    tmp_path: Path, ledger: Ledger, lost: int
) -> None:
    """They would refuse the same roster at each start; with two of six lost, a quorum of 0.8 is not met."""
    fed = small(tmp_path, Stages(VICTIM), runs=(run_of(rounds=3),), quorum=0.8, deadline_s=60.0)
    fed.start()
    fed.world.run(lambda: fed.happened("round"))
    fleet = grouped_fleet(DEVICES, 2)
    for cid in [*fleet][:lost]:
        fed.world.kill(cid)
        shutil.rmtree(fed.world.folder / cid / "state")
        fed.start_device(cid, fleet[cid])
    fed.complete()
    check_exact(ledger)
    _, second, third = fed.rounds()
    assert second["secure"]["failed"] == [f"{DEVICES - lost} devices sent shares that others hold; at least 5 must"]
    assert len(second["refused"]) == lost
    assert "failed" not in third["secure"]
    assert not third.get("refused")


@pytest.mark.parametrize("stage", ["deal", "mask", "show"])
def test_a_device_that_answers_a_stage_wrongly_spoils_no_sum(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Envelopes for strangers, an upload of another length, and a share that its dealer did not announce."""
    honest = getattr(device_stages, stage)

    def wrong(*args: Any) -> tuple[DeviceSums, bytes]:  # noqa: ANN401
        sums, answer = honest(*args)
        if threading.current_thread().name != VICTIM:
            return sums, answer
        if stage == "deal":
            said = DealtShares.from_bytes(answer)
            return sums, replace(said, envelopes={f"{cid}x": e for cid, e in said.envelopes.items()}).to_bytes()
        if stage == "mask":
            return sums, answer[:-1]
        shown = RevealedShares.from_bytes(answer)
        return sums, replace(shown, self_shares=dict.fromkeys(shown.self_shares, bytes(32))).to_bytes()

    monkeypatch.setattr(device_stages, stage, wrong)
    fed = small(tmp_path, Stages(VICTIM), runs=(run_of(rounds=1),), quorum=0.5, deadline_s=60.0)
    fed.start()
    fed.complete()
    check_exact(ledger)
    for found in ledger.sums.values():
        assert (VICTIM in found.members[0]) == (stage == "show")
        assert len(found.members[0]) >= DEVICES - 1
    if stage != "show":
        assert VICTIM in fed.rounds()[0]["refused"]


def test_nothing_that_a_device_adds_is_on_the_wire_or_on_the_coordinators_disk(tmp_path: Path, ledger: Ledger) -> None:
    wire: list[bytes] = []

    def hear(_topic: str, body: bytes) -> tuple[bytes, ...]:
        wire.append(body)
        return (body,)

    fed = Federation.of(
        tmp_path, broker=MemoryBroker(tamper=hear), devices=DEVICES, runs=(run_of(rounds=1),), ballast=64
    )
    fed.start()
    fed.complete()
    held = b"\n".join([*wire, *(file.read_bytes() for file in fed.config.folder.rglob("*") if file.is_file())])
    for cid, added in ledger.words.items():
        model, *_ = added
        for plain in (model.tobytes(), pack_words(model, BITS)):
            parts = [plain[at : at + 16] for at in range(0, len(plain) - 16, 16)]
            told = [part for part in parts if len(set(part)) > 4 and part in held]  # not runs of zeros
            assert not told, cid
        state = (fed.world.folder / cid / "state" / "state.json").read_text()
        roots = [root for _, root in json.loads(json.loads(state)["sums"])["roots"]]
        assert len(roots) >= 1
        assert not any(root.encode() in held or base64.b64decode(root) in held for root in roots)


@pytest.mark.parametrize(
    ("settings", "devices", "hint"),
    [
        ({"least-members": 3}, DEVICES, "set least-members to 5 or more"),
        ({}, 4, "set min-devices to 5 or more"),
        ({"least-members": 9}, 8, "set min-devices to 9 or more"),
    ],
)
def test_fewer_devices_than_masks_can_hide_are_refused_before_anything_is_done(
    tmp_path: Path, settings: dict[str, Any], devices: int, hint: str
) -> None:
    fed = Federation.of(tmp_path, devices=devices, runs=(run_of("ifca", **settings),))
    fed.start_coordinator()
    with pytest.raises(ConfigError, match=hint):
        fed.finish()
    assert fed.events == []


@pytest.mark.parametrize("method", ["fedavg", "ifca"])
def test_rounds_that_ask_too_few_devices_for_a_sum_are_told_at_the_start_and_after_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    fed = Federation.of(tmp_path, devices=DEVICES, runs=(run_of(method, rounds=2, **{"fraction-train": 0.5}),))
    fed.start()
    fed.complete()
    assert len([said for said in caplog.messages if f"a round asks 3 of {DEVICES} devices" in said]) == 1
    assert fed.rounds()[-1]["secure"]["failed"]


def test_tests_of_too_few_devices_for_a_sum_are_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fed = Federation.of(tmp_path, devices=DEVICES, runs=(run_of("fedavg", rounds=2),), fraction_evaluate=0.5)
    fed.start()
    fed.complete()
    assert len([said for said in caplog.messages if f"a test asks 3 of {DEVICES} devices" in said]) == 1
    assert [record["accuracy"]["micro"] is None for record in fed.rounds()] == [True, False]
