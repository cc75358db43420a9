"""An exchange that asks a part of a round's devices may lose as many of them as the round may.

It had the quorum of its own devices: where it asked one, that device could end the run, and hold up each round.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.config_sections import RunConfig
from coordinator.rounds.silence import WAITED_MISSES
from coordinator.strategies.base import PartOfCohort
from edge_client.errors import NetworkError
from edge_client.protocol import messages
from tests.support.memory_broker import MemoryBroker
from tests.support.methods import build, world
from tests.support.softmax_program import grouped_fleet
from tests.support.virtual_federation import TOPICS, Federation, Spy

VICTIM, DEADLINE_S = "d04", 60.0


def run_of(method: str, rounds: int = 3, **settings: Any) -> RunConfig:  # noqa: ANN401 - of the method
    given = {"local-steps": 2, "batch-size": 8} | {name.replace("_", "-"): value for name, value in settings.items()}
    return RunConfig(method=method, rounds=rounds, name="run", settings=given)


def without_answer(cid: str, number: int) -> MemoryBroker:
    """A broker that loses what this device announces for the exchange of this number of each round."""

    def lose(topic: str, body: bytes) -> tuple[bytes, ...]:
        route = TOPICS.parse(topic)
        if route.cid == cid and route.kind == "rq":
            said = messages.read_message(body, "rq")
            if said["k"] == "rdy" and said["exchange"] == number:
                return ()
        return (body,)

    return MemoryBroker(tamper=lose)


def test_a_device_that_never_tells_its_labels_neither_ends_a_run_nor_holds_up_each_round(tmp_path: Path) -> None:
    """It answers all else, and is the only one that is asked for labels from the second round on."""
    rounds = WAITED_MISSES + 2  # each answer but the last makes up for a part of what it owes
    run, broker = run_of("fedavg", rounds, label_prior="device"), without_answer(VICTIM, 1)
    given: dict[str, Any] = {"quorum": 0.8, "deadline_s": DEADLINE_S, "evaluate_every": rounds}
    fed = Federation.of(tmp_path, broker=broker, runs=(run,), devices=5, **given).play()
    assert len(fed.rounds()) == rounds
    assert fed.world.clock.time_s / DEADLINE_S < rounds


def test_a_device_that_refuses_to_tell_its_labels_does_not_end_the_run(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, runs=(run_of("fedavg", 2, label_prior="device"),), devices=5, quorum=0.8)
    fed.world.broker = without_answer(VICTIM, 1)
    spy, refused = Spy(fed.world.broker), set[str]()
    fed.start()

    def refuses() -> bool:
        for task in spy.said("task", cid=VICTIM):
            if task["exchange"] == 1 and task["id"] not in refused:
                refused.add(task["id"])
                key = {name: task[name] for name in ("run", "round", "exchange")}
                spy.say(VICTIM, "nack", re=task["id"], code="no_data", **key)
        return fed.catalog is not None

    fed.world.run(refuses)
    fed.world.end()
    assert len(refused) == len(fed.rounds()) == 2


def test_a_new_device_that_is_silent_while_it_is_placed_does_not_end_the_run(tmp_path: Path) -> None:
    """`fedgroup` asks it alone for its first update, before the others train."""
    run = run_of("fedgroup", 2, clusters=2)
    fed = Federation.of(tmp_path, runs=(run,), devices=5, quorum=0.8, deadline_s=DEADLINE_S)
    fed.start()
    fed.world.run(lambda: fed.live is not None)
    fed.start_mute_device("a09")
    fed.complete()
    assert fed.happened("let-in")
    assert [sorted(record["per_device"]) for record in fed.rounds()] == [sorted(grouped_fleet(5, 2))] * 2


def test_a_device_that_evaluates_for_others_and_is_gone_does_not_end_the_run(tmp_path: Path) -> None:
    """It is the one of five that is drawn for the first two tests."""
    fed = Federation.of(
        tmp_path, runs=(run_of("fedavg"),), devices=5, quorum=0.8, deadline_s=60.0, fraction_evaluate=0.2, seed=0
    )
    fed.start(4)
    fed.start_mute_device(VICTIM)
    fed.complete()
    assert [sorted(record["per_device"]) for record in fed.rounds()] == [[], [], sorted(grouped_fleet(4, 2))]


def test_a_device_that_left_holds_up_few_sums(tmp_path: Path) -> None:
    """Only it has no unused keys, so that each sum asked it alone for new ones, and waited for it."""
    run = run_of("fedavg", 3, secure="updates", secure_clip=10.0)
    fed = Federation.of(tmp_path, runs=(run,), devices=6, quorum=0.5, deadline_s=DEADLINE_S)
    fed.start(5)
    fed.start_mute_device("d99")
    fed.complete()
    assert all("failed" not in record["secure"] for record in fed.rounds())
    assert fed.world.clock.time_s / DEADLINE_S < WAITED_MISSES + 3


def test_a_device_that_answers_all_stages_of_a_sum_but_one_does_not_hold_up_each_round(tmp_path: Path) -> None:
    """Each stage that it answered made up for a part of the one that it missed, so that it held up each round."""
    rounds = WAITED_MISSES + 2
    run = run_of("fedavg", rounds, secure="updates", secure_clip=10.0)
    fed = Federation.of(
        tmp_path, broker=without_answer(VICTIM, 2), runs=(run,), devices=6, quorum=0.5, deadline_s=DEADLINE_S
    )
    fed.play()
    assert all("failed" not in record["secure"] for record in fed.rounds())
    assert fed.world.clock.time_s / DEADLINE_S < rounds


@pytest.mark.parametrize(
    ("case", "alone"), [("fedgroup", 1), ("fedcenters trial-rounds=1", 0), ("fedavg label-prior=device", 1)]
)
def test_what_a_method_asks_beside_its_fits_is_a_part_of_its_cohort(case: str, alone: int) -> None:
    """A device comes in the second round: it is placed, or tells its labels, alone."""
    local = grouped_fleet(6, 2)
    made, parts = world(build(case), local), list[tuple[int, int]]()
    five = {cid: n for cid, n in made.fleet.items() if cid != "d05"}
    for fleet in (five, made.fleet):
        made.round(fleet=fleet)
        parts += [(len(one), one.of) for one in made.exchanges if isinstance(one, PartOfCohort)]
    assert (1, 6) in parts if alone else all(part == (5, 5) for part in parts[:12])
    assert all(asked <= of for asked, of in parts)


def test_the_quorum_of_a_sum_is_a_share_of_the_wanted_devices_where_more_are_asked(tmp_path: Path) -> None:
    """All seven are asked and five are wanted; with a quorum of seven the two that leave ended the training."""
    run = run_of("fedavg", 2, secure="updates", secure_clip=10.0, fraction_train=0.6)
    fed = Federation.of(tmp_path, runs=(run,), devices=7, quorum=1.0, deadline_s=60.0, over_select=2.0)
    spy = Spy(fed.world.broker)
    fed.start()
    fed.world.run(lambda: fed.happened("round"))
    for cid in ("d05", "d06"):
        fed.world.kill(cid)
    with pytest.raises(NetworkError, match="only 5 of 7 devices gave an answer that counts"):  # of the test of all
        fed.finish()
    second = [task for task in spy.said("task", cid="d00") if task["round"] == 2]
    assert [(task["exchange"], task["stage"]) for task in second] == [
        (1, "shares"),
        (2, "add"),
        (3, "show"),
        (5, "shares"),
    ]


@pytest.mark.parametrize("without", [2, 4])
def test_devices_without_held_out_samples_are_missing_in_no_test(tmp_path: Path, without: int) -> None:
    """A device may have no test.npz; a fleet of such devices ended below the quorum of its first test."""
    fed = Federation.of(tmp_path, devices=4, teach_newcomers=True)
    fed.start_coordinator()
    for number, (cid, local) in enumerate(grouped_fleet(4, 2).items()):
        fed.start_device(cid, replace(local, test=None) if number < without else local)
    fed.finish()
    fed.world.end()
    assert [len(record["per_device"]) for record in fed.rounds()] == [4 - without] * 2
    assert [sorted(record["assignment"]) for record in fed.rounds()] == [["d00", "d01", "d02", "d03"]] * 2
