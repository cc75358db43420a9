"""`Result.predict` by a device, and metrics of one's own, are of what the device is served and scored by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedcenters as fc
from coordinator.strategies.base import Strategy
from edge_client.errors import ConfigError
from edge_client.protocol.task import Array, OwnModel

PAIRS = "cluster-n-class:groups=2,classes-group=5,classes=3"  # few classes each: a label prior has much to say
METHODS = {
    "the default": fc.FedCenters(trial_rounds=2, local_steps=5),
    "FedRC": fc.FedRC(2, local_steps=5),
    "label prior": fc.WeCFL(2, label_prior="device", local_steps=5),
    "label prior of a mixture of own and common": fc.Ditto(common_weight=0.5, label_prior="device", local_steps=5),
    "own statistics": fc.FedAvg(batch_norm="local", local_steps=5),
    "statistics of the training samples": fc.FedAvg(batch_norm="batch", local_steps=5),
}


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def accuracy(y: Array, outputs: Array) -> float:
    return float((outputs.argmax(axis=1) == y).mean())


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_prediction_and_a_metric_have_the_accuracy_that_the_run_tells(method: Strategy) -> None:
    fleet = fc.fleets.digits(devices=4, partition=PAIRS)
    result = fc.simulate(
        method, fleet=fleet, model=with_batch_norm, rounds=3, metrics={"mine": accuracy}, progress=False
    )
    told = dict(result.accuracies)
    right = {c: float((result.predict(d.test.x, device=c) == d.test.y).mean()) for c, d in fleet.items() if d.test}
    assert right == pytest.approx(told, abs=1e-12)
    assert result.run.records[-1]["metrics"]["mine"]["per_device"] == pytest.approx(told, abs=1e-12)


def test_numbers_that_a_mixture_predicts_are_the_mean_of_its_models() -> None:
    x = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    fleet = fc.fleet((x, x @ np.array([1.0, -2.0, 3.0, 0.5])), by=np.repeat(np.arange(5), 60))
    linear = nn.Linear(4, 1)
    result = fc.simulate(fc.FedCenters(trial_rounds=2), fleet=fleet, model=linear, rounds=3, progress=False)
    state, expected = result.run.state, np.zeros((60, 1))
    for share, model in result.method.predictor(state, "device-0"):
        w = result._own("device-0", model.slot) if isinstance(model, OwnModel) else model
        assert w is not None
        expected += share * (x[:60] @ w[:4] + w[4])[:, None]
    assert len(result.method.predictor(state, "device-0")) == 3
    np.testing.assert_allclose(result.predict(x[:60], device="device-0"), expected, atol=1e-5)  # float32


def test_a_loaded_run_predicts_alike_and_asks_for_what_batch_statistics_need(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 4)).astype(np.float32), rng.integers(3, size=120)
    fleet = fc.fleet((x, y), by=np.repeat(np.arange(3), 40))
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    corrected, normed = (
        fc.simulate(method, fleet=fleet, model=model, rounds=2, progress=False)
        for method in (fc.FedRC(2), fc.FedAvg(batch_norm="batch"))
    )
    again = fc.load(corrected.save(tmp_path / "fedrc"))  # the samples are not there, their label counts are
    np.testing.assert_array_equal(again.predict(x, device="device-1"), corrected.predict(x, device="device-1"))
    saved = normed.save(tmp_path / "normed")
    with pytest.raises(ConfigError, match="traced copy of the model") as refused:
        fc.load(saved, fleet=fleet).predict(x, device="device-1")
    assert "model=..., fleet=..." in refused.value.hint
    with pytest.raises(ConfigError, match="does not hold the samples"):
        fc.load(saved, model=model).predict(x, device="device-1")
    again = fc.load(saved, model=model, fleet=fleet)
    np.testing.assert_array_equal(again.predict(x, device="device-1"), normed.predict(x, device="device-1"))


def test_statistics_that_the_model_has_not_ask_for_no_samples(tmp_path: Path) -> None:
    """With batch-norm = batch a model without batch norm asked for the fleet before it predicted."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(3, size=60)
    fleet = fc.fleet((x, y), by=np.repeat(np.arange(3), 20))
    plain = fc.simulate(fc.FedAvg(batch_norm="batch"), fleet=fleet, rounds=1, progress=False)
    again = fc.load(plain.save(tmp_path / "plain"))
    np.testing.assert_array_equal(again.predict(x, device="device-1"), plain.predict(x, device="device-1"))


@pytest.mark.parametrize("method", [METHODS["FedRC"], METHODS["label prior"], fc.FeMAM(2)])
def test_a_result_without_a_checkpoint_of_its_round_is_saved_with_all_that_predicts(
    method: Strategy, tmp_path: Path
) -> None:
    so_far: list[fc.Result] = []
    fleet = fc.fleets.digits(devices=4, partition=PAIRS)
    x = fleet["device-00"].train.x
    fc.simulate(method, fleet=fleet, rounds=3, on_round=so_far.append, progress=False)
    kept_none = fc.simulate(method, fleet=fleet, rounds=3, checkpoint_every=0, progress=False)
    for name, result in (("second", so_far[1]), ("none", kept_none)):  # the checkpoint of the first is of round 3
        again = fc.load(result.save(tmp_path / name))
        for who in fleet:
            np.testing.assert_array_equal(again.predict(x, device=who), result.predict(x, device=who))
    twice = fc.load(again.save(tmp_path / "twice"))
    np.testing.assert_array_equal(twice.predict(x, device=who), result.predict(x, device=who))


def test_the_folder_of_a_run_that_was_interrupted_does_not_guess_what_devices_are_served(tmp_path: Path) -> None:
    fleet = fc.fleets.digits(devices=4, partition=PAIRS)
    x = fleet["device-00"].train.x
    methods: dict[str, Strategy] = {"fedrc": fc.FedRC(2, local_steps=5), "fesem": fc.FeSEM(2, local_steps=5)}
    for name, method in methods.items():
        folder = tmp_path / name
        fc.simulate(method, fleet=fleet, rounds=2, out=tmp_path, name=name, progress=False)
        told = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text(told[0] + "\n")  # its checkpoint is of a later round than its files
    with pytest.raises(ConfigError, match="knew of its devices"):
        fc.load(tmp_path / "fedrc").predict(x, device="device-00")
    assert len(fc.load(tmp_path / "fedrc").predict(x, center=0)) == len(x)
    assert len(fc.load(tmp_path / "fesem").predict(x, device="device-00")) == len(x)


def test_a_metric_is_of_the_devices_that_a_round_tests() -> None:
    """Beside an accuracy of a sample of the fleet it was of all devices."""
    asked: dict[str, Any] = {
        "fleet": fc.fleets.digits(devices=6),
        "rounds": 3,
        "fraction_evaluate": 0.4,
        "progress": False,
    }
    run = fc.simulate(fc.FedAvg(local_steps=2), **asked, evaluate_every=2, metrics={"mine": accuracy}).run
    found: list[Any] = list(run.records)
    assert [len(record["per_device"]) for record in found] == [0, 3, 6]
    assert "metrics" not in found[0]
    for record in found[1:]:
        assert record["metrics"]["mine"]["per_device"] == pytest.approx(record["per_device"])
        assert record["metrics"]["mine"]["micro"] == pytest.approx(record["accuracy"]["micro"])


def test_a_metric_that_is_no_number_on_one_device_leaves_that_device_out(tmp_path: Path) -> None:
    """The mean was NaN, which is no JSON: an area under a curve, say, of a device that has one class."""

    def of_few(y: Array, outputs: Array) -> float:
        return float("nan") if len(y) > 40 else len(outputs) / len(y)

    x = np.random.default_rng(0).normal(size=(140, 4)).astype(np.float32)
    fleet = fc.fleet({"big": (x[:100], np.arange(100) % 2), "small": (x[100:], np.arange(40) % 2)}, test=0.5)
    asked: dict[str, Any] = {"fleet": fleet, "rounds": 1, "progress": False, "out": tmp_path, "name": "mine"}
    result = fc.simulate(fc.FedAvg(local_steps=1), **asked, metrics={"few": of_few, "never": lambda *_: float("inf")})
    assert result.run.records[0]["metrics"]["few"] == {"micro": 1.0, "macro": 1.0, "per_device": {"small": 1.0}}
    assert result.history["never"].isna().all()
    assert "few" in repr(result)
    text = (tmp_path / "mine/metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
