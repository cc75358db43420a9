"""The masked sum: exact under every pattern of dropouts that it can bear, and closed under every other one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds.secure_recovery import Secrets, missing_shares
from coordinator.rounds.secure_sum import SumFailed, ask_shares, recover, relay
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.secure.device_sums import on_roster, on_unmask
from edge_client.protocol.secure.sum_messages import DealtShares, RevealedShares, SumForm, UnmaskRequest
from tests.support.secure_cohort import SecureCohort, cids


def can_finish(cohort: SecureCohort, *silent: set[str]) -> bool:
    """Whether a sum exists, from the graph and the numbers alone."""
    graph, t = cohort.server.graph, cohort.server.parameters.threshold
    active = set(graph) - silent[0]
    while alone := {c for c in active if len(active & set(graph[c])) < t}:
        active -= alone
    survivors = active - silent[1]
    answers = survivors - silent[2]
    needed = survivors | {c for c in active - survivors if survivors & set(graph[c])}
    least = cohort.server.least_members
    return len(active) >= least and len(survivors) >= least and all(len(answers & set(graph[c])) >= t for c in needed)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_pattern_of_dropouts_gives_the_exact_sum_of_the_survivors_or_none(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([5, 6, 9, 18, 24]))
    bits = data.draw(st.integers(16, 32))
    cohort = SecureCohort.of(count, SumForm(federation="demo", run="r1", round=0, exchange=0, words=3, bits=bits))
    silent = [set(data.draw(st.lists(st.sampled_from(cids(count)), max_size=count // 2))) for _ in range(3)]
    cohort.run(*silent)
    assert isinstance(cohort.outcome, Secrets) == can_finish(cohort, *silent)
    if isinstance(cohort.outcome, Secrets):
        assert cohort.server.uploaded.isdisjoint(silent[0] | silent[1])
        assert cohort.sum().tolist() == cohort.plain_sum().tolist()


def test_thirty_percent_may_drop_out_at_every_stage() -> None:
    for stage in range(3):
        cohort = SecureCohort.of(50)
        silent: list[list[str]] = [[], [], []]
        silent[stage] = cids(50)[::3][:15]
        cohort.run(*silent)
        assert cohort.sum().tolist() == cohort.plain_sum().tolist()


def test_the_same_answers_send_the_same_messages() -> None:
    first, again = SecureCohort.of(7), SecureCohort.of(7)
    for cohort in (first, again):
        cohort.run(["dev-003"], ["dev-001"])
    assert (first.sent, first.server) == (again.sent, again.server)


@pytest.mark.parametrize("silent", [1, 2])
def test_shares_of_five_devices_go_on_and_those_of_fewer_close_the_sum(silent: int) -> None:
    cohort = SecureCohort.of(6)
    cohort.deal(cids(6)[:silent])
    assert ("relay" in cohort.sent) == (silent == 1)
    if silent == 2:
        assert isinstance(cohort.outcome, SumFailed)
        assert cohort.outcome.message == "4 devices sent shares that others hold; at least 5 must"


def test_too_few_uploads_close_the_sum_and_nothing_is_asked() -> None:
    cohort = SecureCohort.of(6)
    cohort.run((), cids(6)[:2])
    assert isinstance(cohort.outcome, SumFailed)
    assert "4 devices uploaded; at least 5 must" in cohort.outcome.message
    assert "unmask" not in cohort.sent


@pytest.mark.parametrize(("least", "gone", "needed"), [(8, 2, 8), (1, 5, 5)])
def test_a_sum_needs_as_many_uploads_as_were_asked_for_and_five_at_least(least: int, gone: int, needed: int) -> None:
    cohort = SecureCohort.of(9, least_members=least)
    cohort.run((), cids(9)[:gone])
    assert isinstance(cohort.outcome, SumFailed)
    assert f"{9 - gone} devices uploaded; at least {needed} must" in cohort.outcome.message


def test_too_few_answers_name_whose_secrets_are_missing() -> None:
    cohort = SecureCohort.of(6)
    cohort.run((), (), cids(6)[:4])
    assert isinstance(cohort.outcome, SumFailed)
    assert "too few shares of the secrets of dev-000" in cohort.outcome.message


def test_shares_are_missing_of_survivors_and_of_the_dropped_beside_one_and_of_no_others() -> None:
    graph = {"a": ("b", "c"), "b": ("a", "d"), "c": ("a", "d"), "d": ("b", "c"), "e": ("f",), "f": ("e",)}
    dropped = {"d", "e", "f"}  # d is beside survivors, e and f only beside each other

    def missing(*answered: str) -> set[str]:
        told = missing_shares(graph, survivors={"a", "b", "c"}, dropped=dropped, answered=set(answered), threshold=2)
        return set(told)

    assert missing() == {"a", "b", "c", "d"}
    assert missing("a", "b", "d") == {"a", "d"}  # of their neighbours b and c only one answered
    assert missing("a", "b", "c", "d") == set()


def test_a_roster_of_fewer_than_least_members_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="hint: wait for 8 devices"):
        SecureCohort.of(7, least_members=8)
    with pytest.raises(ConfigError, match="at least 5"):
        SecureCohort.of(4, least_members=1)


def test_shares_for_another_set_of_neighbours_are_refused_and_may_be_sent_right() -> None:
    cohort, other = SecureCohort.of(6), SecureCohort.of(7)
    wrong = other.on_device("dev-000", on_roster, other.sent["roster"]["dev-000"])
    with pytest.raises(Malformed, match="bad_task"):
        relay(cohort.server, {"dev-000": wrong})
    cohort.run()
    assert cohort.sum().tolist() == cohort.plain_sum().tolist()


@pytest.mark.parametrize("wrong", ["roster", "envelopes"])
def test_shares_with_one_of_the_rosters_name_and_its_neighbours_wrong_are_refused(wrong: str) -> None:
    cohort = SecureCohort.of(6)
    right = DealtShares.from_bytes(cohort.on_device("dev-000", on_roster, cohort.sent["roster"]["dev-000"]))
    fewer = dict(list(right.envelopes.items())[1:])
    other = replace(right, roster="cd" * 32) if wrong == "roster" else replace(right, envelopes=fewer)
    with pytest.raises(Malformed, match="bad_task"):
        relay(cohort.server, {"dev-000": other.to_bytes()})


def test_answers_of_a_device_that_was_not_asked_are_ignored() -> None:
    cohort = SecureCohort.of(9)
    cohort.deal(["dev-008"])
    cohort.upload(["dev-000"])
    assert ask_shares(cohort.server, [*cohort.uploads, "dev-008"]) == (cohort.server, cohort.sent["unmask"])
    cohort.reveal(changed={"dev-000": b"anything"})
    assert cohort.sum().tolist() == cohort.plain_sum().tolist()


@pytest.mark.parametrize("claim", ["survivor is gone", "gone one survived"])
def test_a_true_share_that_was_not_asked_for_counts_as_a_wrong_one(claim: str) -> None:
    """Both shares of one device would tell its vector."""
    cohort = SecureCohort.of(9)
    cohort.deal()
    cohort.upload(["dev-008"])
    answers, other = "dev-000", "dev-001"
    asked = UnmaskRequest.from_bytes(cohort.sent["unmask"][answers])
    assert (other in asked.survivors, asked.dropped) == (True, ("dev-008",))
    if claim == "survivor is gone":
        asked = replace(asked, survivors=tuple(c for c in asked.survivors if c != other), dropped=(other, "dev-008"))
    else:
        asked = replace(asked, survivors=(*asked.survivors, "dev-008"), dropped=())
    with pytest.raises(SumFailed, match=f"wrong shares came from {answers}"):
        recover(cohort.server, {answers: cohort.on_device(answers, on_unmask, asked.to_bytes())})


def test_a_share_of_another_sum_is_a_wrong_one() -> None:
    cohort, other = SecureCohort.of(6), SecureCohort.of(6, salt="other")
    for each in (cohort, other):
        each.deal()
        each.upload()
    honest, liar, *gone = cids(6)
    lie = RevealedShares.from_bytes(other.on_device(liar, on_unmask, other.sent["unmask"][liar]))
    cohort.reveal(gone, {liar: replace(lie, roster=cohort.server.roster).to_bytes()})
    assert isinstance(cohort.outcome, SumFailed)
    assert cohort.outcome.message.endswith(f"wrong shares came from {liar}")
    assert honest in cohort.shown


@pytest.mark.parametrize(
    ("devices", "named"), [(5, "dev-003, dev-004"), (6, "dev-004 and 1 more"), (7, "dev-004 and 2 more")]
)
def test_a_reason_names_five_devices_at_most(devices: int, named: str) -> None:
    cohort = SecureCohort.of(devices)
    cohort.run((), (), cids(devices))
    assert isinstance(cohort.outcome, SumFailed)
    assert cohort.outcome.message.startswith(
        "too few shares of the secrets of dev-000, dev-001, dev-002, dev-003, dev-004"
    )
    assert cohort.outcome.message.endswith(named)


def test_a_device_whose_neighbours_are_too_few_is_left_out_and_so_are_those_that_lack_it_then() -> None:
    cohort = SecureCohort.of(40)
    graph, threshold = cohort.server.graph, cohort.server.parameters.threshold
    lonely = min(graph)
    near = list(graph[lonely])
    silent = near[: len(near) - threshold + 1]  # one neighbour fewer than it needs
    cohort.deal(silent)
    assert lonely not in cohort.server.active
    assert all(len(cohort.server.active & set(graph[cid])) >= threshold for cid in cohort.server.active)
    exact = SecureCohort.of(40)
    exact.deal(silent[1:])
    assert lonely in exact.server.active
