"""What is kept of a run that waits for no device: the machine between two events, and the counts of a round."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings

from coordinator.rounds.asynchronous.counts import RoundCounts
from coordinator.rounds.asynchronous.snapshot import PREFIX, Snapshot, pack, unpack
from coordinator.rounds.asynchronous.training import Training, hand_out
from tests.coordinator.rounds.asynchronous.test_training import METHOD, MOMENTS, Moment, a_start, first, play, rules


def assert_same(found: Training, wanted: Training) -> None:
    assert (found.versions, found.handed, found.given, dict(found.scales)) == (
        wanted.versions,
        wanted.handed,
        wanted.given,
        dict(wanted.scales),
    )
    assert list(found.recent.items()) == list(wanted.recent.items())
    np.testing.assert_array_equal(found.state.centers, wanted.state.centers)
    assert found.state.assignment == wanted.state.assignment
    assert found.state.extra.keys() == wanted.state.extra.keys()
    assert found.at_work.keys() == wanted.at_work.keys()
    for mine, theirs in [
        *((found.at_work[who], wanted.at_work[who]) for who in wanted.at_work),
        *((a[who], b[who]) for a, b in zip(found.buffers, wanted.buffers, strict=True) for who in b),
    ]:
        for field in fields(mine):  # type: ignore[arg-type]  # both are dataclasses
            np.testing.assert_equal(getattr(mine, field.name), getattr(theirs, field.name))
    assert [some.keys() for some in found.buffers] == [some.keys() for some in wanted.buffers]


@settings(max_examples=20, deadline=None)
@given(moments=MOMENTS, method=METHOD)
def test_the_machine_is_read_back_as_it_was_after_any_event(moments: list[Moment], method: str) -> None:
    for training in play(rules(method), moments, a_start(method)):
        rounds = {who: 3 + i for i, who in enumerate(training.at_work)}
        packed = pack(Snapshot(training, rounds, 2))
        read = unpack(packed)
        assert read is not None
        assert_same(read.training, training)
        assert (read.rounds, read.test) == (rounds, 2)
        assert {name for name in packed.extra if not name.startswith(PREFIX)} == set(training.state.extra)


def test_a_model_at_which_devices_began_is_stored_once_for_each_version_and_the_common_start_not_again() -> None:
    by, training = rules("fesem"), first(2, {"d0": 0, "d1": 0, "d2": 1})
    training, _, _ = hand_out(training, by, 1, lambda who: who in ("d0", "d1", "d2", "d3"))
    assert training.at_work["d3"].center is None
    packed = pack(Snapshot(training, dict.fromkeys(training.at_work, 1)))
    starts = sorted(name for name in packed.extra if name.startswith(f"{PREFIX}start"))
    assert starts == [f"{PREFIX}start-0-0", f"{PREFIX}start-1-0"]


def test_a_state_of_rounds_that_wait_is_no_machine_and_an_old_one_has_no_open_test() -> None:
    training = a_start("fedavg")
    assert unpack(training.state) is None
    packed = pack(Snapshot(training))
    facts = packed.extra[PREFIX + "facts"].tobytes()
    old = np.frombuffer(facts.replace(b'"test": 0, ', b""), dtype=np.uint8)
    assert len(old) < len(facts)
    read = unpack(replace(packed, extra={**packed.extra, PREFIX + "facts": old}))
    assert read is not None
    assert read.test == 0


@pytest.mark.parametrize(("staleness", "mean", "most"), [([], None, 0), ([0], 0.0, 0), ([1, 4, 1], 2.0, 4)])
def test_a_record_tells_the_mean_and_the_greatest_staleness_of_what_counted(
    staleness: list[int], mean: float | None, most: int
) -> None:
    assert RoundCounts(staleness=staleness, stale=2, expired=1).record((3, 1)) == {
        "versions": [3, 1],
        "counted": len(staleness),
        "stale": 2,
        "expired": 1,
        "staleness": {"mean": mean, "most": most},
    }


def test_a_round_of_which_nothing_is_known_has_counted_nothing() -> None:
    record = RoundCounts().record(())
    assert (record["counted"], record["stale"], record["expired"]) == (0, 0, 0)
