"""Local SGD: what all methods that train on devices share, as settings and as the tasks made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from coordinator.aggregation.centers import Align, aggregate
from coordinator.aggregation.privacy import release_centers
from coordinator.aggregation.robust import REDUCER_NAMES, make_reducer
from coordinator.strategies.base import ServingOptions
from coordinator.strategies.common.setting_checks import check_choice, check_range
from coordinator.strategies.common.updates import ClientUpdates
from edge_client.errors import ConfigError
from edge_client.protocol.task import LABEL_PRIORS, Array, Fit, Flat, Probe, Schema

NOT_A_SETTING: Mapping[str, Any] = {"setting": False}  # of a field that no user sets
MAX_PULL = 2.0  # of lr * mu; above it each step of plain SGD overshoots the anchor by more than it was off
BUFFER_SOURCES: Mapping[str, str] = {  # `batch-norm` -> whose running statistics a device evaluates with
    "average": "sent",  # the center's, which are means by samples; devices continue them in training
    "local": "own",  # a device keeps its own (FedBN, Li et al. 2021)
    "batch": "batch",  # those of the device's training samples (AdaBN, Li et al. 2016)
}


@dataclass(frozen=True, kw_only=True)
class LocalSgd:
    """How a device trains in one task, and which share of the fleet is asked each round.

    The defaults were chosen on the training split of the digits fleet, and suit small models on a few hundred samples.
    """

    local_steps: int = 20
    learning_rate: float = 0.1
    momentum: float = 0.9
    batch_size: int = 16
    fraction_train: float = 1.0
    batch_norm: str = "average"  # a key of BUFFERS
    label_prior: str = "model"  # "device": every evaluation is told how often the device has each label
    reduce: str = "mean"  # how the models of a center's devices become the center: robust.py
    trim_updates: float = 0.2  # the share of a center's devices that may be hostile, for those reduces that need it
    server_momentum: float = 0.0  # beta: how much of a center's last move it makes again: momentum.py
    privacy_noise: float = 0.0  # above 0 centers are differentially private: z of privacy.py
    privacy_clip: float = 1.0  # how far one device may pull the sum of its center
    privacy_delta: float = 1e-5
    secret: bytes = field(default=b"", repr=False, metadata=NOT_A_SETTING)  # the key of the noise

    def __post_init__(self) -> None:
        """Refuse settings that no device could carry out."""
        check_range("local-steps", self.local_steps, low=1)
        check_range("learning-rate", self.learning_rate, low=0.0)
        check_range("momentum", self.momentum, low=0.0, high=1.0)
        check_range("batch-size", self.batch_size, low=1, high=65_536)
        check_range("fraction-train", self.fraction_train, low=1e-9, high=1.0)
        check_choice("batch-norm", self.batch_norm, tuple(BUFFER_SOURCES))
        check_choice("label-prior", self.label_prior, tuple(sorted(LABEL_PRIORS)))
        check_choice("reduce", self.reduce, REDUCER_NAMES)
        check_range("trim-updates", self.trim_updates, low=0.0, high=0.49)
        check_range("server-momentum", self.server_momentum, low=0.0, high=0.99)
        check_range("privacy-noise", self.privacy_noise, low=0.0)
        check_range("privacy-clip", self.privacy_clip, low=1e-9)
        check_range("privacy-delta", self.privacy_delta, low=1e-12, high=0.1)
        if self.privacy_noise and self.reduce != "mean":
            raise ConfigError(
                f"reduce {self.reduce} with privacy-noise", hint="only the mean has a bound that noise could follow"
            )

    @property
    def clusters_together(self) -> bool:
        """Whether a device's updates decide where others belong."""
        return False

    @property
    def serving(self) -> ServingOptions:
        """How devices evaluate models, whether they are asked about them or served them."""
        return {"buffers": BUFFER_SOURCES[self.batch_norm], "label_prior": self.label_prior}

    def fit(  # noqa: PLR0913 - a task has these fields
        self,
        *,
        start: Flat | Literal["own"],
        seed: int,
        anchor: Flat | None = None,
        mu: float = 0.0,
        init: Flat | None = None,
        rows: str = "ones",
        slot: str = "main",
        upload: bool = True,
        center: int | None = None,
    ) -> Fit:
        """One device's task: SGD from `start`, pulled to `anchor` [schema.size] with strength `mu`; as `Fit` says."""
        return Fit(
            start=start,
            init=init,
            anchor=anchor if mu > 0 else None,
            mu=mu,
            rows=rows,
            slot=slot,
            upload=upload,
            buffers="own" if self.batch_norm == "local" else "sent",
            steps=self.local_steps,
            lr=self.learning_rate,
            momentum=self.momentum,
            batch=self.batch_size,
            seed=seed,
            center=center,
        )

    def probe(self, models: Sequence[Flat], *want: str, prior: Sequence[float] | None = None, seed: int = 0) -> Probe:
        """What a device is asked about models that it is sent, on its training samples; as `Probe` says."""
        return Probe(
            models=models,
            want=frozenset(want),
            prior=prior,
            batch=self.batch_size,
            seed=seed,
            **self.serving,
        )

    def aggregate(  # noqa: PLR0913 - the formula has these parts
        self,
        centers: Array,
        updates: ClientUpdates,
        R: Array,
        a: Array,
        schema: Schema,
        *,
        step: float = 1.0,
        align: Align | None = None,
    ) -> Array:
        """New centers [K, size] from `updates` with responsibilities R [m, K] and weights a [m]: centers.py.

        Private ones count every device by R alone: privacy.py.
        """
        if self.privacy_noise:
            how = {"clip": self.privacy_clip, "noise": self.privacy_noise, "step": step}
            return release_centers(centers, updates.rows, R * (a != 0)[:, None], secret=self.secret, align=align, **how)
        return aggregate(
            centers,
            updates.rows,
            R,
            a,
            step=step,
            reduce=make_reducer(self.reduce, trim=self.trim_updates),
            align=align,
            n_params=schema.n_params,
            n=updates.n,
        )

    def check_pull(self, mu: float, who: str, *, setting: str) -> None:
        """Refuse a proximal pull that plain SGD cannot follow."""
        if self.learning_rate * mu > MAX_PULL:
            raise ConfigError(
                f"the proximal pull of {who} is mu = {mu:.4g}; with learning-rate {self.learning_rate} it diverges",
                hint=f"learning-rate * mu must not exceed 2; lower `{setting}` or `learning-rate`",
            )


def merge_anchors(anchors: Array, mus: Sequence[float]) -> tuple[Flat | None, float]:
    """Anchors [s, p] with pulls [s] -> one anchor and one pull with the same gradient; (None, 0) without any pull."""
    strength = np.asarray(mus, dtype=np.float64)
    total = float(strength.sum())
    if not math.isfinite(total) or (strength < 0).any():
        raise ValueError(f"pulls must be finite and not negative, got {list(mus)}")
    if total == 0:
        return None, 0.0
    return (strength @ anchors / total).astype(anchors.dtype), total
