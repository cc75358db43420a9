"""`label-prior = device`: the labels that each center was trained on, so that devices can correct it to their own.

A device adds log(n_c + e) - log(t_c + e) to a center's output for class c: n_c are its own training samples of the
class, t_c those that the center was trained on (Saerens 2002; edge_client/training/fit_probe.py). A model that a device
trained for itself has seen that device's labels, so it is not corrected. Nor is a center without totals.
coordinator/rounds/label_counting.py asks the devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from coordinator.strategies.base import State
from coordinator.strategies.common.updates import unpack_by_client
from edge_client.errors import ConfigError
from edge_client.protocol.task import MAX_LABEL_TOTALS, Array, ClientId, Flat, OwnModel

LABEL_PRIORS = ("device", "model")
COUNTS_KEY = "label-counts"  # in State.extra, per client: [C] training samples of each class
TOTALS_KEY = "label-totals"  # in State.extra: [n_centers, C]; a row of zeros: the center was not trained yet
TOTALS_DIGITS = 3  # after the point, as they travel


def label_counts(state: State) -> Mapping[ClientId, Array]:
    """Client -> [C] its training samples of each class, of the clients that were asked."""
    return unpack_by_client(state.extra, COUNTS_KEY)


def label_totals_of(state: State, models: Sequence[Flat | OwnModel]) -> list[list[float] | None] | None:
    """For `Probe.label_totals`: the totals [C] of each model that is a center, and of the `init` of each own model.

    None without any totals. Raises ConfigError for more numbers than a task has room for.
    """
    totals = state.extra.get(TOTALS_KEY)
    if totals is None:
        return None
    rows = [_center_of(state.centers, model.init if isinstance(model, OwnModel) else model) for model in models]
    known = [k if k is not None and k < len(totals) and totals[k].any() else None for k in rows]  # not a new center
    found = [None if k is None else totals[k].round(TOTALS_DIGITS).tolist() for k in known]
    if sum(row is not None for row in found) * totals.shape[1] > MAX_LABEL_TOTALS:
        raise ConfigError(
            f"label-prior device sends a device {totals.shape[1]} label totals for each of {len(found)} centers",
            hint=f"at most {MAX_LABEL_TOTALS} numbers in all: use fewer centers, or label-prior = model",
        )
    return found


def _center_of(centers: Array, model: Flat | None) -> int | None:
    """The number of the center whose memory this is: two centers may have the same values."""
    if model is None:
        return None
    return next((k for k, center in enumerate(centers) if np.may_share_memory(center, model)), None)
