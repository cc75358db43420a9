"""Centers are corrected from the labels that they were trained on to those of the device that evaluates them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.rounds.label_counting import count_labels
from coordinator.rounds.round import serving_probe
from coordinator.strategies.base import Exchange, Replies, RepliesWithLate, Round, State, drive
from coordinator.strategies.common.label_totals import COUNTS_KEY, TOTALS_KEY, center_totals, label_counts
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.registry import METHODS, Setting, make_method, method_settings
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import ConfigError
from edge_client.protocol.task import ClientId, OwnModel, Probe, Reply
from tests.support.methods import MethodWorld, build, world
from tests.support.softmax_program import CLASSES, grouped_fleet, samples

LABELS = Probe(models=(), want=frozenset({"labels"}), batch=1, seed=0)
WITH_PRIOR = sorted(name for name in METHODS if "label-prior" in method_settings(make_method(name)))


def skewed_fleet(devices: int = 6) -> dict[ClientId, DeviceData]:
    """Even devices have mostly the classes 0 and 1, odd ones mostly 2 and 3; the classes look alike on all of them."""
    rng, found = np.random.default_rng(0), dict[ClientId, DeviceData]()
    for i in range(devices):
        pool = samples(rng, 400)
        keep = np.flatnonzero((pool.y // 2 == i % 2) | (rng.random(len(pool)) < 0.1))
        pool = Dataset(pool.x + 2.0 * rng.standard_normal(pool.x.shape), pool.y)  # so that labels matter
        train, test = keep[: 40 + i], keep[60:100]
        found[f"d{i:02d}"] = DeviceData(
            train=Dataset(pool.x[train], pool.y[train]), test=Dataset(pool.x[test], pool.y[test])
        )
    return found


def played(method: str, *, rounds: int = 3) -> MethodWorld:
    return world(build(method, {"label-prior": "device"}), skewed_fleet(), rounds=rounds)


FEW: dict[str, dict[str, Setting]] = {"fedcenters": {"most-centers": 1}, "ditto": {"common-weight": 0.5}}


@pytest.mark.parametrize("method", WITH_PRIOR)
def test_no_task_has_the_totals_of_more_centers_than_a_run_is_checked_for(method: str) -> None:
    """Else a run is refused in a later round, when the first newcomer comes."""
    made = build(method, {"label-prior": "device", "fraction-train": 0.4, **FEW.get(method, {})}, k=3)
    assert isinstance(made, LocalSgd)
    fleet = world(made, skewed_fleet())
    for _ in range(4):
        fleet.round()
        probes = [task for asked in fleet.exchanges for task in asked.values() if isinstance(task, Probe)]
        most = max(sum(row is not None for row in probe.label_totals or ()) for probe in probes)
        assert most <= made.compared_centers


@pytest.mark.parametrize("method", ["nonfed", "ditto", "pfedme", "fedsoft"])
def test_a_device_s_own_model_is_not_corrected(method: str) -> None:
    """Its labels are the device's already, so every device is served as without the setting, sample by sample."""
    ways = [world(build(method, {"label-prior": prior}), skewed_fleet()) for prior in ("model", "device")]
    for _ in range(3):
        plain, corrected = (way.round() for way in ways)
        if method == "fedsoft":  # its shares are votes of corrected centers, so training itself differs
            break
        assert corrected.per_device == plain.per_device
        assert corrected.loss == plain.loss
    assert corrected.per_device == plain.per_device


@pytest.mark.parametrize("method", WITH_PRIOR)
def test_totals_are_the_labels_of_the_devices_that_trained_the_center(method: str) -> None:
    there = played(method)
    counts = {c: np.bincount(d.train.y, minlength=CLASSES) for c, d in there.devices.local.items()}
    if method == "nonfed":
        assert TOTALS_KEY not in there.state.extra
        return
    known = label_counts(there.state)
    assert {c: row.tolist() for c, row in known.items()} == {c: row.tolist() for c, row in counts.items()}
    totals, assignment = there.state.extra[TOTALS_KEY], there.state.assignment
    if method in {"fedem", "fedrc", "fedsoft"}:
        shares = there.strategy.label_shares(there.state)  # type: ignore[attr-defined]
        np.testing.assert_allclose(totals, sum(np.outer(shares[c], counts[c]) for c in counts), rtol=1e-12)
    elif assignment:
        for k in set(assignment.values()):
            assert (
                totals[k].tolist() == sum(counts[c] for c in counts if assignment[c] == k).tolist()  # type: ignore[union-attr]
            )
    else:
        assert (totals == sum(counts.values())).all()


def test_a_center_of_all_devices_serves_each_better_when_it_is_corrected() -> None:
    """The classes look alike on all devices, so Bayes' rule holds."""
    plain, corrected = (
        world(build("fedavg", {"label-prior": p}), skewed_fleet(), rounds=5).round() for p in ("model", "device")
    )
    assert corrected.loss.micro < plain.loss.micro  # type: ignore[operator]


@pytest.mark.parametrize("case", ["cam warm-up=9", "femam level-rounds=9"])
def test_a_common_model_before_the_first_groups_is_corrected_as_that_of_fedavg(case: str) -> None:
    one, other = (world(build(method, {"label-prior": "device"}), skewed_fleet()) for method in (case, "fedavg"))
    for _ in range(2):
        reports = [one.round(), other.round()]
        assert reports[0].loss_per_device == pytest.approx(reports[1].loss_per_device)


def test_where_no_device_is_assigned_all_that_took_part_trained_the_center() -> None:
    """A method of the user's own may leave the assignment out."""
    counts = {f"{COUNTS_KEY}/a": np.array([5.0, 6.0]), f"{COUNTS_KEY}/b": np.array([1.0, 0.0])}
    shares = LocalSgd().label_shares(State(centers=np.zeros((1, 1)), extra=counts))
    assert {who: share.tolist() for who, share in shares.items()} == {"a": [1.0], "b": [1.0]}


def test_devices_are_asked_once_and_again_when_their_samples_change() -> None:
    there, asked = played("fedavg", rounds=0), []
    for number in range(3):
        if number == 2:
            first = there.devices.local["d00"].train
            more = Dataset(np.concatenate([first.x, first.x[:3]]), np.concatenate([first.y, first.y[:3]]))
            there.devices.local = {**there.devices.local, "d00": replace(there.devices.local["d00"], train=more)}
        there.round()
        asked.append([sorted(e) for e in there.exchanges if LABELS in e.values()])
    assert asked == [[sorted(there.fleet)], [], [["d00"]]]
    assert there.state.extra[TOTALS_KEY].sum() == sum(there.fleet.values())


@pytest.mark.parametrize(("off", "asked"), [(0.5, []), (-0.5, []), (0.75, [["a"]]), (-0.75, [["a"]])])
def test_counts_of_soft_labels_stand_while_they_differ_from_the_samples_by_half_a_one_at_most(
    off: float, asked: list[list[ClientId]]
) -> None:
    strategy, known, counted = build("fedavg", {"label-prior": "device"}), np.array([4.0, 6.0 + off]), np.array([5, 5])
    before = State(centers=np.zeros((1, 2)), assignment={"a": 0}, extra={f"{COUNTS_KEY}/a": known})
    heard = []

    def trained() -> Round:
        yield {}
        return before

    def answer(exchange: Exchange) -> Replies:
        heard.append(sorted(exchange))
        return {"a": Reply(n=10, labels=counted) if exchange else Reply(n=10, update=np.zeros(2))}

    after = drive(count_labels(strategy, before, trained()), answer)
    assert heard == [[], *asked]
    assert after.extra[TOTALS_KEY].tolist() == [(counted if asked else known).tolist()]


def test_a_device_whose_update_is_always_late_is_asked_for_its_labels() -> None:
    strategy, heard = build("fedavg-late", {"label-prior": "device"}), []
    before = State(centers=np.zeros((1, 2)), assignment={"a": 0, "b": 0})

    def trained() -> Round:
        yield {}
        return before

    def answer(exchange: Exchange) -> Replies:
        heard.append(sorted(exchange))
        if exchange:
            return {c: Reply(n=10, labels=np.array([4.0, 6.0])) for c in exchange}
        update = {c: Reply(n=10, update=np.zeros(2)) for c in "ab"}
        return RepliesWithLate({"a": update["a"]}, {"b": update["b"]})

    after = drive(count_labels(strategy, before, trained()), answer)
    assert heard == [[], ["a", "b"]]
    assert after.extra[TOTALS_KEY].tolist() == [[8.0, 12.0]]


def test_a_center_that_no_device_has_keeps_its_totals() -> None:
    before = State(centers=np.zeros((2, 1)), extra={TOTALS_KEY: np.array([[1.0, 2.0], [3.0, 4.0]])})
    totals = center_totals({"a": np.array([1.0, 0.0, 0.0])}, {"a": np.array([5.0, 6.0])}, before, 3)
    assert totals.tolist() == [[5, 6], [3, 4], [0, 0]]


def test_a_device_that_lies_about_the_number_of_classes_is_left_out() -> None:
    there = played("fedavg", rounds=1)
    odd = {f"{COUNTS_KEY}/d00": np.ones(CLASSES + 1), TOTALS_KEY: there.state.extra[TOTALS_KEY]}
    there.state = replace(there.state, extra={**there.state.extra, **odd})
    there.round(silent=["d00"])
    others = [row for c, row in label_counts(there.state).items() if c != "d00"]
    np.testing.assert_array_equal(there.state.extra[TOTALS_KEY], [np.sum(others, axis=0)])


def test_an_own_model_carries_the_totals_of_the_center_that_stands_in_for_it() -> None:
    there = played("ditto", rounds=1)
    task = serving_probe(there.strategy, there.state, "d00", batch=8)
    assert isinstance(task.models[0], OwnModel)
    assert task.label_totals == there.state.extra[TOTALS_KEY].tolist()


def test_label_counts_are_refused_beside_differential_privacy() -> None:
    with pytest.raises(ConfigError, match="label counts"):
        build("fedavg", {"label-prior": "device", "privacy-noise": 1.0})


def test_more_totals_than_a_task_has_room_for_are_refused() -> None:
    there = played("ifca", rounds=1)
    wide = np.ones((2, 300))
    state = replace(there.state, extra={**there.state.extra, TOTALS_KEY: wide})
    with pytest.raises(ConfigError, match="300 label totals for each of 2 centers"):
        there.strategy.probe_centers(state, "loss")  # type: ignore[attr-defined]


def test_a_center_that_a_round_splits_is_weighed_with_the_labels_of_its_own_devices() -> None:
    """The parts were weighed with the labels of all devices, or with none, and the shares of the last trial stay."""
    local = grouped_fleet(8, 2, n=80)
    settings: dict[str, Setting] = {"label-prior": "device", "trial-rounds": 2, "local-steps": 10}
    begun = world(build("fedcenters", {**settings, "most-centers": 1}), local, rounds=1)
    fleet = MethodWorld(build("fedcenters", settings), begun.devices, begun.state, number=1)
    fleet.round()
    assert len(fleet.state.centers) == 2
    told = [
        (fleet.state.assignment[c], task.label_totals[0])
        for exchange in fleet.exchanges
        for c, task in exchange.items()
        if isinstance(task, Probe) and "posterior" in task.want and task.label_totals
    ]
    assert {k for k, _ in told} == {0, 1}
    for k, totals in told:
        assert totals == fleet.state.extra[TOTALS_KEY][k].tolist()
