"""What methods share: local SGD settings, cohorts, seeds, folded anchors, choosing by loss.

Pure functions over plain arrays. A model is a flat vector [schema.size]; clients are taken in sorted order everywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.centers import Align, aggregate
from coordinator.aggregation.privacy import release_centers
from coordinator.aggregation.robust import REDUCER_NAMES, make_reducer
from coordinator.strategies.base import Fleet, Replies, ServingOptions
from edge_client.errors import ConfigError
from edge_client.protocol.task import LABEL_PRIORS, Array, ClientId, Fit, Flat, Probe, Schema

MAX_SEED = 2**53  # the protocol's: JSON numbers are exact below it
NOT_A_SETTING: Mapping[str, Any] = {"setting": False}  # of a field that no user sets
MAX_PULL = 2.0  # of lr * mu; above it each step of plain SGD overshoots the anchor by more than it was off


BUFFER_SOURCES: Mapping[
    str, str
] = {  # policies for batch norm's running statistics; a center's are means by samples in each
    "average": "sent",  # devices train on from the center's, and evaluate with them
    "local": "own",  # a device keeps its own and is served with them (as FedBN does, Li et al. 2021)
    "batch": "batch",  # evaluation takes the statistics of the device's training samples (Li et al. 2016)
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


def check_range(name: str, value: float, *, low: float, high: float = math.inf) -> None:
    """Raise ConfigError unless the setting is a finite number in [least, most]."""
    if not (math.isfinite(value) and low <= value <= high):
        span = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ConfigError(f"{name} is {value}", hint=f"use a number {span}")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless the setting is one of the allowed words."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}", hint=f"use one of {', '.join(allowed)}")


def sample_cohort(fleet: Fleet, fraction: float, rng: np.random.Generator) -> list[ClientId]:
    """A sorted cohort of ceil(fraction * m) distinct clients; nothing is drawn when everybody is asked."""
    clients = sorted(fleet)
    count = math.ceil(fraction * len(clients))
    if count >= len(clients):
        return clients
    return sorted(clients[i] for i in rng.choice(len(clients), size=count, replace=False))


@dataclass(frozen=True)
class TaskSeeds:
    """Task seeds of one exchange: they depend on one draw and the client's name, not on who else is asked."""

    draw: int

    @staticmethod
    def from_rng(rng: np.random.Generator) -> TaskSeeds:
        """One draw for the whole exchange."""
        return TaskSeeds(int(rng.integers(MAX_SEED)))

    def of(self, client: ClientId) -> int:
        """A seed below SEED_LIMIT."""
        digest = hashlib.sha256(f"{self.draw}/{client}".encode()).digest()
        return int.from_bytes(digest[:8], "little") % MAX_SEED


@dataclass(frozen=True)
class ClientUpdates:
    """The fitted models of one exchange: client i has row `rows[i]` [schema.size] and `n[i]` training samples."""

    clients: tuple[ClientId, ...]
    rows: Array
    n: NDArray[np.float64] = field(repr=False)

    @staticmethod
    def from_replies(replies: Replies, size: int) -> ClientUpdates:
        """Sorted by client; a reply without a model counts as silence. Each is read once, maybe from a disk."""
        clients, n, rows = list[ClientId](), list[float](), np.empty((0, size))
        for client in sorted(replies):
            reply = replies[client]
            if reply.update is not None:
                if not clients:
                    rows = np.empty((len(replies), size), reply.update.dtype)
                rows[len(clients)] = reply.update
                clients.append(client)
                n.append(reply.n)
        return ClientUpdates(tuple(clients), rows[: len(clients)], np.array(n, dtype=np.float64))


def pack_by_client(name: str, values: Mapping[ClientId, Array]) -> dict[str, Array]:
    """One array per client as entries of `State.extra`; `unpack_by_client` reads them."""
    return {f"{name}/{c}": values[c] for c in sorted(values)}


def unpack_by_client(extra: Mapping[str, Array], name: str) -> dict[ClientId, Array]:
    """What `pack_by_client` wrote under this name, sorted by client."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): extra[key] for key in sorted(extra) if key.startswith(prefix)}


def merge_anchors(anchors: Array, mus: Sequence[float]) -> tuple[Flat | None, float]:
    """Anchors [s, p] with pulls [s] -> one anchor and one pull with the same gradient; (None, 0) without any pull."""
    strength = np.asarray(mus, dtype=np.float64)
    total = float(strength.sum())
    if not math.isfinite(total) or (strength < 0).any():
        raise ValueError(f"pulls must be finite and not negative, got {list(mus)}")
    if total == 0:
        return None, 0.0
    return (strength @ anchors / total).astype(anchors.dtype), total


def choose_by_loss(replies: Replies, rng: np.random.Generator) -> dict[ClientId, int]:
    """The candidate with the least loss for every client that answered, by lot among equals; NaN is the worst."""
    told = {
        c: np.where(np.isnan(r.losses), np.inf, r.losses) for c, r in sorted(replies.items()) if r.losses is not None
    }
    best = {c: np.flatnonzero(losses == losses.min()) for c, losses in told.items()}
    return {c: int(ks[0] if len(ks) == 1 else rng.choice(ks)) for c, ks in best.items()}


def serving_center(assignment: Mapping[ClientId, int], who: ClientId | None) -> int:
    """The center that serves `who`: its own, or for a device that has none the one with most devices."""
    counts = Counter(assignment.values())
    usual = min(counts, key=lambda k: (-counts[k], k), default=0)
    return usual if who is None else assignment.get(who, usual)
