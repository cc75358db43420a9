"""CFL on devices that walk half of the way to a target of their own: exact, so that every split is known."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from coordinator.rounds.metrics import ari
from coordinator.storage import state_codec
from coordinator.strategies.base import Exchange, Replies, State, drive
from coordinator.strategies.common.center_tree import SplitTree
from coordinator.strategies.common.sampling import sample_cohort
from coordinator.strategies.similarity.cfl import CFL
from edge_client.protocol.task import Fit, Flat, Reply
from tests.support.softmax_program import grouped_fleet, play, schema

SIZE = schema().size
START = np.full(SIZE, 50.0)  # far from zero: only updates tell groups apart
# Two levels: far apart along the first axis, then nearer along the second. No group is a run of neighbours.
GROUP = {"d0": 0, "d1": 2, "d2": 1, "d3": 3, "d4": 2, "d5": 0, "d6": 3, "d7": 1}
METHOD = CFL(warm_up=0, eps_2=0.1)


def target(group: int) -> Flat:
    out = START.copy()
    out[:2] += 10.0 if group < 2 else -10.0, 3.0 if group % 2 else -3.0
    return out


def answer(exchange: Exchange, group: dict[str, int], silent: Collection[str] = ()) -> Replies:
    out = {}
    for c, task in exchange.items():
        assert isinstance(task, Fit)
        start = np.asarray(task.start)
        if c not in silent:
            out[c] = Reply(n=10, update=start + 0.5 * (target(group[c]) - start))
    return out


def one_round(state: State, group: dict[str, int], method: CFL = METHOD, silent: Collection[str] = ()) -> State:
    fleet = dict.fromkeys(group, 10)
    round_ = method.round(state, schema(), fleet, np.random.default_rng(0))
    return drive(round_, lambda exchange: answer(exchange, group, silent))


def grown(rounds: int = 12, method: CFL = METHOD, silent: Collection[str] = ()) -> State:
    state = method.begin(START, schema(), dict.fromkeys(GROUP, 10), np.random.default_rng(0))
    for _ in range(rounds):
        state = one_round(state, GROUP, method, silent)
    return state


def test_a_tree_of_two_levels_is_found_and_every_device_ends_with_its_own_group() -> None:
    first, last = grown(1), grown()
    assert {k: sorted(c for c in GROUP if first.assignment[c] == k) for k in (0, 1)} == {
        0: ["d0", "d2", "d5", "d7"],
        1: ["d1", "d3", "d4", "d6"],
    }
    assert len(last.centers) == 4
    assert ari([GROUP[c] for c in sorted(GROUP)], [last.assignment[c] for c in sorted(GROUP)]) == 1.0
    for c, k in last.assignment.items():
        np.testing.assert_allclose(last.centers[k], target(GROUP[c]), atol=0.1)


@pytest.mark.parametrize(
    ("method", "centers"), [(CFL(warm_up=1), 1), (CFL(warm_up=1, criterion="absolute", eps_1=1.0, eps_2=3.0), 2)]
)
def test_one_long_update_of_the_first_round_raises_the_relative_bound_alone(method: CFL, centers: int) -> None:
    """As docs/hostile-devices.md says. The honest updates are 5.2 long."""
    state = method.begin(START, schema(), dict.fromkeys(GROUP, 10), np.random.default_rng(0))

    def lie(exchange: Exchange) -> Replies:
        replies = answer(exchange, GROUP)
        honest = replies["d7"].update
        assert honest is not None
        return {**replies, "d7": replace(replies["d7"], update=START + 2 * (honest - START))}

    state = drive(method.round(state, schema(), dict.fromkeys(GROUP, 10), np.random.default_rng(0)), lie)
    for _ in range(10):
        state = one_round(state, GROUP, method)
    assert len(state.centers) == centers


def test_the_side_of_the_first_device_keeps_the_number_of_its_leaf() -> None:
    assert [grown(rounds).assignment["d0"] for rounds in (1, 5, 12)] == [0, 0, 0]


@pytest.mark.parametrize("linkage", ["single", "complete"])
@pytest.mark.parametrize("representation", ["classifier", "all", "delta", "projection"])
def test_either_linkage_and_every_representation_finds_the_groups(linkage: str, representation: str) -> None:
    last = grown(method=CFL(warm_up=0, eps_2=0.1, linkage=linkage, representation=representation))
    assert ari([GROUP[c] for c in sorted(GROUP)], [last.assignment[c] for c in sorted(GROUP)]) == 1.0


def test_a_new_device_walks_down_the_tree_before_it_trains_with_the_others() -> None:
    state, asked = grown(), list[Exchange]()
    group = {**GROUP, "new": 3}

    def ask(exchange: Exchange) -> Replies:
        asked.append(exchange)
        return answer(exchange, group)

    after = drive(METHOD.round(state, schema(), dict.fromkeys(group, 10), np.random.default_rng(0)), ask)
    assert [sorted(exchange) for exchange in asked] == [["new"], ["new"], sorted(group)]
    assert after.assignment["new"] == state.assignment["d3"]
    root = asked[0]["new"]
    assert isinstance(root, Fit)
    assert (np.asarray(root.start) == START).all()  # the model at which the first split was made


def test_a_new_device_that_falls_silent_on_the_way_has_no_center_yet() -> None:
    after = one_round(grown(), {**GROUP, "new": 3}, silent=["new"])
    assert "new" not in after.assignment
    assert np.asarray(METHOD.predictor(after, "new")[0][1]).shape == (SIZE,)


def test_leaves_with_other_numbers_lead_new_devices_to_the_same_models() -> None:
    state, order = grown(), np.array([2, 0, 3, 1])  # leaf k is now called order[k]
    edges = state.extra["tree/edges"].copy()
    leads_to_leaf = edges[:, 1] < 0
    edges[leads_to_leaf, 1] = ~order[~edges[leads_to_leaf, 1]]
    renamed = State(
        centers=state.centers[np.argsort(order)],
        assignment={c: int(order[k]) for c, k in state.assignment.items()},
        extra={**state.extra, "tree/edges": edges},
    )
    group = {**GROUP, "new": 1}
    one, other = one_round(state, group), one_round(renamed, group)
    assert {c: int(order[k]) for c, k in one.assignment.items()} == other.assignment
    np.testing.assert_array_equal(one.centers, other.centers[order])


def test_the_tree_survives_being_stored() -> None:
    state, group = grown(), {**GROUP, "new": 2}
    stored = state_codec.decode_state(state_codec.encode_state(state))
    one, other = one_round(state, group), one_round(stored, group)
    np.testing.assert_array_equal(one.centers, other.centers)
    assert one.assignment == other.assignment
    assert len(SplitTree.from_state(stored).models) == 3


def test_a_leaf_waits_for_all_its_devices_unless_fewer_are_said_to_be_enough() -> None:
    assert len(grown(6, silent=["d7"]).centers) > 1  # who never answered belongs to no leaf
    state = one_round(grown(3, CFL(warm_up=3, eps_2=0.1)), GROUP, CFL(warm_up=3, eps_2=0.1), silent=["d7"])
    assert len(state.centers) == 1
    few = CFL(warm_up=3, eps_2=0.1, coverage=0.7)
    state = one_round(grown(3, few), GROUP, few, silent=["d7"])
    assert len(state.centers) == 2
    assert "d7" not in state.assignment
    assert one_round(state, GROUP, few).assignment["d7"] == state.assignment["d2"]


def test_a_device_that_left_stops_no_split_after_three_rounds_and_walks_down_the_tree_when_it_is_back() -> None:
    method = CFL(warm_up=1, eps_2=0.1)
    state, leaves = grown(1, method), list[int]()
    for _ in range(3):
        state = state_codec.decode_state(state_codec.encode_state(one_round(state, GROUP, method, silent=["d7"])))
        leaves.append(len(state.centers))
    assert leaves == [1, 1, 2]
    assert "d7" not in state.assignment
    assert one_round(state, GROUP, method).assignment["d7"] == state.assignment["d2"]


def test_a_device_that_was_revoked_stops_no_split() -> None:
    """It is asked no more, and so it missed nothing: its leaf stayed whole for ever."""
    method, leaves = CFL(warm_up=1, eps_2=0.1), list[int]()
    state, others = grown(1, method), {c: group for c, group in GROUP.items() if c != "d7"}
    for _ in range(3):
        state = one_round(state, others, method)
        leaves.append(len(state.centers))
    assert leaves == [1, 1, 2]


def test_a_device_that_is_back_counts_again_and_one_that_is_not_asked_misses_nothing() -> None:
    method, part = CFL(warm_up=9, eps_2=0.1), CFL(warm_up=9, eps_2=0.1, fraction_train=7 / 8)
    (away,) = GROUP.keys() - sample_cohort(dict.fromkeys(GROUP, 10), 7 / 8, np.random.default_rng(0))
    state = grown(1, method)
    for silent in ([away], [away], [], [away]):
        state = one_round(state, GROUP, method, silent=silent)
    for _ in range(3):
        state = one_round(state, GROUP, part)  # cohorts without it
    assert len(one_round(state, GROUP, CFL(warm_up=0, eps_2=0.1), silent=[away]).centers) == 1  # its second miss
    assert not [name for name in one_round(state, GROUP, method).extra if name.startswith("missed")]


@pytest.mark.parametrize(
    "settings",
    [
        {"eps_1": 0.0},
        {"warm_up": 99},
        {"smallest": 9},
        {"gamma": 1.0},
        {"eps_2": 99.0},
        {"criterion": "absolute", "eps_1": 1.0, "eps_2": 99.0},
    ],
)
def test_each_bound_alone_prevents_every_split(settings: dict[str, float]) -> None:
    assert len(grown(method=CFL(**{"warm_up": 0, "eps_2": 0.1, **settings})).centers) == 1  # type: ignore[arg-type]


def test_absolute_bounds_are_the_papers() -> None:
    # In round 1 the mean update is 0 and the largest is half of |(10, 3)|, 5.22.
    assert len(grown(1, CFL(warm_up=0, criterion="absolute", eps_1=0.1, eps_2=5.2)).centers) == 2
    assert len(grown(1, CFL(warm_up=0, criterion="absolute", eps_1=0.1, eps_2=5.3)).centers) == 1


def test_groups_of_a_real_fleet_are_found_with_the_defaults() -> None:
    local = grouped_fleet(9, 3)
    state = play(CFL(local_steps=10, batch_size=8), local, rounds=8)
    assert ari([i % 3 for i in range(9)], [state.assignment[c] for c in sorted(local)]) == 1.0


def test_a_fleet_without_groups_is_not_split() -> None:
    assert len(play(CFL(local_steps=10, batch_size=8), grouped_fleet(9, 1), rounds=8).centers) == 1


@pytest.mark.parametrize(("answered", "leaves"), [(13, 1), (14, 2)])
def test_a_share_of_the_devices_is_enough_when_as_many_answer_as_it_says(answered: int, leaves: int) -> None:
    group = {f"d{i:02d}": 2 * (i % 2) for i in range(25)}
    method = CFL(warm_up=1, eps_2=0.1, coverage=0.56)  # 0.56 of 25 are 14, and their product is 14 + 2e-15
    state = method.begin(START, schema(), dict.fromkeys(group, 10), np.random.default_rng(0))
    state = one_round(state, group, method)
    assert len(one_round(state, group, method, silent=sorted(group)[answered:]).centers) == leaves
