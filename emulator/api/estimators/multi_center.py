"""`fc.MultiCenter`: clustered training as a scikit-learn classifier."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from coordinator.strategies.base import Strategy
from coordinator.strategies.fesem import FeSEM
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import Array, ClientId
from emulator.api.data.user_fleet import fleet
from emulator.api.nearest import predict_samples
from emulator.api.progress import show_work
from emulator.api.runs import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

MOST_SEEDS = 2**31 - 1
NO_DEVICES = (
    "scored without devices: all rows count as those of one new device. Give devices=...; for a search write "
    "sklearn.set_config(enable_metadata_routing=True), and set_score_request(devices=True) of this classifier"
)


class MultiCenter(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """A classifier with one model per group of devices, for scikit-learn's pipelines and searches.

    `method` is a method of this package; by default `FeSEM` with `centers` centers, or with one per device where there
    are fewer devices. `model` is what `fc.simulate` takes; by default a perceptron with 64 hidden units. `rounds` is
    the number of training rounds, `random_state` what draws every random number.

    A pipeline or a search needs `sklearn.set_config(enable_metadata_routing=True)`, and of this classifier
    `.set_fit_request(devices=True).set_score_request(devices=True).set_predict_request(devices=True)`.

    `fit` leaves `result_`, the `fc.Result`; `classes_`, `devices_` (in order), `labels_` (the center of each of them,
    -1 without one, as where its training diverged) and `n_features_in_`. Every row trains, so
    `result_.accuracy` is of training rows, and `result_.nearest` learns its limits from them: measure on other rows.

    >>> rng = np.random.default_rng(0)
    >>> x, devices = rng.normal(size=(240, 2)), np.repeat(["anna", "ben", "cleo", "dan"], 60)
    >>> y = (x[:, 0] > 0) ^ np.isin(devices, ["cleo", "dan"])  # two of them name the classes the other way round
    >>> model = MultiCenter(centers=2, rounds=20).fit(x, y, devices)
    >>> (model.labels_ == model.labels_[0]).tolist()
    [True, True, False, False]
    >>> model.predict([[2.0, 0.0]], ["anna"]), model.predict([[2.0, 0.0]], ["dan"])
    (array([ True]), array([False]))
    """

    def __init__(
        self,
        method: Strategy | None = None,
        *,
        centers: int = 3,
        model: nn.Module | Callable[[], nn.Module] | str | None = None,
        rounds: int = 20,
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.method = method
        self.centers = centers
        self.model = model
        self.rounds = rounds
        self.random_state = random_state

    def fit(self, x: Any, y: Any, devices: Any = None) -> MultiCenter:  # noqa: ANN401 - what scikit-learn reads
        """Train on samples `x` [n, features] with classes `y` [n]; `devices` [n] says whose each row is.

        Without `devices` all rows are of one device. Raises ValueError for input that scikit-learn refuses, UsageError
        and ConfigError as `fc.simulate` does.
        """
        x, y = validate_data(self, x, y, dtype=np.float32, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) == 1:
            raise ValueError(f"there is one class, {self.classes_[0]}; a classifier needs samples of two classes")
        self.devices_, who = np.unique(_devices(devices, x), return_inverse=True)
        seed = int(check_random_state(self.random_state).randint(MOST_SEEDS))
        of_devices = np.split(np.argsort(who, kind="stable"), np.cumsum(np.bincount(who))[:-1])
        samples = [Dataset(x[rows], numbers[rows]) for rows in of_devices]
        devices_data = fleet({k: DeviceData(train=of, test=of) for k, of in enumerate(samples)})
        self._names = [devices_data.name(k) for k in range(len(samples))]
        method = FeSEM(min(self.centers, len(self.devices_))) if self.method is None else self.method
        self.result_ = simulate(
            method,
            fleet=devices_data,
            model=self.model,
            rounds=self.rounds,
            seed=seed,
            progress=False,
            evaluate_every=self.rounds,
        )
        self.labels_ = np.array([self.result_.assignments.get(name, -1) for name in self._names])
        return self

    def predict(self, x: Any, devices: Any = None) -> Array:  # noqa: ANN401 - what scikit-learn reads
        """The classes [n] of samples `x` [n, features], each by what its device in `devices` [n] is served.

        The rows of a device that `fit` did not see, or that has no center where others have one, and all rows without
        `devices`, are those of a new device: they get the center that `fc.Result.nearest` finds for them, with a
        warning where several may be the right one. A single center is theirs without a search. Raises UsageError where
        none fits, and where fewer than five devices trained, which tells too little of that.
        """
        check_is_fitted(self)
        x = validate_data(self, x, dtype=np.float32, reset=False)
        whose = np.full(len(x), None, object) if devices is None else _devices(devices, x)
        named = zip(self.devices_.tolist(), self._names, self.labels_, strict=True)
        none = (self.labels_ < 0).all()  # as with NonFed: what a device is served is no center of its own
        known = {value: name for value, name, center in named if none or center >= 0}
        found = np.empty(len(x), np.int64)
        of_devices = defaultdict[Any, list[int]](list)
        for row, value in enumerate(whose.tolist()):
            of_devices[value].append(row)
        for value, rows in of_devices.items():
            found[rows] = self._numbers(x[rows], known.get(value))
        return np.asarray(self.classes_[found])

    def score(self, x: Any, y: Any, *, devices: Any = None, sample_weight: Any = None) -> float:  # noqa: ANN401
        """The share of right predictions, as `predict` makes them; `sample_weight` [n] weighs the rows.

        Both by name: a third value would be devices in `fit`, and weights in scikit-learn's other estimators. A search
        gives `devices` to `fit` alone unless it is told otherwise, as a warning says.
        """
        if devices is None and len(self.devices_) > 1:
            warnings.warn(NO_DEVICES, stacklevel=2)
        return float(accuracy_score(y, self.predict(x, devices), sample_weight=sample_weight))

    def _numbers(self, x: Array, device: ClientId | None) -> Array:
        """The numbers of the classes [n], for rows of one device."""
        only = 0 if device is None and len(self.result_.centers) == 1 else None
        source = self.result_._source  # noqa: SLF001 - `predict` would take in outputs that no class has
        with show_work("predicting"):
            return predict_samples(source, x, device=device, center=only, classes=len(self.classes_))


def _devices(given: Any, x: Array) -> Array:  # noqa: ANN401 - what scikit-learn reads
    """Whose each row is [n]; all are one device's where nothing is given."""
    if given is None:
        return np.zeros(len(x), np.int64)
    check_consistent_length(x, given)
    return np.asarray(column_or_1d(given))
