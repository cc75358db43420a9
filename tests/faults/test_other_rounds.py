"""A run folder goes on with another number of rounds, where that changes none of the rounds that were played.

The result is that of a training that had this number from its start, to the last bit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.dashboard.displayed_metrics import replay_events
from coordinator.storage.status import read_status
from tests.support.virtual_federation import TOPICS, Anything, Federation, Outcome

DEVICES, LONG, SHORT = 3, 4, 2


def federation(folder: Path, **changes: Anything) -> Federation:
    given: dict[str, Any] = {"devices": DEVICES, "rounds": LONG} | changes
    return Federation.of(folder, **given)


def without_plan(outcome: Outcome) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """The outcome without the number of rounds that was planned."""
    states, rounds = outcome
    return states, [{key: value for key, value in each.items() if key != "of"} for each in rounds]


def killed_in_round(fed: Federation, number: int) -> Federation:
    """Played until an exchange of this round is open, and ended there."""
    fed.start()
    fed.world.run(lambda: fed.live is not None and fed.live.key.round == number)
    fed.world.end()
    return fed


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return federation(tmp_path_factory.mktemp("long")).play().outcome()


def test_a_run_that_has_ended_goes_on_to_more_rounds_and_publishes_again(tmp_path: Path, long_run: Outcome) -> None:
    first = federation(tmp_path, rounds=SHORT).play()
    assert read_status(first.config.folder)["done"]
    more = federation(tmp_path)
    more.start()
    more.world.run(lambda: bool(more.rounds()[SHORT:]))
    assert not read_status(more.config.folder)["done"]
    lines = (more.config.folder / "metrics.jsonl").read_text().splitlines()
    assert not replay_events(lines).facts["done"]
    more.complete()
    assert without_plan(more.outcome()) == without_plan(long_run)
    events = [json.loads(line)["event"] for line in (more.config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [events.count(kind) for kind in ("bundle", "run-done", "done")] == [2, 2, 2]
    assert read_status(more.config.folder)["done"]
    assert read_status(more.config.folder)["runs"][0]["of"] == LONG


def test_the_centers_of_a_run_that_goes_on_are_offered_when_they_can_be_fetched_again(tmp_path: Path) -> None:
    """The broker kept their catalog, and a new device was told `unreachable` (`not_yours`) until the new one came."""
    first = federation(tmp_path, rounds=SHORT).play()
    more = federation(tmp_path)
    more.world.broker = first.world.broker
    assert TOPICS.catalog() in more.world.broker.retained
    more.start()
    more.world.run(lambda: more.live is not None)
    assert TOPICS.catalog() not in more.world.broker.retained
    more.complete()
    assert TOPICS.catalog() in more.world.broker.retained


@pytest.mark.parametrize(("begun", "wanted"), [(LONG + 2, LONG), (SHORT, LONG)])
def test_a_run_under_way_gets_more_rounds_or_fewer(tmp_path: Path, long_run: Outcome, begun: int, wanted: int) -> None:
    killed_in_round(federation(tmp_path, rounds=begun), 1)
    assert without_plan(federation(tmp_path, rounds=wanted).play().outcome()) == without_plan(long_run)


@pytest.mark.parametrize(
    ("begun", "wanted", "more", "words"),
    [
        (2, 4, {}, "was 2 and cannot become 4: its last round, 2, is under way; let it end first\n"),
        (4, 2, {}, "was 4 and cannot become 2: it has come to round 2\n"),
        (4, 1, {}, "was 4 and cannot become 1: it has come to round 1\n"),
    ],
)
def test_a_number_that_would_change_a_round_that_was_begun_is_refused(
    tmp_path: Path, begun: int, wanted: int, more: dict[str, Any], words: str
) -> None:
    killed_in_round(federation(tmp_path, rounds=begun, **more), 2)
    other = federation(tmp_path, rounds=wanted, **more)
    other.start_coordinator()
    with pytest.raises(Exception, match=f"num-rounds of run fesem {words}"):
        other.world.run(lambda: False)
    other.world.end()


def test_devices_that_measured_the_centers_are_asked_for_no_further_rounds(tmp_path: Path) -> None:
    """Their measurement has the place of the next round: a device would say it again as the answer to its task."""
    federation(tmp_path, rounds=SHORT, teach_newcomers=True).play()
    other = federation(tmp_path, teach_newcomers=True)
    other.start_coordinator()
    with pytest.raises(Exception, match=r"its devices have measured the centers for newcomers \(teach-newcomers\)"):
        other.world.run(lambda: False)
    other.world.end()


def test_two_devices_are_not_asked_for_a_guide_that_takes_three(tmp_path: Path) -> None:
    """They told their inputs and answers for nothing, and could train no further rounds."""
    federation(tmp_path, devices=2, rounds=SHORT, teach_newcomers=True).play()
    assert len(federation(tmp_path, devices=2, teach_newcomers=True).play().rounds()) == LONG


def test_another_setting_is_named_by_its_run_and_key(tmp_path: Path) -> None:
    fed = killed_in_round(federation(tmp_path), 1)
    (run,) = fed.config.runs
    other = federation(tmp_path, runs=(replace(run, rounds=SHORT, settings={**run.settings, "clusters": 3}),))
    other.start_coordinator()
    with pytest.raises(Exception, match=r"other settings: runs\.fesem\.clusters = 2, now 3\n"):
        other.world.run(lambda: False)
    other.world.end()


def test_another_name_of_a_run_is_told_without_the_number_of_rounds_which_may_change(tmp_path: Path) -> None:
    fed = killed_in_round(federation(tmp_path), 1)
    (run,) = fed.config.runs
    other = federation(tmp_path, runs=(replace(run, name="mine"),))
    other.start_coordinator()
    with pytest.raises(Exception, match=r"order of the runs = \['fesem'\], now \['mine'\]\n") as refused:
        other.world.run(lambda: False)
    assert "num-rounds" not in str(refused.value)
    other.world.end()
