"""`secure`: the same training on sums of devices, nothing but sums for the server, and refusals with a hint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.privacy_accounting import privacy_spent
from coordinator.rounds.round import round_rng
from coordinator.rounds.sealed_round import sealed_round, too_few_asked, what_is_seen
from coordinator.strategies.base import Exchange, PartOfCohort, Replies, SealedSums, State, drive, learned
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.loss_starts import COUNTS_KEY
from coordinator.strategies.registry import METHODS, Setting, make_method
from edge_client.data.dataset import DeviceData
from edge_client.errors import ConfigError
from edge_client.protocol.summed_task import SummedFit
from edge_client.protocol.task import ClientId, Reply, Task
from edge_client.training.summed import CHOICE_SLOT
from tests.support.methods import MethodWorld, build, world
from tests.support.softmax_program import grouped_fleet, start_of

LOCAL = grouped_fleet(12, 2)
MODES = ("updates", "updates+membership")
SUMMED = ("fedavg", "fedprox", "feddist", "feddws", "ditto", "pfedme", "fesem", "wecfl", "ifca", "hypcluster")
WEIGHTED = ("wecfl", "hypcluster")  # their weights would tell the devices of a center
SOFT_ONES = ("fedsoft", "fedem")
CLEAR: Mapping[str, Setting] = {"local-steps": 5, "learning-rate": 0.1, "batch-size": 1000}
SMALL: Mapping[str, Setting] = {**CLEAR, "secure-clip": 10.0, "secure-start": "k-means"}  # fesem begins as in the clear


def trained(case: str, secure: str, rounds: int = 3, **more: Setting) -> MethodWorld:
    """After some rounds; a batch holds all samples, so that seeds decide nothing but the starts."""
    settings = {**(CLEAR if secure == "off" else SMALL), "e-step": "nearest", "secure": secure, **more}
    made = world(build(case, settings), LOCAL)
    for _ in range(rounds):
        made.round()
    return made


class Watched:
    """A driver that keeps what the server is sent; devices in `silent` drop out of the exchanges of that stage."""

    def __init__(self, made: MethodWorld, silent: Mapping[str, set[ClientId]] | None = None) -> None:
        self.made, self.silent = made, silent or {}
        self.seen: list[Replies] = []
        self.asked: list[Exchange] = []

    def ask(self, exchange: Exchange) -> Replies:
        self.asked.append(exchange)
        found: dict[ClientId, Reply] = {}
        for who, task in exchange.items():
            stage = task.stage if isinstance(task, SummedFit) else ""
            if who not in self.silent.get(stage, set()):
                found[who] = self.made.devices.answer(who, task)
        replies = learned(exchange, found)
        self.seen.append(replies)
        return replies


def one_round(made: MethodWorld, watch: Watched) -> State:
    strategy = made.strategy
    assert isinstance(strategy, LocalSgd)
    program = made.devices.program
    return drive(sealed_round(strategy, made.state, program.schema, made.devices.fleet, round_rng(0, 1)), watch.ask)


@pytest.mark.parametrize(
    ("case", "secure"),
    [
        (case, secure)
        for case in (*SUMMED, *SOFT_ONES, "fedprox optimiser=adam")
        for secure in MODES
        if case not in WEIGHTED or secure == "updates"
    ],
)
def test_a_run_on_sums_ends_with_the_centers_of_a_run_in_the_clear(case: str, secure: str) -> None:
    clear, sealed = trained(case, "off"), trained(case, secure)
    order = range(len(clear.state.centers))
    if case in ("fesem", "wecfl"):  # the first clusters may have other numbers
        d2 = ((clear.state.centers[:, None] - sealed.state.centers[None]) ** 2).sum(axis=2)
        order = d2.argmin(axis=1).tolist()
    # Words of 32 bits for 12 devices have 1.8e8 levels; five steps magnify their rounding less than tenfold.
    np.testing.assert_allclose(sealed.state.centers[list(order)], clear.state.centers, atol=1e-5)


@pytest.mark.parametrize(("case", "rounds"), [("fesem", 4), ("hypcluster", 1)])  # by distance from the fourth on
def test_a_run_in_the_clear_that_starts_by_loss_makes_the_choices_of_one_on_sums(case: str, rounds: int) -> None:
    """More random groups than centers, of which some are closed, and the merge."""
    ways: list[dict[str, Setting]] = [{"start": "loss"}, {"secure": "updates", "secure-clip": 10.0}]
    clear, sealed = (
        world(build(case, {**CLEAR, "clusters": 4, **own}), grouped_fleet(48, 4), rounds=rounds) for own in ways
    )
    assert clear.state.assignment == sealed.state.assignment
    assert len(set(clear.state.assignment.values())) == 4
    np.testing.assert_allclose(sealed.state.centers, clear.state.centers, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in (*SUMMED, *SOFT_ONES) if case not in WEIGHTED])
def test_the_server_is_sent_sums_of_at_least_five_devices_only(case: str) -> None:
    made = trained(case, "updates+membership", rounds=0)
    watch = Watched(made)
    one_round(made, watch)
    assert watch.seen
    for replies in watch.seen:
        assert isinstance(replies, SealedSums)
        assert not dict(replies)
        assert all(len(who) >= 5 for who in replies.members.values())


def test_with_membership_told_a_device_tells_its_center_and_nothing_else() -> None:
    made = trained("ifca", "updates", rounds=0)
    watch = Watched(made)
    state = one_round(made, watch)
    told = [reply for replies in watch.seen for reply in replies.values()]
    assert len(told) == len(LOCAL)
    for reply in told:
        assert reply == Reply(n=1, words=reply.words)
        assert reply.words is not None
        assert sorted(reply.words.tolist()) == [0, 1]
    assert set(state.assignment) == set(LOCAL)


def test_hidden_membership_is_in_no_state() -> None:
    made = trained("ifca", "updates+membership")
    assert made.state.assignment == {}
    assert made.state.extra[COUNTS_KEY].tolist() == [6, 6]


@pytest.mark.parametrize("secure", MODES)
def test_a_center_of_too_few_devices_is_closed_and_they_take_their_next_choice(secure: str) -> None:
    local = {**grouped_fleet(8, 1), **{f"e{i}": data for i, data in enumerate(_written_otherwise(3))}}
    made = world(build("ifca", {**SMALL, "secure": secure, "start": "redraw"}), local)
    # Center 1 is the one of three devices: it serves their labels.
    rare = trained_alone(local, ["e0", "e1", "e2"])
    common = trained_alone(local, sorted(local)[:8])
    made.state = State(centers=np.stack([common, rare]), extra=made.state.extra)
    watch = Watched(made)
    state = one_round(made, watch)
    np.testing.assert_array_equal(state.centers[1], rare)
    parts = [(sorted(one), one.of) for one in watch.asked if isinstance(one, PartOfCohort)]
    assert parts == ([(["e0", "e1", "e2"], 11)] if secure == "updates" else [])
    assert state.extra[COUNTS_KEY].tolist() == [11, 0]
    assert not set(state.assignment.values()) - {0}


def test_where_a_center_could_lose_too_many_devices_no_sum_is_made() -> None:
    made = trained("ifca", "updates+membership", rounds=1)
    lost = Watched(made, {"add": {"d00", "d02"}})  # of six devices of a center, two
    assert one_round(made, lost) is made.state
    kept = Watched(made, {"add": {"d00"}})
    assert one_round(made, kept).extra[COUNTS_KEY].tolist() in ([5, 6], [6, 5])


@pytest.mark.parametrize("secure", MODES)
def test_a_device_that_drops_out_before_it_adds_is_not_in_the_mean(secure: str) -> None:
    made = trained("fedavg", secure, rounds=0)
    state = one_round(made, Watched(made, {"add": {"d03"}}))
    rest = world(build("fedavg", CLEAR), LOCAL)
    rest.round(silent={"d03"})
    np.testing.assert_allclose(state.centers, rest.state.centers, atol=1e-6)  # 1.8e8 levels


@pytest.mark.parametrize("secure", MODES)
@pytest.mark.parametrize(("case", "sums"), [("fedavg", 1), ("ifca", 2)])  # IFCA's random groups are a sum of their own
def test_the_noise_of_the_devices_is_in_the_centers_and_in_the_record(secure: str, case: str, sums: int) -> None:
    private = {"privacy-noise": 1.0, "privacy-clip": 10.0}
    plain, noisy = trained(case, secure, rounds=1), trained(case, secure, rounds=1, **private)
    spent = privacy_spent(noisy.strategy, noisy.state)
    assert spent is not None
    assert (spent["releases"], spent["given_assignments"]) == (sums, case == "ifca")
    assert privacy_spent(plain.strategy, plain.state) is None
    # Gaussian noise of multiplier 1 costs 4.4 for one sum at 1e-5; two of the devices of a sum may tell theirs.
    assert 4.4 < spent["epsilon"] < 12
    if case == "fedavg":  # the deviation of the sum is 10, over 12 devices
        moved = (noisy.state.centers - plain.state.centers).std()
        assert moved == pytest.approx(10 / 12, rel=5 / np.sqrt(2 * noisy.state.centers.size))


def test_a_private_run_without_a_sum_so_far_has_spent_nothing() -> None:
    """Its first round had too few devices, say."""
    made = trained("fedavg", "updates", rounds=0, **{"privacy-noise": 1.0})
    spent = privacy_spent(made.strategy, made.state)
    assert spent is not None
    assert (spent["releases"], spent["epsilon"]) == (0, 0.0)


def test_devices_that_drop_out_take_their_noise_with_them() -> None:
    spent = []
    for silent in ({"d03"}, {"d03", "d04", "d05"}):
        made = trained("fedavg", "updates", rounds=0, **{"privacy-noise": 1.0})
        after = one_round(made, Watched(made, {"add": silent}))
        record = privacy_spent(made.strategy, after)
        assert record is not None
        spent.append(record["epsilon"])
    assert spent[0] < spent[1]


@pytest.mark.parametrize("case", ["fedavg", "ifca"])  # IFCA's are of its random groups
def test_a_sum_that_was_seen_and_is_not_used_costs_epsilon(case: str) -> None:
    """Else a device could have sums taken without an end, by words that no device may add."""

    class Refusing(Watched):
        def ask(self, exchange: Exchange) -> Replies:
            found = super().ask(exchange)
            if not isinstance(found, SealedSums):
                return found
            return SealedSums.unmasked({group: (who, None) for group, who in found.members.items()})

    used, made = (trained(case, "updates", rounds=0, **{"privacy-noise": 1.0}) for _ in range(2))
    after = one_round(made, Refusing(made))
    np.testing.assert_array_equal(after.centers, made.state.centers)
    record, expected = privacy_spent(made.strategy, after), privacy_spent(made.strategy, one_round(used, Watched(used)))
    assert record is not None
    assert expected is not None
    assert record["releases"] == 1
    assert record["epsilon"] == expected["epsilon"] if case == "fedavg" else 0 < record["epsilon"] < expected["epsilon"]


def test_each_other_method_is_refused_by_name() -> None:
    for name in sorted(METHODS.keys() - {*SUMMED, *SOFT_ONES, "fedsgd", "tkm"}):
        why = "label-prior device with secure" if name == "fedrc" else f"secure with {METHODS[name].__name__}"
        with pytest.raises(ConfigError, match=why) as refused:
            make_method(name, secure="updates", reduce="mean")
        assert refused.value.hint


@pytest.mark.parametrize("case", SOFT_ONES)
def test_noise_is_refused_where_the_weights_of_a_device_are_summed_without_it(case: str) -> None:
    with pytest.raises(ConfigError, match="weights in the centers are summed without noise") as refused:
        make_method(case, secure="updates", **{"privacy-noise": 1.0})
    assert refused.value.hint


def _written_otherwise(count: int) -> list[DeviceData]:
    """The devices of the second group."""
    return [data for i, data in enumerate(grouped_fleet(2 * count, 2, seed=1).values()) if i % 2]


def trained_alone(local: Mapping[ClientId, DeviceData], who: list[ClientId]) -> Any:  # noqa: ANN401 - an array
    """A model that serves these devices."""
    made = world(build("fedavg", {**CLEAR, "local-steps": 40}), {c: local[c] for c in who})
    made.round()
    assert made.state.centers.shape[1] == len(start_of())
    return made.state.centers[0]


@pytest.mark.parametrize("start", ["loss", "k-means"])
@pytest.mark.parametrize("case", ["fesem", "wecfl", "ifca", "fedavg"])
def test_a_record_says_whether_the_first_k_means_tells_single_updates(case: str, start: str) -> None:
    seen = what_is_seen(build(case, {"e-step": "nearest", "secure": "updates", "secure-start": start}))
    assert seen is not None
    told = case in ("fesem", "wecfl") and start == "k-means"
    assert ("what the first k-means tells of some" in seen["sees"]) == told


@pytest.mark.parametrize("case", ["fesem", "ifca"])
@pytest.mark.parametrize("secure", MODES)
def test_a_fleet_too_small_for_a_group_of_each_center_begins_with_fewer_groups(case: str, secure: str) -> None:
    few = dict(list(LOCAL.items())[:7])
    made = world(build(case, {**SMALL, "secure": secure, "secure-start": "loss", "clusters": 2}), few)
    begin = made.state.centers.copy()
    made.round()
    assert (made.state.centers != begin).any()
    assert made.state.extra[COUNTS_KEY].sum() == len(few)


@pytest.mark.parametrize("case", ["fesem", "ifca"])
def test_a_first_round_that_too_few_devices_answer_changes_nothing(case: str) -> None:
    """Not the number of centers either: the start has more groups than the run has centers."""
    made = world(build(case, {**SMALL, "secure": "updates", "secure-start": "loss"}), grouped_fleet(30, 2))
    after = one_round(made, Watched(made, {"add": set(made.fleet)}))
    assert after.centers is made.state.centers
    assert after.extra is made.state.extra


def test_fesem_begins_with_random_groups_and_three_rounds_by_loss_and_goes_on_by_distance() -> None:
    made = world(build("fesem", {**SMALL, "secure": "updates", "secure-start": "loss"}), LOCAL)
    asked: list[str] = []
    answer = made.devices.answer

    def noted(who: ClientId, task: Task) -> Reply:
        if isinstance(task, SummedFit) and who == min(LOCAL) and task.stage == "add":
            asked.append(task.choose)
        return answer(who, task)

    made.devices.answer = noted  # type: ignore[method-assign]
    for _ in range(5):
        made.round()
    assert asked == ["given", "loss", "loss", "loss", "nearest", "nearest"]
    assert len({tuple(center) for center in made.state.centers}) == len(made.state.centers)


@pytest.mark.parametrize("secure", MODES)
def test_a_newcomer_of_fesem_chooses_by_loss_where_choices_are_told(secure: str) -> None:
    """From the common start its model would be younger than the centers that it is compared with."""
    made, asked = world(build("fesem", {**SMALL, "secure": secure}), LOCAL), dict[str, str]()
    answer, new = made.devices.answer, max(LOCAL)
    early = {who: n for who, n in made.fleet.items() if who != new}
    made.round(fleet=early)

    def noted(who: ClientId, task: Task) -> Reply:
        if isinstance(task, SummedFit):
            asked[who] = task.choose
        return answer(who, task)

    made.devices.answer = noted  # type: ignore[method-assign]
    made.round()
    hidden = secure == "updates+membership"
    assert asked == {**dict.fromkeys(early, "nearest"), new: "nearest" if hidden else "loss"}
    made.round()
    assert set(asked.values()) == {"nearest"}


@pytest.mark.parametrize("case", ["fesem", "ifca"])
@pytest.mark.parametrize("secure", MODES)
def test_a_fleet_with_more_random_groups_than_centers_begins_with_its_true_groups(case: str, secure: str) -> None:
    """Where each center has one random group, some true groups share a center, and others are closed."""
    local = grouped_fleet(48, 4)
    made = world(build(case, {**SMALL, "secure": secure, "secure-start": "loss", "clusters": 4}), local)
    made.round()
    chosen = [int(np.argmax(made.devices.own[who, CHOICE_SLOT])) for who in sorted(local)]
    assert sorted(made.state.extra[COUNTS_KEY]) == [12] * 4
    assert len(set(zip(chosen, [i % 4 for i in range(48)], strict=True))) == 4


def test_the_first_k_means_opens_each_cluster_of_five_devices_and_none_of_four() -> None:
    made = world(build("fesem", {**SMALL, "secure": "updates"}), grouped_fleet(10, 2))
    watch, counts = Watched(made), list[int]()
    one_round(made, watch)
    for counted, asked in zip(watch.seen, watch.asked[1:], strict=False):
        task = next(iter(asked.values()))
        if isinstance(counted, SealedSums) and isinstance(task, SummedFit) and task.stage == "points":
            assert task.points_open is not None
            assert (counted.sums[0] >= 5).tolist() == task.points_open.ravel().tolist()
            counts += counted.sums[0].tolist()
    assert {4, 5} <= {*counts}


@pytest.mark.parametrize(("devices", "way"), [(4, "add devices"), (5, "set fraction-train to 1 or more")])
def test_a_round_of_too_few_devices_is_told_with_what_makes_it_enough(devices: int, way: str) -> None:
    few = too_few_asked(build("fedavg", {"secure": "updates", "fraction-train": 0.5}), devices, tested=1.0)
    assert few is not None
    assert (few.hint or "").startswith(way)
