"""`fc.MultiCenter` is a scikit-learn classifier that keeps the groups of devices apart."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import config_context
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import nn

import fedcenters as fc
from coordinator.strategies.base import Strategy
from edge_client.errors import UsageError
from edge_client.protocol.task import Array

CHECKS = [
    pytest.param(*each, id=str(each[1].func.__name__))
    for each in estimator_checks_generator(fc.MultiCenter(rounds=5))
    if each[1].func.__name__ != "check_array_api_input"  # it takes numpy's arrays only
]


@pytest.fixture(scope="module")
def samples() -> tuple[Array, Array, Array]:
    """x [240, 2], y [240] and devices [240]: `cleo` and `dan` name the classes the other way round."""
    x, devices = np.random.default_rng(0).normal(size=(240, 2)), np.repeat(["anna", "ben", "cleo", "dan"], 60)
    said = np.where((x[:, 0] > 0) ^ np.isin(devices, ["cleo", "dan"]), "right", "left")
    return x, said, devices


@pytest.fixture(scope="module")
def fitted(samples: tuple[Array, Array, Array]) -> Any:  # noqa: ANN401 - scikit-learn has no types
    return fc.MultiCenter(centers=2).fit(*samples)


@pytest.mark.parametrize(("estimator", "check"), CHECKS)
def test_it_passes_the_checks_of_scikit_learn(estimator: Any, check: Any) -> None:  # noqa: ANN401
    check(estimator)


def test_each_device_is_predicted_by_the_center_of_its_group(fitted: Any, samples: tuple[Array, Array, Array]) -> None:  # noqa: ANN401
    x, y, devices = samples
    assert (fitted.predict(x, devices) == y).mean() > 0.9
    assert (fitted.labels_ == fitted.labels_[0]).tolist() == [True, True, False, False]
    mixed = np.random.default_rng(1).permutation(len(x))
    assert (fitted.predict(x[mixed], devices[mixed]) == fitted.predict(x, devices)[mixed]).all()


@pytest.mark.parametrize("method", [fc.NonFed(), fc.FedAvgPlus(2)])
def test_a_device_is_predicted_by_what_it_is_served_where_a_method_assigns_no_centers(
    method: Strategy, samples: tuple[Array, Array, Array]
) -> None:
    """Each was taken for a new device, which needs a center of its own."""
    x, y, devices = samples
    fitted = fc.MultiCenter(method, rounds=3).fit(x, y, devices)
    assert set(fitted.labels_) == {-1}
    assert fitted.score(x, y, devices=devices) == pytest.approx(fitted.result_.accuracy)


def test_devices_of_a_score_are_named(fitted: Any, samples: tuple[Array, Array, Array]) -> None:  # noqa: ANN401
    """As a third value they were taken for weights, and each row for one of a new device."""
    x, y, devices = samples
    with pytest.raises(TypeError):
        fitted.score(x, y, devices)
    right = fitted.predict(x, devices) == y
    assert fitted.score(x, y, devices=devices) == right.mean()
    assert fitted.score(x, y, devices=devices, sample_weight=right + 0.0) == 1.0


def test_rows_of_a_new_device_get_one_center(samples: tuple[Array, Array, Array]) -> None:
    x, y, _ = samples
    halves = np.repeat([f"{who} {half}" for who in ("anna", "ben", "cleo", "dan") for half in (1, 2)], 30)
    fitted = fc.MultiCenter(centers=2).fit(x, y, halves)
    with pytest.warns(UserWarning, match="tell the centers apart badly"):  # inputs of both groups are alike
        found = fitted.predict(x[:60], np.repeat("eve", 60))
    assert any((found == fitted.predict(x[:60], np.repeat(who, 60))).all() for who in ("anna 1", "cleo 1"))


def test_of_four_devices_it_is_not_known_which_center_fits_a_new_one(
    fitted: Any,  # noqa: ANN401
    samples: tuple[Array, Array, Array],
) -> None:
    with pytest.raises(UsageError, match="it is not known whether a center fits"):
        fitted.predict(samples[0][:60], np.repeat("eve", 60))


def test_it_and_its_result_can_be_pickled(fitted: Any, samples: tuple[Array, Array, Array]) -> None:  # noqa: ANN401
    x, _, devices = samples
    again = pickle.loads(pickle.dumps(fitted))  # noqa: S301 - ours
    assert (again.predict(x, devices) == fitted.predict(x, devices)).all()
    assert list(again.result_.rows()) == list(fitted.result_.rows())


def test_a_search_in_a_pipeline_passes_the_devices_on(samples: tuple[Array, Array, Array]) -> None:
    """With metadata routing, as scikit-learn calls it; each fold's devices go with its rows."""
    x, y, devices = samples
    with config_context(enable_metadata_routing=True):
        model = fc.MultiCenter(rounds=5)
        model.set_fit_request(devices=True).set_score_request(devices=True).set_predict_request(devices=True)
        search = GridSearchCV(make_pipeline(StandardScaler(), model), {"multicenter__centers": [1, 2]}, cv=2)
        order = np.random.default_rng(2).permutation(len(x))
        search.fit(x[order], y[order], devices=devices[order])
    assert search.best_params_ == {"multicenter__centers": 2}


def test_the_given_settings_are_the_users(samples: tuple[Array, Array, Array]) -> None:
    given = fc.MultiCenter(fc.WeCFL(2), rounds=2)
    assert repr(clone(given).fit(*samples).result_.method) == repr(given.method)


def test_a_row_without_a_device_is_refused(samples: tuple[Array, Array, Array]) -> None:
    x, y, devices = samples
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        fc.MultiCenter().fit(x, y, devices[:-1])


def test_a_score_without_devices_says_what_a_search_needs(fitted: Any, samples: tuple[Array, Array, Array]) -> None:  # noqa: ANN401
    """A search that was not told to hand devices on scored each part as the rows of one new device, in silence."""
    x, y, devices = samples
    said = r"scored without devices.*set_score_request\(devices=True\)"
    with pytest.warns(UserWarning, match=said) as told, contextlib.suppress(UsageError):  # that no center fits
        fitted.score(x, y)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fitted.score(x, y, devices=devices) > 0.9


def test_an_output_that_no_class_has_is_predicted_for_no_row(samples: tuple[Array, Array, Array]) -> None:
    """A row that such an output won ended the prediction with an IndexError."""
    x, y, devices = samples
    net = nn.Linear(2, 5)
    nn.init.zeros_(net.weight)
    net.bias = nn.Parameter(torch.tensor([0.0, 1.0, 9.0, 9.0, 9.0]))
    fitted = fc.MultiCenter(fc.FedAvg(local_steps=1, learning_rate=1e-6), model=net, rounds=1).fit(x, y, devices)
    assert set(fitted.predict(x, devices)) == set(fitted.predict(x[:5])) == {"right"}
