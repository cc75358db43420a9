"""What a device takes from a coordinator in a masked sum, to the last neighbour, word and byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edge_client.errors import Malformed
from edge_client.protocol.secure.device_sums import (
    DeviceSums,
    on_end,
    on_relay,
    on_roster,
    on_unmask,
    on_vector,
    refill,
)
from edge_client.protocol.secure.sum_messages import (
    MAX_PREKEYS,
    PrekeyBatch,
    RelayedShares,
    RevealedShares,
    SumRoster,
    UnmaskRequest,
)
from tests.support.secure_cohort import FORM, SecureCohort, cids, root_of, vector_of

ME, OTHER = "dev-000", "dev-001"
EMPTY = DeviceSums(federation="demo", cid=ME)


def relayed(cohort: SecureCohort, count: int) -> bytes:
    """The relay to ME with so many of its envelopes."""
    whole = RelayedShares.from_bytes(cohort.sent["relay"][ME])
    return replace(whole, envelopes=dict(list(whole.envelopes.items())[:count])).to_bytes()


@pytest.fixture
def cohort() -> SecureCohort:
    """Nine devices that have dealt their shares: eight neighbours each, of whom five recover a secret."""
    made = SecureCohort.of(9)
    made.deal()
    assert (made.server.parameters.neighbours, made.server.parameters.threshold) == (8, 5)
    return made


def test_a_refill_takes_as_many_roots_as_are_missing_and_looks_at_no_others() -> None:
    fresh = tuple(root_of(ME, number) for number in range(3))
    state, offered = refill(EMPTY, fresh)
    assert [key.number for key in PrekeyBatch.from_bytes(offered).keys] == [0, 1, 2]
    more = tuple(root_of(ME, number) for number in range(20, 33))
    state, _ = refill(state, (*more, b"one that is not needed"))
    assert (len(state.roots), state.next_number) == (MAX_PREKEYS, 16)
    same, again = refill(state, (b"none is needed",))
    assert same == state
    assert len(PrekeyBatch.from_bytes(again).keys) == MAX_PREKEYS


@pytest.mark.parametrize(
    "roots", [(bytes(31),), (bytes(33),), (bytes(32), bytes(32)), (root_of(ME, 0), root_of(ME, 1), root_of(ME, 0))]
)
def test_roots_that_are_short_or_not_random_are_refused(roots: tuple[bytes, ...]) -> None:
    with pytest.raises(Malformed, match=r"^bad_field: .*32 random bytes"):
        refill(EMPTY, roots)


def test_a_roster_for_another_device_or_with_a_prekey_that_was_never_offered_is_refused() -> None:
    cohort = SecureCohort.of(6)
    roster = cohort.sent["roster"][ME]
    with pytest.raises(Malformed, match=rf"^bad_task: a roster for {ME}"):
        on_roster(cohort.devices[OTHER], roster)
    with pytest.raises(Malformed, match=r"^bad_task: .*never offered"):
        cohort.on_device(ME, on_roster, replace(SumRoster.from_bytes(roster), number=99).to_bytes())
    cohort.on_device(ME, on_roster, roster)
    assert sorted(cohort.devices[ME].roots) == [1]  # the other prekey stays


@pytest.mark.parametrize("count", [6, 17, 40])
def test_the_threshold_of_the_rule_is_taken_and_none_beside(count: int) -> None:
    rule = SecureCohort.of(count).server.parameters.threshold
    for threshold in (rule - 1, rule, rule + 1):
        cohort = SecureCohort.of(count)
        roster = replace(SumRoster.from_bytes(cohort.sent["roster"][ME]), threshold=threshold)
        if threshold == rule:
            assert cohort.on_device(ME, on_roster, roster.to_bytes())
        else:
            with pytest.raises(Malformed, match=r"^bad_task: .*is not secret"):
                cohort.on_device(ME, on_roster, roster.to_bytes())


@pytest.mark.parametrize("count", [4, 5])
def test_as_many_neighbours_as_the_threshold_have_to_take_part(cohort: SecureCohort, count: int) -> None:
    if count == 5:
        cohort.on_device(ME, on_relay, relayed(cohort, count))
        shares = cohort.devices[ME].sums[cohort.server.roster].shares
        assert shares is not None
        assert [len(both) for both in shares.values()] == [64] * count
    else:
        with pytest.raises(Malformed, match=r"^bad_task: 4 neighbours take part, at least 5 are needed"):
            cohort.on_device(ME, on_relay, relayed(cohort, count))


def test_shares_of_a_device_that_is_no_neighbour_are_refused_though_others_would_do(cohort: SecureCohort) -> None:
    whole = RelayedShares.from_bytes(cohort.sent["relay"][ME])
    strange = replace(whole, envelopes={**whole.envelopes, "stranger": next(iter(whole.envelopes.values()))})
    with pytest.raises(Malformed, match=r"^bad_task: .*no neighbour"):
        cohort.on_device(ME, on_relay, strange.to_bytes())


@pytest.mark.parametrize(
    "words",
    [np.zeros(FORM.words + 1, np.uint32), np.zeros(FORM.words, np.int32), np.zeros((FORM.words, 1), np.uint32)],
)
def test_a_vector_of_another_form_than_the_rosters_is_not_masked(cohort: SecureCohort, words: np.ndarray) -> None:
    cohort.on_device(ME, on_relay, cohort.sent["relay"][ME])
    with pytest.raises(Malformed, match=r"^bad_field: .*for 5 words of uint32"):
        cohort.on_device(ME, on_vector, cohort.server.roster, words)
    mine = vector_of(ME)
    kept = mine.copy()
    cohort.on_device(ME, on_vector, cohort.server.roster, mine)
    np.testing.assert_array_equal(mine, kept)


def test_a_step_before_its_time_or_other_than_before_is_refused_as_a_bad_task(cohort: SecureCohort) -> None:
    asked = UnmaskRequest(roster=cohort.server.roster, survivors=tuple(cids(9)[1:]), dropped=()).to_bytes()
    vector = cohort.server.roster, vector_of(ME)
    with pytest.raises(Malformed, match=r"^bad_task: no shares have come yet"):
        cohort.on_device(ME, on_vector, *vector)
    for relayed_before in (False, True):
        if relayed_before:
            cohort.on_device(ME, on_relay, cohort.sent["relay"][ME])
        with pytest.raises(Malformed, match=r"^bad_task: asked for shares before the upload"):
            cohort.on_device(ME, on_unmask, asked)
    with pytest.raises(Malformed, match=r"^bad_task: other shares than before"):
        cohort.on_device(ME, on_relay, relayed(cohort, 5))
    upload = cohort.on_device(ME, on_vector, *vector)
    assert cohort.on_device(ME, on_vector, *vector) == upload
    with pytest.raises(Malformed, match=r"^bad_task: another vector"):
        cohort.on_device(ME, on_vector, cohort.server.roster, vector_of(OTHER))
    shown = cohort.on_device(ME, on_unmask, asked)
    assert cohort.on_device(ME, on_unmask, asked) == shown
    other = UnmaskRequest(roster=cohort.server.roster, survivors=tuple(cids(9)[1:8]), dropped=("dev-008",))
    with pytest.raises(Malformed, match=r"^bad_task: other shares were shown before"):
        cohort.on_device(ME, on_unmask, other.to_bytes())
    fewer = replace(other, dropped=())
    with pytest.raises(Malformed, match=r"^bad_task: survivors and dropped"):
        cohort.on_device(ME, on_unmask, fewer.to_bytes())


@pytest.mark.parametrize("survivors", [4, 5])
def test_shares_are_shown_where_as_many_neighbours_survive_as_the_threshold(
    cohort: SecureCohort, survivors: int
) -> None:
    cohort.upload()
    near = [cid for cid in cids(9) if cid != ME]
    asked = UnmaskRequest(
        roster=cohort.server.roster, survivors=tuple(near[:survivors]), dropped=tuple(near[survivors:])
    )
    if survivors == 4:
        with pytest.raises(Malformed, match=r"^bad_task: 4 neighbours survive, at least 5 must"):
            cohort.on_device(ME, on_unmask, asked.to_bytes())
        return
    shown = RevealedShares.from_bytes(cohort.on_device(ME, on_unmask, asked.to_bytes()))
    assert (list(shown.self_shares), list(shown.mask_shares)) == (near[:5], near[5:])
    held = cohort.devices[ME].sums[cohort.server.roster].shares
    assert held is not None
    assert shown.self_shares[near[0]] == held[near[0]][32:]
    assert shown.mask_shares[near[5]] == held[near[5]][:32]


def test_the_end_of_a_sum_deletes_its_keys_and_those_of_no_other(cohort: SecureCohort) -> None:
    state = cohort.devices[ME]
    two = replace(state, sums={**state.sums, "ab" * 32: state.sums[cohort.server.roster]})
    left = on_end(two, cohort.server.roster)
    assert list(left.sums) == ["ab" * 32]
    asked = UnmaskRequest(roster=cohort.server.roster, survivors=(OTHER,), dropped=()).to_bytes()
    with pytest.raises(Malformed, match=r"^bad_task: no sum"):
        on_vector(left, cohort.server.roster, vector_of(ME))
    with pytest.raises(Malformed, match=r"^bad_task: no sum"):
        on_relay(left, cohort.sent["relay"][ME])
    with pytest.raises(Malformed, match=r"^bad_task: no sum"):
        on_unmask(left, asked)
