"""What methods share: local SGD settings, cohorts, seeds, folded anchors, choosing by loss, what is clustered.

Pure functions over plain arrays. A model is a flat vector [schema.size]; clients are taken in sorted order everywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coordinator.strategies.base import Fleet, Replies
from edge_client.errors import ConfigError
from edge_client.protocol.task import Array, ClientId, Fit, Flat, Schema

SEED_LIMIT = 2**53  # the protocol's: JSON numbers are exact below it
REPRESENTATIONS = ("classifier", "all")
LARGEST_PULL = 2.0  # of lr * mu; above it each step of plain SGD overshoots the anchor by more than it was off


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

    def __post_init__(self) -> None:
        """Refuse settings that no device could carry out."""
        check("local-steps", self.local_steps, least=1)
        check("learning-rate", self.learning_rate, least=0.0)
        check("momentum", self.momentum, least=0.0, most=1.0)
        check("batch-size", self.batch_size, least=1, most=65_536)
        check("fraction-train", self.fraction_train, least=1e-9, most=1.0)

    def fit(self, *, start: Flat, seed: int, anchor: Flat | None = None, mu: float = 0.0) -> Fit:
        """One device's task: SGD from `start`, pulled to `anchor` [schema.size] with strength `mu`."""
        return Fit(
            start=start,
            anchor=anchor if mu > 0 else None,
            mu=mu,
            steps=self.local_steps,
            lr=self.learning_rate,
            momentum=self.momentum,
            batch=self.batch_size,
            seed=seed,
        )

    def check_pull(self, mu: float, who: str, *, setting: str) -> None:
        """Refuse a proximal pull that plain SGD cannot follow."""
        if self.learning_rate * mu > LARGEST_PULL:
            raise ConfigError(
                f"the proximal pull of {who} is mu = {mu:.4g}; with learning-rate {self.learning_rate} it diverges",
                hint=f"learning-rate * mu must not exceed 2; lower `{setting}` or `learning-rate`",
            )


def check(name: str, value: float, *, least: float, most: float = math.inf) -> None:
    """Raise ConfigError unless the setting is a finite number in [least, most]."""
    if not (math.isfinite(value) and least <= value <= most):
        span = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ConfigError(f"{name} is {value}", hint=f"use a number {span}")


def one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless the setting is one of the allowed words."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}", hint=f"use one of {', '.join(allowed)}")


def sample(fleet: Fleet, fraction: float, rng: np.random.Generator) -> list[ClientId]:
    """A sorted cohort of ceil(fraction * m) distinct clients; nothing is drawn when everybody is asked."""
    clients = sorted(fleet)
    count = math.ceil(fraction * len(clients))
    if count >= len(clients):
        return clients
    return sorted(clients[i] for i in rng.choice(len(clients), size=count, replace=False))


@dataclass(frozen=True)
class Seeds:
    """Task seeds of one exchange: they depend on one draw and the client's name, not on who else is asked."""

    draw: int

    @staticmethod
    def from_rng(rng: np.random.Generator) -> Seeds:
        """One draw for the whole exchange."""
        return Seeds(int(rng.integers(SEED_LIMIT)))

    def of(self, client: ClientId) -> int:
        """A seed below SEED_LIMIT."""
        digest = hashlib.sha256(f"{self.draw}/{client}".encode()).digest()
        return int.from_bytes(digest[:8], "little") % SEED_LIMIT


@dataclass(frozen=True)
class Updates:
    """The fitted models of one exchange: client i has row `rows[i]` [schema.size] and `n[i]` training samples."""

    clients: tuple[ClientId, ...]
    rows: Array
    n: NDArray[np.float64] = field(repr=False)

    @staticmethod
    def of(replies: Replies, size: int) -> Updates:
        """Sorted by client; a reply without a model counts as silence."""
        fitted = [(c, r.update, r.n) for c, r in sorted(replies.items()) if r.update is not None]
        rows = np.stack([u for _, u, _ in fitted]) if fitted else np.empty((0, size))
        return Updates(tuple(c for c, _, _ in fitted), rows, np.array([n for _, _, n in fitted], dtype=np.float64))


def fold(anchors: Array, mus: Sequence[float]) -> tuple[Flat | None, float]:
    """Anchors [s, p] with pulls [s] -> one anchor and one pull with the same gradient; (None, 0) without any pull."""
    strength = np.asarray(mus, dtype=np.float64)
    total = float(strength.sum())
    if not math.isfinite(total) or (strength < 0).any():
        raise ValueError(f"pulls must be finite and not negative, got {list(mus)}")
    if total == 0:
        return None, 0.0
    return (strength @ anchors / total).astype(anchors.dtype), total


def by_loss(replies: Replies) -> Mapping[ClientId, int]:
    """The candidate with the least loss for every client that answered; the first of equals."""
    return {c: int(np.argmin(r.losses)) for c, r in sorted(replies.items()) if r.losses is not None}


def representation(vectors: Array, schema: Schema, kind: str) -> Array:
    """[m, schema.size] -> [m, d]: what is compared when devices are clustered; never the buffers.

    "classifier" takes the last layer, which shows label skew best; "all" takes every parameter.
    """
    one_of("representation", kind, REPRESENTATIONS)
    if kind == "all" or not schema.classifier:
        return vectors[:, : schema.n_params]
    return np.concatenate([vectors[:, schema.slices[name]] for name in schema.classifier], axis=1)
