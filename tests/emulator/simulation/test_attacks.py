from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregation.robust import REDUCER_NAMES
from coordinator.strategies.base import Exchange
from coordinator.strategies.registry import Setting, make_method
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import UsageError
from edge_client.protocol.task import Fit, Probe, Reply, Task
from emulator.options import SimulateArgs
from emulator.run.execute import run_simulation
from emulator.run.settings import RunSettings
from emulator.simulate import simulate_json
from emulator.simulation.attacks import ATTACKS, AttackSpec, honest_accuracy, no_attack, parse_attack
from emulator.simulation.device_profiles import DEVICE_PROFILES
from emulator.simulation.virtual_network import VirtualNetwork
from tests.support.methods import reduced_by
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

LOCAL = grouped_fleet(10, 1)
START = start_of()
TASK = Fit(start=START, steps=3, lr=0.1, batch=8, seed=7)
LIARS = frozenset({"d01"})


def told(attack: str) -> Any:  # noqa: ANN401 - a model, which is there
    reply = Reply(n=3, update=START + 0.5)
    return AttackSpec(attack=attack, share=0.1).make_attack(LIARS, 0)("d01", TASK, reply).update


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.3])
def test_the_share_of_the_fleet_is_drawn_by_the_seed_and_the_same_for_every_attack(share: float) -> None:
    drawn = {AttackSpec(attack=attack, share=share).attackers(LOCAL, 3) for attack in ATTACKS}
    assert len(drawn) == 1
    assert len(drawn.pop()) == round(10 * share)
    assert AttackSpec(share=0.3).attackers(LOCAL, 3) > AttackSpec(share=0.2).attackers(LOCAL, 3)
    assert len({AttackSpec(share=0.3).attackers(LOCAL, seed) for seed in range(9)}) > 1


def test_each_attack_sends_what_it_says() -> None:
    np.testing.assert_allclose(told("sign-flip"), START - 2.0)
    np.testing.assert_allclose(told("scale"), START + 4.0)
    assert np.isnan(told("nan")).all()
    assert told("noise").std() == pytest.approx(2.0, rel=0.5)  # of a few dozen numbers
    np.testing.assert_array_equal(told("noise"), told("noise"))
    np.testing.assert_array_equal(told("label-flip"), START + 0.5)


def test_honest_devices_probes_and_statistics_are_left_alone() -> None:
    lie = AttackSpec(attack="sign-flip", share=0.1).make_attack(LIARS, 0)
    model, losses = Reply(n=3, update=START + 1), Reply(n=3, losses=np.ones(1))
    assert lie("d00", TASK, model) is model
    assert lie("d01", TASK, losses) is losses
    assert lie("d01", Probe(models=[START], want=frozenset({"loss"}), batch=8, seed=0), losses) is losses
    assert AttackSpec().make_attack(frozenset(), 0) is no_attack


def test_flipped_labels_are_trained_on_and_not_tested_on() -> None:
    y = np.array([0, 1, 2, 3])
    local = DeviceData(train=Dataset(np.zeros((4, 2)), y), test=Dataset(np.zeros((4, 2)), y))
    spoiled = AttackSpec(share=0.4).poison_data({"d00": local, "d01": local}, LIARS)
    assert spoiled["d01"].train.y.tolist() == [3, 2, 1, 0]
    assert spoiled["d01"].test is local.test
    assert spoiled["d00"] is local


def test_samples_without_labels_cannot_be_flipped() -> None:
    targets = DeviceData(train=Dataset(np.zeros((4, 2)), np.zeros(4)))
    with pytest.raises(UsageError, match="no labels"):
        AttackSpec(share=0.4).poison_data({"d01": targets}, LIARS)


@pytest.mark.parametrize("text", ["", "sign-flip:0.2", "nan:0"])
def test_a_text_says_what_and_how_many(text: str) -> None:
    attack, _, share = text.partition(":")
    assert parse_attack(text) == (AttackSpec(attack=attack, share=float(share)) if text else AttackSpec())


@pytest.mark.parametrize("text", ["sign-flip", "sign-flip:", "shout:0.1", "nan:0.5", "nan:-0.1", "nan:nan"])
def test_what_is_no_attack_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_attack(text)
    assert refused.value.hint


def test_admission_leaves_out_what_is_not_finite_and_says_so() -> None:
    lie = AttackSpec(attack="nan", share=0.1).make_attack(LIARS, 0)
    net = VirtualNetwork(devices_of(LOCAL), dict.fromkeys(LOCAL, DEVICE_PROFILES[0]), attack=lie)
    exchange: Exchange = dict.fromkeys(LOCAL, TASK)
    assert set(net.ask(exchange)) == set(LOCAL) - LIARS
    assert set(net.refused) == LIARS
    assert net.refused["d01"].startswith("not_finite")


def test_admission_leaves_out_who_is_far_out_of_line_and_a_ratio_of_infinity_nobody() -> None:
    def lie(who: str, task: Task, reply: Reply) -> Reply:
        return Reply(n=reply.n, update=START + 100 * (reply.update - START)) if who in LIARS else reply

    for ratio, out in ((10.0, LIARS), (np.inf, frozenset())):
        net = VirtualNetwork(
            devices_of(LOCAL), dict.fromkeys(LOCAL, DEVICE_PROFILES[0]), attack=lie, max_update_ratio=ratio
        )
        assert set(net.ask(dict.fromkeys(LOCAL, TASK))) == set(LOCAL) - out
        assert set(net.refused) == out


def test_three_of_ten_liars_ruin_the_mean_and_no_robust_reduce_that_holds_for_them() -> None:
    enemy = AttackSpec(attack="sign-flip", share=0.3)
    liars = enemy.attackers(LOCAL, 0)
    served: dict[str, float] = {}
    for reduce in REDUCER_NAMES:
        settings: dict[str, Setting] = {**reduced_by(reduce, 0.3), "local-steps": 5, "batch-size": 8}
        method = make_method("fedavg", **settings)
        asked = RunSettings(rounds=4, seed=0, batch=8, attack=enemy.make_attack(liars, 0))
        found = run_simulation(method, START, devices_of(LOCAL), asked)
        served[reduce] = honest_accuracy(found.records[-1], liars) or 0.0
    assert served.pop("mean") < 0.6
    assert min(served.values()) > 0.8, served


def test_a_simulation_tells_who_was_hostile_and_how_the_others_do(tmp_path: Path) -> None:
    asked = SimulateArgs(method="fedavg", groups=1, devices=10, rounds=2, hostile="nan:0.2", out=tmp_path)
    found = simulate_json(asked)
    assert len(found["hostile"]) == 2
    assert found["honest_accuracy"] > 0.5
    lines = (Path(found["run"]) / "metrics.jsonl").read_text()
    assert lines.count('"refused"') == 2
    assert honest_accuracy({"per_device": {}}, LIARS) is None
