"""Emulated devices that attack: the labels that they train on, and the updates that they send.

    label-flip  trains on labels y -> classes - 1 - y, and sends the true update
    sign-flip   start - 4 (w - start)
    scale       start + 8 (w - start)
    noise       start + normal noise of four times the RMS of w - start
    nan         NaN in every parameter

The attackers and the noise are drawn from the seed. The factors stay below the coordinator's `max-update-ratio`, since
the coordinator refuses a larger update. Attackers answer probes and evaluations truly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coordinator.rounds.update_validation import delta_base
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import UsageError
from edge_client.protocol.program import IGNORED
from edge_client.protocol.task import ClientId, Fit, Flat, Reply, Task

Attack = Callable[[ClientId, Task, Reply], Reply]  # -> the reply that a device sends in place of the honest one
SIGN_FLIP_FACTOR, SCALE_FACTOR, NOISE_FACTOR = -4.0, 8.0, 4.0
ATTACKS = ("label-flip", "sign-flip", "scale", "noise", "nan")
MAX_ATTACKER_SHARE = 0.5  # no defence works against a majority


def no_attack(_who: ClientId, _task: Task, reply: Reply) -> Reply:
    """The honest reply."""
    return reply


@dataclass(frozen=True, kw_only=True)
class AttackSpec:
    """One of ATTACKS by a share of the fleet; by default no device attacks."""

    attack: str = "label-flip"
    share: float = 0.0

    def __post_init__(self) -> None:
        if self.attack not in ATTACKS:
            raise UsageError(f"unknown attack {self.attack!r}", hint=f"use one of {', '.join(ATTACKS)}")
        if not 0 <= self.share < MAX_ATTACKER_SHARE:
            raise UsageError(f"{self.share:g} of the devices are hostile", hint="use a share of 0 to below 0.5")

    def attackers(self, devices: Mapping[ClientId, DeviceData], seed: int) -> frozenset[ClientId]:
        """The devices that attack: the share of the fleet, rounded. Every attack has the same attackers."""
        names = sorted(devices)
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 1]))).permutation(len(names))
        return frozenset(names[i] for i in order[: round(self.share * len(names))])

    def poison_data(
        self, devices: Mapping[ClientId, DeviceData], attackers: frozenset[ClientId]
    ) -> dict[ClientId, DeviceData]:
        """Each device's samples, with flipped labels for attackers. Raises UsageError for samples without labels."""
        if self.attack != "label-flip" or not attackers:
            return dict(devices)
        if not all(np.issubdtype(local.train.y.dtype, np.integer) for local in devices.values()):
            raise UsageError("these samples have no labels to flip", hint="use another attack")
        last = max(int(local.train.y.max()) for local in devices.values())
        return {who: _flipped(local, last) if who in attackers else local for who, local in devices.items()}

    def make_attack(self, attackers: frozenset[ClientId], seed: int) -> Attack:
        """The function that replaces the attackers' updates; every other reply stays as it is."""
        if self.attack == "label-flip" or not attackers:
            return no_attack

        def lie(who: ClientId, task: Task, reply: Reply) -> Reply:
            if who not in attackers or reply.update is None or not isinstance(task, Fit):
                return reply
            return replace(reply, update=self._instead(reply.update, delta_base(task)[1], (seed, task.seed)))

        return lie

    def _instead(self, update: Flat, base: Flat | None, seeds: tuple[int, int]) -> Flat:
        start = np.zeros_like(update) if base is None else base.astype(update.dtype, copy=False)
        way = update - start
        if self.attack == "nan":
            return np.full_like(update, np.nan)
        if self.attack == "noise":
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seeds)))
            spread = NOISE_FACTOR * float(np.sqrt(np.mean(way.astype(np.float64) ** 2)))
            return (start + spread * rng.standard_normal(len(way))).astype(update.dtype)
        return (start + {"sign-flip": SIGN_FLIP_FACTOR, "scale": SCALE_FACTOR}[self.attack] * way).astype(update.dtype)


def parse_attack(text: str) -> AttackSpec:
    """Read a text like `sign-flip:0.2`; an empty text is no attack. Raises UsageError."""
    if not text:
        return AttackSpec()
    attack, _, share = text.partition(":")
    try:
        return AttackSpec(attack=attack, share=float(share))
    except ValueError:
        raise UsageError(f"hostile is {text!r}", hint="write it as sign-flip:0.2") from None


def honest_accuracy(record: Mapping[str, Any], attackers: frozenset[ClientId]) -> float | None:
    """Mean accuracy of the honest devices, each on its own held-out samples; None where none was tested."""
    found = [accuracy for who, accuracy in record["per_device"].items() if who not in attackers]
    return float(np.mean(found)) if found else None


def _flipped(local: DeviceData, last: int) -> DeviceData:
    y = local.train.y
    return replace(local, train=Dataset(local.train.x, np.where(y == IGNORED, y, last - y)))
